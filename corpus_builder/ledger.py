"""What all units of a corpus say, in a few bytes each: copies, equal texts, prompts with several targets. Pure."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from corpus_builder.entries import Summary

#: Prompts that Python sorts out by itself; beyond, numpy does (it takes 0.1 s to import).
_FEW = 100_000


@dataclass(frozen=True, slots=True)
class Place:
    """A unit's file and the line where it starts."""

    path: str
    line: int


class Ledger:
    """The marks of all files, in the corpus's order. A unit's number is its position there.

    Attributes:
        documents, said, characters: Per unit, as in `Mark`.
    """

    def __init__(self) -> None:
        self.documents, self.said, self.characters = array("Q"), array("Q"), array("L")
        self._lines = array("L")
        self._starts, self._files = array("L"), list[tuple[str, str]]()
        self._first_places: dict[int, int] = {}
        self._prompts, self._targets, self._askers = array("Q"), array("Q"), array("L")

    def __len__(self) -> int:
        return len(self.said)

    def enter(self, summary: Summary) -> int:
        """Take the marks of a file and return how many of its conversations another unit has had before."""
        self._starts.append(len(self))
        self._files.append((summary.file.name, summary.file.sample_class))
        copies = 0
        for mark in summary.marks:
            self._prompts.extend(mark.answers[::2])
            self._targets.extend(mark.answers[1::2])
            self._askers.extend([len(self)] * (len(mark.answers) // 2))
            self._lines.append(mark.line)
            self.documents.append(mark.document)
            self.said.append(mark.said)
            self.characters.append(mark.characters)
            firsts = (self._first_places.setdefault(one, mark.place) for one in mark.conversations)
            copies += sum(first != mark.place for first in firsts)
        return copies

    def file_of(self, unit: int) -> tuple[str, str]:
        """Return the name and the class of a unit's file."""
        return self._files[bisect_right(self._starts, unit) - 1]

    def place_of(self, unit: int) -> Place:
        """Return where a unit stands."""
        return Place(self.file_of(unit)[0], self._lines[unit])

    def may_repeat(self, one: int, other: int) -> bool:
        """Whether two units are expected to say the same: a document as a whole, and a section of it."""
        return self.documents[one] == self.documents[other] and self.file_of(one)[1] == "soul"

    def equal_pairs(self) -> Iterator[tuple[int, int]]:
        """Yield each unit that says what an earlier one says, after the first that does."""
        first: dict[int, int] = {}
        for unit, said in enumerate(self.said):
            earlier = first.setdefault(said, unit)
            if earlier != unit and self.characters[unit] and not self.may_repeat(earlier, unit):
                yield earlier, unit

    def contradictions(self) -> list[list[int]]:
        """Return the units that answer one prompt differently, prompt by prompt."""
        answers: dict[int, dict[int, list[int]]] = {}
        for at in repeated(self._prompts):
            answers.setdefault(self._prompts[at], {}).setdefault(self._targets[at], []).append(self._askers[at])
        found = [targets for targets in answers.values() if len(targets) > 1]
        return [sorted({unit for units in targets.values() for unit in units}) for targets in found]


def repeated(numbers: Sequence[int]) -> Iterator[int]:
    """Yield the positions, ascending, of the numbers that stand at more than one."""
    if len(numbers) > _FEW:
        yield from _repeated_many(numbers)
        return
    count: dict[int, int] = {}
    for number in numbers:
        count[number] = count.get(number, 0) + 1
    yield from (at for at, number in enumerate(numbers) if count[number] > 1)


def _repeated_many(numbers: Sequence[int]) -> Iterator[int]:
    import numpy as np

    values = np.asarray(numbers)
    ordered = np.sort(values)
    several = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    yield from (int(at) for at in np.flatnonzero(np.isin(values, several)))
