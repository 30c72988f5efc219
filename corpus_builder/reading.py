"""What one input file gave: samples before they are split, and an account of every unit. Pure.

Units are sections and whole files (soul), turns (relation), lines (tool): `units_read = units_kept + drops`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from corpus_builder.sample import Sample

#: Unknown names that a stream remembers, about; a field that is no name would fill the memory.
_MOST_SPEAKERS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One file as it was found: its name, class and size, and how it was decoded."""

    name: str
    sample_class: str
    bytes: int
    encoding: str
    is_guessed: bool = False
    broken_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One file, read. The samples have no system prompt of the plan yet and may be longer than the window."""

    samples: tuple[Sample, ...] = ()
    units_read: int = 0
    units_kept: int = 0
    drops: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    rounds: int = 0  # a dialog's questions with an answer
    unknown_speakers: tuple[str, ...] = ()


class ReadingStream:
    """A reading whose samples come as they are asked for; its counts are whole when they have run out.

    Attributes:
        units_read, units_kept, drops, notes, rounds, unknown_speakers: As in `Reading`.
    """

    def __init__(self, parts: Iterator[Reading]) -> None:
        self._parts = parts
        self.units_read = self.units_kept = self.rounds = 0
        self.drops: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self._speakers: set[str] = set()

    @property
    def samples(self) -> Iterator[Sample]:
        """The samples, once."""
        for part in self._parts:
            self.units_read += part.units_read
            self.units_kept += part.units_kept
            self.rounds += part.rounds
            self.drops.update(part.drops)
            self.notes.update(part.notes)
            if len(self._speakers) < _MOST_SPEAKERS:
                self._speakers.update(part.unknown_speakers)
            yield from part.samples

    @property
    def unknown_speakers(self) -> tuple[str, ...]:
        """Names that are neither the user's nor the assistant's."""
        return tuple(sorted(self._speakers))


def dropped(reason: str) -> Reading:
    """Return the reading of a file that gives nothing, for one reason."""
    return Reading(units_read=1, drops={reason: 1})
