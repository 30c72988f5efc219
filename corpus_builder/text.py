"""Bytes of a file -> text: the certain encodings first, then the likely ones; no byte is lost in silence. Pure.

decode(b"\\xb1\\xf9\\xcb\\xb7") -> Decoded(text="冰朔", encoding="gb18030", is_guessed=True)

Certain are byte order marks, valid UTF-8, and UTF-16 whose every second byte is NUL (most of it is ASCII). The
encodings older than Unicode are a guess, however good (`corpus_builder.legacy_encodings`).
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, replace

from corpus_builder.errors import Named, ProjectError
from corpus_builder.legacy_encodings import EAST_ASIAN, LIKELY, score_text

#: UTF-32 first: its little-endian mark begins with UTF-16's.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
#: Control characters that no text in a legacy encoding holds; they tell pictures and programs from text.
_CONTROLS = re.compile(r"[\x01-\x08\x0e-\x1a\x1c-\x1f\x7f]")
#: A file is damaged UTF-8, and not another encoding, from this many whole characters per broken byte on. Chosen:
#: text in GBK has about as many broken bytes as characters when it is read as UTF-8.
_WHOLE_PER_BROKEN = 20
#: UTF-16 without a mark, and no doubt: one byte in this many is NUL, all of them on one side of their pairs.
_NULS_FROM_SHARE = 1 / 8


@dataclass(frozen=True, slots=True)
class Decoded:
    """The text of a file. Broken bytes stand in the text as `\\xNN`; NUL characters do not, and are counted."""

    text: str
    encoding: str
    is_guessed: bool = False
    broken_bytes: int = 0
    nul_characters: int = 0


def decode(data: bytes, *, path: str = "") -> Decoded:
    """Return the text of `data`, with `\\n` at the end of each line.

    Raises:
        ProjectError: `text_unreadable`, when no encoding makes text of it.
    """
    readers = (_marked, _certain_utf16, _plain_utf8, _likely_utf16, _legacy, _detected)
    found = next((found for reader in readers if (found := reader(data)) is not None), None)
    if found is None:
        raise ProjectError("text_unreadable", path=Named(path))
    nuls = found.text.count("\0")
    text = found.text.replace("\0", "").replace("\r\n", "\n").replace("\r", "\n")
    return replace(found, text=text, nul_characters=nuls)


def _marked(data: bytes) -> Decoded | None:
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return _with_broken_bytes(data[len(mark) :], encoding)
    return None


def _certain_utf16(data: bytes) -> Decoded | None:
    """Read UTF-16 without a mark that is mostly ASCII: its NULs are all on one side, and many."""
    for encoding, high, low in (("utf-16-le", 1, 0), ("utf-16-be", 0, 1)):
        nuls = data[high::2].count(0)
        if nuls > 1 and nuls >= len(data) * _NULS_FROM_SHARE and not data[low::2].count(0):
            found = _with_broken_bytes(data, encoding)
            return None if found.broken_bytes > 1 or _CONTROLS.search(found.text) else found
    return None


def _plain_utf8(data: bytes) -> Decoded | None:
    try:
        return Decoded(data.decode("utf-8"), "utf-8")
    except UnicodeDecodeError:
        found = _with_broken_bytes(data, "utf-8")
        whole = sum(character > "\x7f" for character in found.text)
        return found if whole >= _WHOLE_PER_BROKEN * found.broken_bytes else None


def _with_broken_bytes(data: bytes, encoding: str) -> Decoded:
    try:
        return Decoded(data.decode(encoding), encoding)
    except UnicodeDecodeError:
        plain = len(data.decode(encoding, "ignore"))
        text = data.decode(encoding, "backslashreplace")
        return Decoded(text, encoding, broken_bytes=(len(text) - plain) // len(r"\xNN"))


def _likely_utf16(data: bytes) -> Decoded | None:
    """Read UTF-16 without a mark that is mostly Chinese or Japanese: only its spaces and line ends show a NUL."""
    if len(data) % 2 or not data.count(0):
        return None
    readings = []
    for encoding in ("utf-16-le", "utf-16-be"):
        found = _with_broken_bytes(data, encoding)
        if not found.broken_bytes and "\0" not in found.text and not _CONTROLS.search(found.text):
            readings.append((max(score_text(found.text, one) for one in EAST_ASIAN), found))
    return _best(readings)


def _legacy(data: bytes) -> Decoded | None:
    """Read an East Asian encoding: the one in which the text has the most common characters."""
    readings = []
    for encoding in EAST_ASIAN:
        found = _with_broken_bytes(data, encoding)
        if len(found.text) >= _WHOLE_PER_BROKEN * found.broken_bytes and not _CONTROLS.search(found.text):
            readings.append((score_text(found.text, encoding), found))
    return _best(readings)


def _best(readings: list[tuple[float, Decoded]]) -> Decoded | None:
    score, found = max(readings, key=lambda one: (one[0], -one[1].broken_bytes), default=(0.0, None))
    return None if found is None or score < LIKELY else replace(found, is_guessed=True)


def _detected(data: bytes) -> Decoded | None:
    from charset_normalizer import from_bytes

    best = from_bytes(data).best()
    if best is None:
        return None
    try:
        text = data.decode(best.encoding)
    except (UnicodeDecodeError, LookupError):
        return None
    return None if _CONTROLS.search(text) else Decoded(text, best.encoding, is_guessed=True)
