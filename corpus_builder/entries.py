"""One input file, prepared, on disk: its samples with their token counts, then its summary, then a digest of both.

Side effects: writes and reads files. An entry whose digest is not that of its bytes does not exist for us.

    {"texts": ["Who?", …], "pieces": [["soul:a.md", "soul", 1.0, 0, ["a.md", 1, 9], [["user", 0, true], …], 54, 12]]}
    {"file": {…}, "units_read": 4, …}                                                            the summary
    3fa1…  000000001234                                     sha256 of the lines before it, where the summary starts
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from corpus_builder.reading import InputFile
from corpus_builder.sample import Message, Origin, Sample
from corpus_builder.screen import Receipt

_TRAILER_BYTES = 64 + 1 + 15 + 1
_BLOCK_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """One sample as it will be trained, but for the plan's system prompt; the counts are the sample's own."""

    sample: Sample
    tokens: int
    trained_tokens: int


@dataclass(frozen=True, slots=True)
class Mark:
    """What a unit says, in numbers (64 bits of sha256 each); its replicas share a mark.

    Attributes:
        place: Where it stands.
        document: The document or dialog that it belongs to; all of it goes to one side of the split.
        said: Its letters and digits.
        characters: How many of them.
        line: Where it starts in the file.
        conversations: The turns as they are, per replica.
        answers: Prompt and target of each trained turn, in turn, of all replicas.
    """

    place: int
    document: int
    said: int
    characters: int
    line: int
    conversations: tuple[int, ...]
    answers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The account of one prepared file, as far as it depends on nothing but the file, the plan and the tokenizer."""

    file: InputFile
    units_read: int
    units_kept: int
    samples: int
    lost_tokens: int
    rounds: int = 0
    drops: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    unknown_speakers: tuple[str, ...] = ()
    suite_questions: tuple[int, ...] = ()
    receipts: dict[str, Receipt] = field(default_factory=dict)
    marks: tuple[Mark, ...] = ()


class EntryWriter:
    """Writes one entry beside its place; `finish` moves it there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f"{path.name}.partial")
        self._digest = hashlib.sha256()
        self._written = 0

    def __enter__(self) -> EntryWriter:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._partial.unlink(missing_ok=True)
        self._file = os.fdopen(os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        return self

    def add(self, pieces: tuple[Piece, ...]) -> None:
        """Append the samples of one unit."""
        texts: dict[str, int] = {}
        packed = [_pack_piece(piece, texts) for piece in pieces]
        self._write({"texts": list(texts), "pieces": packed})

    def finish(self, summary: Summary) -> None:
        """Append the summary and put the entry where it belongs."""
        start = self._written
        self._write(_pack_summary(summary))
        self._file.write(f"{self._digest.hexdigest()} {start:015d}\n".encode())
        self._file.close()
        os.replace(self._partial, self._path)

    def _write(self, packed: dict[str, Any]) -> None:
        line = (json.dumps(packed, ensure_ascii=False, separators=(",", ":")) + "\n").encode("utf-8", "surrogatepass")
        self._digest.update(line)
        self._written += self._file.write(line)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._partial.unlink(missing_ok=True)  # first: closing writes what is left, and may fail on a full disk
        with suppress(OSError):
            self._file.close()


def load_summary(path: Path) -> Summary | None:
    """Return the summary of an entry whose bytes are those that were written, None for any other file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TRAILER_BYTES))
            digest, _, start = file.read().decode("ascii").rstrip("\n").partition(" ")
            file.seek(0)
            if _digest_of(file, size - _TRAILER_BYTES) != digest:
                return None
            file.seek(int(start))
            return _unpack_summary(json.loads(file.readline().decode("utf-8", "surrogatepass")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest_of(file: Any, size: int) -> str:
    digest = hashlib.sha256()
    while size > 0 and (block := file.read(min(size, _BLOCK_BYTES))):
        digest.update(block)
        size -= len(block)
    return digest.hexdigest()


def read_pieces(path: Path) -> Iterator[tuple[Piece, ...]]:
    """Yield the samples of an entry that `load_summary` has found whole, unit by unit."""
    with path.open("rb") as file:
        for line in file:
            packed = json.loads(line.decode("utf-8", "surrogatepass"))
            if "pieces" not in packed:
                return
            yield tuple(_unpack_piece(piece, packed["texts"]) for piece in packed["pieces"])


def _pack_piece(piece: Piece, texts: dict[str, int]) -> list[Any]:
    sample, origin = piece.sample, piece.sample.origin
    return [
        sample.source,
        sample.sample_class,
        sample.weight,
        sample.replica,
        None if origin is None else [origin.path, origin.start_line, origin.end_line],
        [[turn.role, texts.setdefault(turn.content, len(texts)), turn.train] for turn in sample.messages],
        piece.tokens,
        piece.trained_tokens,
    ]


def _unpack_piece(packed: list[Any], texts: list[str]) -> Piece:
    source, sample_class, weight, replica, origin, turns, tokens, trained_tokens = packed
    sample = Sample(
        messages=tuple(Message(role, texts[at], train) for role, at, train in turns),
        source=source,
        sample_class=sample_class,
        weight=weight,
        replica=replica,
        origin=None if origin is None else Origin(*origin),
    )
    return Piece(sample, tokens, trained_tokens)


def _pack_summary(summary: Summary) -> dict[str, Any]:
    packed = asdict(replace(summary, marks=()))
    packed["marks"] = [
        (mark.place, mark.document, mark.said, mark.characters, mark.line, mark.conversations, mark.answers)
        for mark in summary.marks
    ]
    return packed


def _unpack_summary(packed: dict[str, Any]) -> Summary:
    return Summary(
        **{
            **packed,
            "file": InputFile(**packed["file"]),
            "unknown_speakers": tuple(packed["unknown_speakers"]),
            "suite_questions": tuple(packed["suite_questions"]),
            "receipts": {kind: Receipt(**receipt) for kind, receipt in packed["receipts"].items()},
            "marks": tuple(_unpack_mark(mark) for mark in packed["marks"]),
        }
    )


def _unpack_mark(packed: list[Any]) -> Mark:
    place, document, said, characters, line, conversations, answers = packed
    return Mark(place, document, said, characters, line, tuple(conversations), tuple(answers))
