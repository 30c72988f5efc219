"""What one input file gave: samples before they are split, and an account of every unit. Pure.

Units are sections and whole files (soul), turns (relation), lines (tool): `units_read = units_kept + drops`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from corpus_builder.sample import Sample


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


def dropped(reason: str) -> Reading:
    """Return the reading of a file that gives nothing, for one reason."""
    return Reading(units_read=1, drops={reason: 1})
