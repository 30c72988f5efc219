"""Fences and headings."""

import pytest

from corpus_builder.markdown import Fences, heading_starts, line_numbers, outside


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("```\na\n```", "```\na\n```"),
        ("~~~ yaml\na\n```\n~~~", "~~~ yaml\na\n```\n~~~"),
        ("````\n```\n````\nb", "````\n```\n````"),
        ("> ```\n> a\n> ```\nb", "> ```\n> a\n> ```"),
        ("- ```sh\n  a\n  ```\nb", "- ```sh\n  a\n  ```"),
    ],
)
def test_fence_ends_at_its_own_kind_and_length(text, inside):
    assert [text[start:end] for start, end in Fences(text).spans()] == [inside]


@pytest.mark.parametrize("text", ["```\nnever closed", "``\na\n``", "```a`b\nc\n```x", "a ``` b\n"])
def test_what_is_no_closed_fence_is_text(text):
    assert Fences(text).spans() == []


def test_headings_inside_a_fence_are_text():
    text = "# A\n```\n# b\n```\n## C\n#nospace\n"
    assert [text[start : start + 4].strip() for start in heading_starts(text)] == ["# A", "## C"]


@pytest.mark.parametrize("text", ["```\n" * 200_000, "````\n" + "```\n" * 200_000, "` " * 400_000, "~~~ `\n" * 100_000])
def test_megabyte_of_fences_ends(text):
    """In quadratic time each would take minutes."""
    spans = Fences(text).spans()
    assert all(start < end for start, end in spans)


def test_items_outside_of_spans():
    assert outside([(0, 4), (8, 9)], list("abcdefg"), [0, 2, 4, 5, 8, 9, 10]) == ["a", "d", "e", "g"]


def test_lines_are_counted_by_newlines_only():
    text = "a\u2028b\nc\x0bd\ne"
    assert line_numbers(text, [0, text.index("b"), text.index("d"), text.index("e")]) == [1, 1, 2, 3]
