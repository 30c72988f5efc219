"""What Markdown means to the readers and the splitter: lines, code fences, headings. Pure.

A line is what ends with `\\n`; U+2028 and its like are text. A fence that is never closed is text as well: one
forgotten closing line must not swallow the rest of a dialog.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

#: Indentation, quote marks and a list mark may stand before a fence.
_FENCE = re.compile(r"[ \t>]*(?:[-*+][ \t]+)?(?P<mark>`{3,}|~{3,})(?P<info>[^\n]*)")
#: A backtick's info holds no backtick.
_OPENER = re.compile(r"(?P<mark>`{3,}(?=[^`\n]*$)|~{3,})", re.MULTILINE)
_HEADING = re.compile(r"\n {0,3}#{1,6}(?=[ \t\n]|\Z)")

Span = tuple[int, int]
Item = TypeVar("Item")


class _Line(NamedTuple):
    """A line that looks like a fence: its own place, and where its mark is."""

    start: int
    end: int
    mark: int
    length: int


class Fences:
    """The code fences of one text, by character offsets."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines: list[_Line] = []
        self._closers: dict[str, list[_Line]] = {"`": [], "~": []}
        for found in (*_lines_with("`", text), *_lines_with("~", text)):
            mark = found["mark"]
            line = _Line(found.start(), found.end(), found.start("mark"), len(mark))
            self._lines.append(line)
            if not found["info"] or found["info"].isspace():
                self._closers[mark[0]].append(line)
        self._starts = {mark: [closer.start for closer in found] for mark, found in self._closers.items()}
        self._longest_from = {mark: _longest_from(found) for mark, found in self._closers.items()}

    def __bool__(self) -> bool:
        """Whether there is a line that could close a fence."""
        return any(self._closers.values())

    def spans(self, opened_at: Mapping[int, int] | None = None) -> list[Span]:
        """Return the closed fences, from the opening line's start to the closing line's end.

        Args:
            opened_at: Lines that may open a fence behind other words: line's start -> where the fence would start.
        """
        marks = {line.start: line.mark for line in self._lines} | dict(opened_at or {})
        found: list[Span] = []
        for start in sorted(marks):
            if found and start < found[-1][1]:
                continue
            end = self._find_end(marks[start])
            if end is not None:
                found.append((start, end))
        return found

    def _find_end(self, position: int) -> int | None:
        """Return where the fence ends whose mark is at `position`; None if none opens there, or none closes it."""
        opener = _OPENER.match(self._text, position)
        if opener is None:
            return None
        mark, length = opener["mark"][0], len(opener["mark"])
        closers = self._closers[mark]
        at = bisect_left(self._starts[mark], opener.end())
        if at == len(closers) or self._longest_from[mark][at] < length:
            return None
        while closers[at].length < length:
            at += 1
        return closers[at].end


def _lines_with(mark: str, text: str) -> Iterator[re.Match[str]]:
    """Yield the lines of `text` that begin with three of `mark`; nothing but the first one of a line can be a fence."""
    at = text.find(mark)
    while at >= 0:
        if text.startswith(mark * 3, at):
            found = _FENCE.match(text, text.rfind("\n", 0, at) + 1)
            if found is not None and found.start("mark") == at:
                yield found
        line_end = text.find("\n", at)
        at = text.find(mark, line_end) if line_end >= 0 else -1


def _longest_from(closers: list[_Line]) -> list[int]:
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


def outside(spans: Sequence[Span], items: Sequence[Item], positions: Sequence[int]) -> list[Item]:
    """Return the items whose positions lie in none of the `spans` (`is_inside`); all three are in ascending order."""
    kept: list[Item] = []
    begin = 0
    for start, end in spans:
        kept += items[begin : bisect_right(positions, start)]
        begin = bisect_right(positions, end)
    return [*kept, *items[begin:]]


def heading_starts(text: str) -> list[int]:
    """Return the offsets of the headings outside of fences."""
    spans = Fences(text).spans()
    starts = [found.start() for found in _HEADING.finditer("\n" + text)]
    return outside(spans, starts, starts)


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
