"""Fences and headings."""

import pytest

from corpus_builder.markdown import Fences, heading_starts, line_numbers


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


def test_lines_are_counted_by_newlines_only():
    text = "a\u2028b\nc\x0bd\ne"
    assert line_numbers(text, [0, text.index("b"), text.index("d"), text.index("e")]) == [1, 1, 2, 3]
