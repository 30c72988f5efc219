"""The one voice of a run. Side effects: prints to stdout, on rank 0 only."""

from __future__ import annotations

from trainer.device import Place
from trainer.progress import Event, format_event


class Voice:
    """Says lines on rank 0, each flushed; the other ranks are silent."""

    def __init__(self, place: Place) -> None:
        self._is_first = place.is_first

    def say(self, line: str) -> None:
        """Print one line."""
        if self._is_first:
            print(line, flush=True)

    def event(self, name: str, **values: object) -> None:
        """Print one ZY_EVENT; values are single words."""
        self.say(format_event(Event(name, {key: str(value) for key, value in values.items()})))
