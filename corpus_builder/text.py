"""Bytes of a file -> text: the certain encodings first, then the likely ones; no byte is lost in silence. Pure.

decode(b"\\xb1\\xf9\\xcb\\xb7") -> Decoded(text="冰朔", encoding="gb18030", is_guessed=True, broken_bytes=0)
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

from corpus_builder.errors import Named, ProjectError

#: UTF-32 first: its little-endian mark begins with UTF-16's.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
#: Control characters that no text in a legacy encoding holds; they tell pictures and programs from text.
_CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
#: A file is damaged UTF-8, and not another encoding, from this many whole characters per broken byte on. Chosen:
#: text in GBK has about as many broken bytes as characters when it is read as UTF-8.
_WHOLE_PER_BROKEN = 20


@dataclass(frozen=True, slots=True)
class Decoded:
    """The text of a file. Broken bytes stand in the text as `\\xNN`, so that none is lost."""

    text: str
    encoding: str
    is_guessed: bool = False
    broken_bytes: int = 0


def decode(data: bytes, *, path: str = "") -> Decoded:
    """Return the text of `data`, with `\\n` at the end of each line.

    Raises:
        ProjectError: `text_unreadable`, when no encoding makes text of it.
    """
    found = _marked(data) or _plain_utf8(data) or _gb18030(data) or _detected(data)
    if found is None:
        raise ProjectError("text_unreadable", path=Named(path))
    text = found.text.replace("\r\n", "\n").replace("\r", "\n")
    return Decoded(text, found.encoding, found.is_guessed, found.broken_bytes)


def _marked(data: bytes) -> Decoded | None:
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return _with_broken_bytes(data[len(mark) :], encoding)
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


def _gb18030(data: bytes) -> Decoded | None:
    try:
        text = data.decode("gb18030")
    except UnicodeDecodeError:
        return None
    return None if _CONTROLS.search(text) else Decoded(text, "gb18030", is_guessed=True)


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
