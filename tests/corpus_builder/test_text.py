"""Bytes become text; nothing is lost in silence."""

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus_builder.errors import ProjectError
from corpus_builder.text import decode

WORDS = "铸渊：你好，冰朔。\n第二行"
TRADITIONAL = "守燈人：開發者您好，這是一個測試檔案。\n今天要討論如何訓練模型。"
JAPANESE = "灯台守：こんにちは。\n今日は海が静かですね。"


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        (WORDS.encode("utf-8"), "utf-8"),
        (codecs.BOM_UTF8 + WORDS.encode("utf-8"), "utf-8"),
        (codecs.BOM_UTF16_LE + WORDS.encode("utf-16-le"), "utf-16-le"),
        (codecs.BOM_UTF16_BE + WORDS.encode("utf-16-be"), "utf-16-be"),
        (codecs.BOM_UTF32_LE + WORDS.encode("utf-32-le"), "utf-32-le"),
    ],
)
def test_certain_encodings(data, encoding):
    decoded = decode(data)
    assert (decoded.text, decoded.encoding, decoded.is_guessed) == (WORDS, encoding, False)


@pytest.mark.parametrize(
    ("words", "encoding", "named"),
    [
        (WORDS, "gbk", "gb18030"), (WORDS, "gb18030", "gb18030"), (TRADITIONAL, "gbk", "gb18030"),
        (TRADITIONAL, "big5", "big5"), (JAPANESE, "shift_jis", "shift_jis"), (JAPANESE, "gb18030", "gb18030"),
    ],
)  # fmt: skip
def test_encoding_older_than_unicode_is_a_guess(words, encoding, named):
    decoded = decode(words.encode(encoding))
    assert (decoded.text, decoded.encoding, decoded.is_guessed) == (words, named, True)


def test_broken_byte_in_gbk_stays_visible_and_is_counted():
    data = (WORDS * 9).encode("gbk") + b"\xff" + "点灯".encode("gbk")
    decoded = decode(data)
    assert decoded.text == WORDS * 9 + "\\xff点灯"
    assert (decoded.encoding, decoded.broken_bytes) == ("gb18030", 1)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize(("words", "is_guessed"), [("user: hello\nKestrin: hi", False), (WORDS + "。一", True)])
def test_utf16_without_a_mark(words, is_guessed, encoding):
    decoded = decode(words.encode(encoding))
    assert (decoded.text, decoded.encoding, decoded.is_guessed) == (words, encoding, is_guessed)


def test_nul_characters_are_left_out_and_counted():
    decoded = decode("守灯人\0点灯\0\0".encode())
    assert (decoded.text, decoded.nul_characters, decoded.encoding) == ("守灯人点灯", 3, "utf-8")


def test_line_ends_become_newlines_and_nothing_else_does():
    assert decode(b"a\r\nb\rc\n").text == "a\nb\nc\n"
    assert decode("a\u2028b\x85c".encode()).text == "a\u2028b\x85c"


def test_broken_byte_in_long_utf8_stays_visible_and_is_counted():
    data = ("守灯人" * 20).encode() + b"\xff" + "点灯".encode()
    decoded = decode(data)
    assert decoded.text == "守灯人" * 20 + "\\xff点灯"
    assert (decoded.encoding, decoded.broken_bytes) == ("utf-8", 1)


def test_half_a_character_of_utf16_is_counted():
    decoded = decode(codecs.BOM_UTF16_LE + "灯".encode("utf-16-le") + b"\x41")
    assert decoded.text.startswith("灯")
    assert decoded.broken_bytes == 1


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\n\x00\x00\x00\xff\xfe\x80", bytes(range(256))])
def test_what_is_no_text_is_refused(data):
    with pytest.raises(ProjectError, match="text_unreadable"):
        decode(data, path="a.md")


@given(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\r\ufeff\0")))
def test_utf8_comes_back_whole(text):
    assert decode(text.encode("utf-8")).text == text


@given(st.binary(max_size=200))
def test_any_bytes_are_text_or_refused(data):
    try:
        decoded = decode(data)
    except ProjectError:
        return
    assert decoded.text.encode("utf-8").decode("utf-8") == decoded.text  # no half characters
    assert 0 <= decoded.broken_bytes <= len(data)
