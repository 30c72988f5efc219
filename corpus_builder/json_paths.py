"""Where things stand in JSON, as a plan spells it. Pure.

    conversation.session_#[]      in `conversation`, every key `session_<number>` in the order of the numbers, each item

`.` goes into a key, `[]` into each item of a list; in a key `#` stands for a number and `*` for anything. What isn't
there, or is no list where one is asked for, is simply not found. The empty path is the value itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_SEGMENT = re.compile(r"(?P<key>[^\[\]]*)(?P<each>(?:\[\])*)")
_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class Step:
    """One step: into a key (a pattern where `#` or `*` stands in it), or into each item of a list (no key)."""

    key: str | None = None

    @property
    def is_pattern(self) -> bool:
        """Whether the key may match several."""
        return self.key is not None and ("#" in self.key or "*" in self.key)

    def matches(self, key: str) -> bool:
        """Whether `key` is one of the keys."""
        pattern = re.escape(self.key or "").replace(r"\#", r"\d+").replace("#", r"\d+").replace(r"\*", ".*")
        return re.fullmatch(pattern, key) is not None


def parse_path(text: str) -> tuple[Step, ...]:
    """Return the steps of a path; raise ValueError where it is none."""
    steps: list[Step] = []
    for at, segment in enumerate(text.split(".")) if text else ():
        found = _SEGMENT.fullmatch(segment)
        if found is None or (not found["key"] and (at or not found["each"])):
            raise ValueError(f"{text!r} is no path: keys with dots between them, [] for each item of a list")
        if found["key"]:
            steps.append(Step(found["key"]))
        steps += [Step()] * (len(found["each"]) // 2)
    return tuple(steps)


def find_values(value: Any, steps: Sequence[Step]) -> Iterator[Any]:
    """Yield what stands at the end of the steps, in order."""
    if not steps:
        yield value
        return
    for inner in _into(value, steps[0]):
        yield from find_values(inner, steps[1:])


def find_text(value: Any, steps: Sequence[Step]) -> str | None:
    """Return the first text at the end of the steps, None if there is none."""
    return next((found for found in find_values(value, steps) if isinstance(found, str)), None)


def _into(value: Any, step: Step) -> Iterator[Any]:
    if step.key is None:
        yield from value if isinstance(value, list) else ()
    elif isinstance(value, dict):
        if not step.is_pattern:
            if step.key in value:
                yield value[step.key]
            return
        yield from (value[key] for key in sorted(filter(step.matches, value), key=natural))


def natural(key: str) -> list[tuple[bool, int, str]]:
    """Return a sorting key under which `session_2` stands before `session_10`."""
    parts = _NUMBER.split(key)
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


def ijson_prefix(steps: Sequence[Step]) -> str:
    """Return the steps, none of them a pattern, as ijson spells them."""
    return ".".join("item" if step.key is None else step.key for step in steps)
