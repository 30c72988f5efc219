"""Units that say the same, or nearly; and which side of the split each unit is on.

Small corpora are compared exactly, larger ones by sketches that are kept from build to build. Side effects: reads
the entries, reads and writes the sketches' file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from corpus_builder.entries import Piece, read_pieces
from corpus_builder.groups import Groups
from corpus_builder.ledger import Ledger
from corpus_builder.private_file import gone_on_failure, partial_of
from corpus_builder.shingles import Words, shingles, similar_pairs

#: Up to here each pair that may be alike is compared exactly: it takes half a second, as long as datasketch loads.
EXACT_UP_TO_CHARACTERS = 500_000

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Pairs of units, the earlier one first; each later unit stands once. `groups` joins what says the same."""

    groups: Groups
    equal: list[Pair] = field(default_factory=list)
    near: list[Pair] = field(default_factory=list)


def find_duplicates(
    ledger: Ledger, entries: Sequence[Path | None], *, similarity: float, sketches_path: Path
) -> Duplicates:
    """Return what says the same in a corpus; `entries` are the ledger's files, in its order."""
    found = Duplicates(Groups(len(ledger)))
    for earlier, later in ledger.equal_pairs():
        found.groups.join(earlier, later)
        found.equal.append((earlier, later))
    firsts = [unit for unit in range(len(ledger)) if found.groups.find(unit) == unit and ledger.characters[unit]]
    if len(firsts) < 2:
        return found
    if sum(ledger.characters[unit] for unit in firsts) <= EXACT_UP_TO_CHARACTERS:
        pairs = _exact(firsts, entries, similarity)
    else:
        pairs = _sketched(firsts, ledger, entries, similarity, sketches_path)
    for earlier, later in pairs:
        found.groups.join(earlier, later)
        if not ledger.may_repeat(earlier, later):
            found.near.append((earlier, later))
    return found


def _exact(units: Sequence[int], entries: Sequence[Path | None], similarity: float) -> Iterator[Pair]:
    words = Words()
    sets = [shingles(words.coded(text)) for _, text in _texts(units, entries)]
    for earlier, later in similar_pairs(sets, similarity, Groups(len(units))):
        yield units[earlier], units[later]


def _sketched(
    units: Sequence[int], ledger: Ledger, entries: Sequence[Path | None], similarity: float, path: Path
) -> Iterator[Pair]:
    from corpus_builder import sketches

    known = sketches.unpack_sketches(_load(path))
    wanted = [unit for unit in units if ledger.said[unit] not in known]
    if wanted:
        sketcher = sketches.Sketcher()
        for unit, text in _texts(wanted, entries):
            known[ledger.said[unit]] = sketcher.sketch(text)
    used = {ledger.said[unit]: known[ledger.said[unit]] for unit in units}
    if wanted or len(used) < len(known):
        _save(sketches.pack_sketches(used), path)
    ordered = [used[ledger.said[unit]] for unit in units]
    for earlier, later in sketches.similar_pairs(ordered, similarity, Groups(len(units))):
        yield units[earlier], units[later]


def _texts(units: Sequence[int], entries: Sequence[Path | None]) -> Iterator[tuple[int, str]]:
    """Yield each of the ascending `units` with what it says."""
    number, rest = 0, iter(units)
    wanted = next(rest, None)
    for entry in entries:
        for pieces in read_pieces(entry) if entry is not None and wanted is not None else ():
            if number == wanted:
                yield number, text_of(pieces)
                wanted = next(rest, None)
            number += 1


def text_of(pieces: Sequence[Piece]) -> str:
    """Return what a unit says: of a document the text alone, else all the turns, each once."""
    first = [piece.sample for piece in pieces if piece.sample.replica == pieces[0].sample.replica]
    is_soul = bool(first) and first[0].sample_class == "soul"
    turns = [turn for sample in first for turn in sample.messages if turn.is_trained or not is_soul]
    return "\n".join(dict.fromkeys(turn.content for turn in turns if turn.role != "system"))


def held_out(ledger: Ledger, groups: Groups, share: float) -> bytearray:
    """Return 1 for each unit of the validation split, 0 for the others.

    A document or dialog is on one side, and so is what says the same. The side follows from the documents' names
    alone, so it stays when others come and go.
    """
    sides = bytearray(len(ledger))
    if share <= 0:
        return sides
    first_of: dict[int, int] = {}
    for unit, document in enumerate(ledger.documents):
        groups.join(first_of.setdefault(document, unit), unit)
    least: dict[int, int] = {}
    for unit, document in enumerate(ledger.documents):
        group = groups.find(unit)
        least[group] = min(least.get(group, document), document)
    for unit in range(len(ledger)):
        sides[unit] = _drawn(least[groups.find(unit)]) < share
    return sides


def _drawn(document: int) -> float:
    """Return a number from 0 to 1 that belongs to a document."""
    return int.from_bytes(hashlib.sha256(document.to_bytes(8, "big")).digest()[:6], "big") / 2**48


def _load(path: Path) -> bytes:
    """Return the content of a file that `_save` wrote, nothing of any other."""
    try:
        packed = path.read_bytes()
    except OSError:
        return b""
    return packed[32:] if hashlib.sha256(packed[32:]).digest() == packed[:32] else b""


def _save(content: bytes, path: Path) -> None:
    partial = partial_of(path)
    with gone_on_failure(partial):
        partial.write_bytes(hashlib.sha256(content).digest() + content)
    os.replace(partial, path)
