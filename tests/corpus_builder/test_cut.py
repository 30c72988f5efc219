"""Texts are cut at the best borders, and joined they are the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus_builder.cut import cut_text, tail_that_fits
from corpus_builder.errors import ProjectError
from corpus_builder.token_counts import TokenCounts


class Costs:
    """Each character costs what `measure` says."""

    def __init__(self, measure):
        self.measure = measure

    def texts(self, texts):
        return [self.measure(text) for text in texts]

    def ends(self, text):
        return [at + 1 for at, character in enumerate(text) for _ in range(self.measure(character))]


CHARACTERS, BYTES = Costs(len), Costs(lambda text: len(text.encode()))
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
    assert cut_text(TEXT, limit, CHARACTERS) == pieces


def test_long_line_is_cut_after_a_sentence_then_a_word_then_anywhere():
    assert cut_text("One two. Three four five", 14, CHARACTERS) == ["One two. ", "Three four ", "five"]
    assert cut_text("一句。两句！三", 4, CHARACTERS) == ["一句。", "两句！三"]
    assert cut_text("abcdefgh", 3, CHARACTERS) == ["abc", "def", "gh"]


def test_character_that_does_not_fit_is_refused():
    with pytest.raises(ProjectError, match="window_too_small"):
        cut_text("灯", 2, BYTES)


def test_tail_starts_at_a_line_where_one_is_near():
    assert tail_that_fits("aaaa\nbbbb\ncccc", 7, CHARACTERS) == "cccc"
    assert tail_that_fits("abcdefgh", 3, CHARACTERS) == "fgh"
    assert tail_that_fits("灯", 1, BYTES) == ""


texts = st.text(st.characters(exclude_categories=("Cs",)) | st.sampled_from("#`~\n\n .。a"), max_size=300)


@given(text=texts, limit=st.integers(8, 60))
def test_pieces_join_to_the_text_and_fit(frame, text, limit):
    pieces = cut_text(text, limit, TokenCounts(frame))
    assert "".join(pieces) == text
    assert all(len(frame.encode_text(piece)) <= limit for piece in pieces)
    assert all(pieces) or text == ""


@given(text=texts, limit=st.integers(1, 60))
def test_tail_is_the_end_of_the_text_and_fits(frame, text, limit):
    tail = tail_that_fits(text, limit, TokenCounts(frame))
    assert text.endswith(tail)
    assert len(frame.encode_text(tail)) <= limit
