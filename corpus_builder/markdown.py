"""What Markdown means to the readers and the splitter: lines, code fences, headings. Pure.

A line is what ends with `\\n`; U+2028 and its like are text. A fence that is never closed is text as well: one
forgotten closing line must not swallow the rest of a dialog.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

#: Indentation, quote marks and a list mark may stand before a fence; a backtick's info holds no backtick.
_FENCE = re.compile(r"^[ \t>]*(?:[-*+][ \t]+)?(?P<mark>`{3,}|~{3,})(?P<info>[^\n]*)$", re.MULTILINE)
_OPENER = re.compile(r"(?P<mark>`{3,}(?=[^`\n]*$)|~{3,})", re.MULTILINE)
_HEADING = re.compile(r"^ {0,3}#{1,6}(?=[ \t]|$)", re.MULTILINE)

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Closer:
    start: int
    end: int
    length: int


class Fences:
    """The code fences of one text, by character offsets."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines = list(_FENCE.finditer(text))
        self._closers: dict[str, list[_Closer]] = {"`": [], "~": []}
        for line in self._lines:
            if not line["info"].strip():
                self._closers[line["mark"][0]].append(_Closer(line.start(), line.end(), len(line["mark"])))
        self._starts = {mark: [closer.start for closer in found] for mark, found in self._closers.items()}
        self._longest_from = {mark: _longest_from(found) for mark, found in self._closers.items()}

    @property
    def starts(self) -> list[int]:
        """Offsets of the lines that look like a fence."""
        return [line.start() for line in self._lines]

    def find_end(self, position: int) -> int | None:
        """Return where the fence ends that opens at `position` (its mark, or its line's start); None if none does."""
        line = _FENCE.match(self._text, position)
        opener = _OPENER.match(self._text, line.start("mark") if line else position)
        if opener is None:
            return None
        mark, length = opener["mark"][0], len(opener["mark"])
        at = bisect_left(self._starts[mark], opener.end())
        closers = self._closers[mark]
        if at == len(closers) or self._longest_from[mark][at] < length:
            return None
        return next(closer.end for closer in closers[at:] if closer.length >= length)

    def spans(self) -> list[Span]:
        """Return the closed fences, from the opening line's start to the closing line's end."""
        found: list[Span] = []
        for start in self.starts:
            if found and start < found[-1][1]:
                continue
            end = self.find_end(start)
            if end is not None:
                found.append((start, end))
        return found


def _longest_from(closers: list[_Closer]) -> list[int]:
    """Return for each closing line the length of the longest mark from there on."""
    longest = [0] * len(closers)
    best = 0
    for at in range(len(closers) - 1, -1, -1):
        best = max(best, closers[at].length)
        longest[at] = best
    return longest


def is_inside(position: int, spans: list[Span]) -> bool:
    """Whether `position` lies in one of the sorted `spans`, after its first character."""
    at = bisect_left(spans, (position,)) - 1
    return at >= 0 and spans[at][0] < position <= spans[at][1]


def heading_starts(text: str) -> list[int]:
    """Return the offsets of the headings outside of fences."""
    spans = Fences(text).spans()
    return [found.start() for found in _HEADING.finditer(text) if not is_inside(found.start(), spans)]


def line_numbers(text: str, positions: Sequence[int]) -> list[int]:
    """Return the number of the line at each of the ascending `positions`, counted from 1."""
    numbers, line, last = [], 1, 0
    for position in positions:
        line += text.count("\n", last, position)
        last = position
        numbers.append(line)
    return numbers


def line_of(text: str, position: int) -> int:
    """Return the number of the line at `position`, counted from 1."""
    return line_numbers(text, [position])[0]
