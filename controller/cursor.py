"""Where in a log reading stopped, as one word that a person can give back: `--from-offset`. Pure.

5120                                              a byte of whichever log is the newest
5120@20260503-101500-3fa1:8a3f.0123456789abcdef   that of one log, which is known again when it was moved
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from corpus_builder.errors import ProjectError

_FORM = re.compile(r"(\d{1,18})(?:@([A-Za-z0-9][A-Za-z0-9_.-]{0,63}):([0-9a-f]{1,16}\.[0-9a-f]{16}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Cursor:
    """A byte of a log; `work_id` and `key` tell which log, None where only the number is known."""

    work_id: str | None
    offset: int
    key: str | None = None

    def __str__(self) -> str:
        return f"{self.offset}@{self.work_id}:{self.key}" if self.work_id and self.key else str(self.offset)


BEGINNING = Cursor(None, 0)


def parse_cursor(text: str) -> Cursor:
    """Return the cursor that `text` spells; raise `input_invalid`."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ProjectError("input_invalid", name="from_offset", reason="reason.log_cursor")
    return Cursor(match[2], int(match[1]), match[3])
