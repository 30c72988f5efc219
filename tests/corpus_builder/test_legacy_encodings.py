"""Which encoding text from before Unicode is in."""

import random

import pytest
from babel import Locale
from hypothesis import given
from hypothesis import strategies as st

from corpus_builder.legacy_encodings import EAST_ASIAN, rank_encodings, score_text

ALL = (*EAST_ASIAN, "cp437")


def names(locale, encoding):
    """Return real words, encoded: names of countries and languages."""
    known = Locale.parse(locale)
    words = sorted({str(word) for words in (known.territories, known.languages) for word in words.values()})
    found = []
    for word in words:
        try:
            found.append(f"{word}.md".encode(encoding))
        except UnicodeEncodeError:
            continue
    return [name for name in found if not name.isascii()]


@pytest.mark.parametrize(
    ("locale", "encoding", "named"),
    [
        ("zh_Hans", "gbk", "gb18030"), ("zh_Hant", "gbk", "gb18030"), ("zh_Hant", "big5", "big5"),
        ("ja", "shift_jis", "shift_jis"), ("de", "cp437", "cp437"), ("fr", "cp437", "cp437"),
    ],
)  # fmt: skip
def test_five_names_are_enough(locale, encoding, named):
    draw, known = random.Random(1), names(locale, encoding)
    assert len(known) > 50
    found = [rank_encodings(b"\n".join(draw.sample(known, 5)), ALL)[0][0] for _ in range(200)]
    assert found == [named] * 200


@given(st.binary(max_size=60))
def test_any_bytes_have_a_best_encoding(data):
    ranked = rank_encodings(data, ALL)
    assert ranked
    assert all(0 <= score <= 1 for _, score in ranked)
    assert [score for _, score in ranked] == sorted((score for _, score in ranked), reverse=True)


def test_plain_text_is_text_in_any_encoding():
    assert score_text("plain", "gb18030") == 1
