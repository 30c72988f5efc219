"""A JSON file of any size -> its values, one after another: a list's items, JSONL's lines, or the values as they stand.

Side effects: reads the file. UTF-8 with and without a mark, UTF-16 and the encodings older than Unicode are read
alike. What is no JSON is a `Broken` value in its place; a broken line costs that line, a broken list all behind it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corpus_builder.text import decode

_HEAD_BYTES = 256 * 1024
_CHUNK_BYTES = 256 * 1024
_ESCAPED_BYTE = re.compile("[\udc00-\udcff]")
_ESCAPE_BYTES = "zyforge.escape_bytes"
#: Half of a surrogate pair, as an escape; the first finds candidates, the second goes from escape to escape.
_HALF = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F][0-9a-fA-F]{2}", re.DOTALL
)
_ESCAPE = re.compile(
    rb"\\(?:(u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
_FIRST_HALF = re.compile(rb"\\u[dD][89abAB]..\Z", re.DOTALL)
_LONGEST_ESCAPE = len(r"\ud83d\ude00")
#: A line that ends like this is the start of a value that goes on, not a line of JSONL.
_GOES_ON = (b"{", b"[", b",")


def _escape_bytes(error: UnicodeError) -> tuple[str, int]:
    """Put halves of characters in place of bytes that are no text; `surrogateescape` does not for those of ASCII."""
    assert isinstance(error, UnicodeDecodeError)
    return "".join(chr(0xDC00 + byte) for byte in error.object[error.start : error.end]), error.end


codecs.register_error(_ESCAPE_BYTES, _escape_bytes)


@dataclass(frozen=True, slots=True)
class Broken:
    """What stands in place of a value that could not be read; `reason` is a word of the account."""

    reason: str = "bad_json"


class JsonFile:
    """An open JSON file, read as UTF-8 whatever it is written in.

    Attributes:
        encoding, is_guessed: How it is decoded.
        broken_bytes: Bytes so far that were no text; each stands as `\\xNN` in the string that it broke.
        half_characters: Escapes so far that are half of a character (`\\ud83d` alone); each stands as U+FFFD.
    """

    def __init__(self, path: Path) -> None:
        """Open the file; raise OSError, or `text_unreadable` where its beginning is no text."""
        self._file = path.open("rb")
        try:
            head = self._file.read(_HEAD_BYTES)
            self.encoding, self.is_guessed, mark = _encoding_of(head)
        except BaseException:
            self._file.close()
            raise
        self.broken_bytes = self.half_characters = 0
        self._rest = b""
        self._decoder = codecs.getincrementaldecoder(self.encoding)(_ESCAPE_BYTES)
        self._is_at_end = False
        self._ahead = self._utf8(head[mark:], final=len(head) < _HEAD_BYTES)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self, size: int = _CHUNK_BYTES) -> bytes:
        """Return the next bytes, about `size`, as UTF-8; none at the end."""
        if self._ahead or size == 0:
            ahead, self._ahead = (b"", self._ahead) if size == 0 else (self._ahead, b"")
            return ahead
        while not self._is_at_end:
            data = self._file.read(_CHUNK_BYTES)
            self._is_at_end = not data
            if text := self._utf8(data, final=not data):
                return text
        return b""

    def peek(self) -> bytes:
        """Return the beginning of what comes next without taking it, white space left out."""
        while not self._ahead.lstrip():
            self._ahead = b""
            self._ahead = self.read()
            if not self._ahead:
                return b""
        return self._ahead.lstrip()

    def lines(self) -> Iterator[bytes]:
        """Yield the lines; `\\n` alone ends one, since U+2028 may stand inside a string."""
        rest = b""
        while data := self.read():
            *lines, rest = (rest + data).split(b"\n") if b"\n" in data else (rest + data,)
            yield from lines
        if rest:
            yield rest

    def _utf8(self, data: bytes, *, final: bool) -> bytes:
        text = self._decoder.decode(data, final)
        try:
            encoded = text.encode("utf-8")
        except UnicodeEncodeError:
            text, count = _ESCAPED_BYTE.subn(lambda byte: rf"\\x{ord(byte[0]) - 0xDC00:02x}", text)
            self.broken_bytes += count
            encoded = text.encode("utf-8", "replace")
        return self._whole(self._rest + encoded, final=final)

    def _whole(self, data: bytes, *, final: bool) -> bytes:
        """Return `data` without half characters; an escape that may go on is kept for the next bytes."""
        end = len(data) if final else _escapes_end(data)
        data, self._rest = data[:end], data[end:]
        return _ESCAPE.sub(self._mended, data) if _HALF.search(data) else data

    def _mended(self, escape: re.Match[bytes]) -> bytes:
        if escape[2] is None:
            return escape[0]
        self.half_characters += 1
        return rb"\ufffd"


def _escapes_end(data: bytes) -> int:
    """Return where the last escape that may not be whole yet begins."""
    at = data.find(b"\\", max(0, len(data) - _LONGEST_ESCAPE))
    if at < 0:
        return len(data)
    if _FIRST_HALF.match(data[max(0, at - 6) : at]):
        at -= 6
    while at > 0 and data[at - 1] == 0x5C:
        at -= 1
    return at if at > 0 or len(data) < _CHUNK_BYTES else len(data)


def _encoding_of(head: bytes) -> tuple[str, bool, int]:
    """Return encoding, whether it is a guess, and the length of its mark."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
        if not head.startswith(codecs.BOM_UTF8) and b"\0" not in head:
            return "utf-8", False, 0
    except UnicodeDecodeError:
        pass
    found = decode(head)
    mark = "\ufeff".encode(found.encoding) if found.encoding.startswith("utf") else b""
    return found.encoding, found.is_guessed, len(mark) if mark and head.startswith(mark) else 0


def read_values(file: JsonFile) -> Iterator[tuple[int, Any]]:
    """Yield the items of a list, the lines of JSONL, or the values of the file, with their line or number from 1."""
    start = file.peek()
    if start.startswith(b"["):
        return read_at(file, "item")
    if _is_one_value(start):
        return read_at(file, "")
    return _read_lines(file)


def _is_one_value(start: bytes) -> bool:
    first, newline, _ = start.partition(b"\n")
    if not newline or not first.rstrip().endswith(_GOES_ON):
        return False
    return isinstance(_loads(first), Broken)


def _read_lines(file: JsonFile) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file.lines(), start=1):
        if line.strip():
            yield number, _loads(line)


def _loads(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return Broken()


def read_at(file: JsonFile, prefix: str, *, is_mapping: bool = False) -> Iterator[tuple[int, Any]]:
    """Yield the values that stand at an ijson prefix, numbered from 1; of a mapping, its keys with their values.

    Source: ijson's README, section "Prefix": `item` is each item of a list.
    """
    import ijson

    walk = ijson.kvitems if is_mapping else ijson.items
    number = 0
    try:
        for number, value in enumerate(
            walk(file, prefix, use_float=True, multiple_values=True, buf_size=_CHUNK_BYTES), start=1
        ):
            yield number, value
    except (ijson.JSONError, ValueError, OverflowError, RecursionError):
        yield number + 1, Broken()
