"""Texts are cut at the best borders, and joined they are the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus_builder.cut import cut_text, tail_that_fits
from corpus_builder.errors import ProjectError

TEXT = "# A\n\nfirst paragraph.\n\nsecond one\n## B\n\n```\ncode one\n\ncode two\n```\n\nlast words"


@pytest.mark.parametrize(
    ("limit", "pieces"),
    [
        (100, [TEXT]),
        (60, ["# A\n\nfirst paragraph.\n\nsecond one\n", "## B\n\n```\ncode one\n\ncode two\n```\n\nlast words"]),
        (
            40,
            ["# A\n\nfirst paragraph.\n\nsecond one\n", "## B\n\n```\ncode one\n\ncode two\n```\n\n", "last words"],
        ),
    ],
)
def test_best_border_wins(limit, pieces):
    assert cut_text(TEXT, limit, len) == pieces


def test_long_line_is_cut_after_a_sentence_then_a_word_then_anywhere():
    assert cut_text("One two. Three four five", 14, len) == ["One two. ", "Three four ", "five"]
    assert cut_text("一句。两句！三", 4, len) == ["一句。", "两句！三"]
    assert cut_text("abcdefgh", 3, len) == ["abc", "def", "gh"]


def test_character_that_does_not_fit_is_refused():
    with pytest.raises(ProjectError, match="window_too_small"):
        cut_text("灯", 2, lambda text: len(text.encode()))


def test_tail_starts_at_a_line_where_one_is_near():
    assert tail_that_fits("aaaa\nbbbb\ncccc", 7, len) == "cccc"
    assert tail_that_fits("abcdefgh", 3, len) == "fgh"
    assert tail_that_fits("灯", 1, lambda text: len(text.encode())) == ""


texts = st.text(st.characters(exclude_categories=("Cs",)) | st.sampled_from("#`~\n\n .。a"), max_size=300)


@given(text=texts, limit=st.integers(8, 60))
def test_pieces_join_to_the_text_and_fit(frame, text, limit):
    def measure(piece):
        return len(frame.encode_text(piece))

    pieces = cut_text(text, limit, measure)
    assert "".join(pieces) == text
    assert all(measure(piece) <= limit for piece in pieces)
    assert all(pieces) or text == ""


@given(text=texts, limit=st.integers(1, 60))
def test_tail_is_the_end_of_the_text_and_fits(frame, text, limit):
    tail = tail_that_fits(text, limit, lambda piece: len(frame.encode_text(piece)))
    assert text.endswith(tail)
    assert len(frame.encode_text(tail)) <= limit
