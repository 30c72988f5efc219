"""A text -> pieces that fit, cut at the best borders; joined, the pieces are the text. Pure.

Borders, best first: headings, paragraphs, lines (outside of code fences), lines, sentences, words, characters.
The text is encoded once: where its tokens end tells what a part of it costs, nearly. Tokens do not add up over a
cut, so every piece is measured as it is in the end, and the text is cut shorter where one turns out too long.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from corpus_builder.errors import ProjectError
from corpus_builder.markdown import Fences, heading_starts, outside

_PARAGRAPH = re.compile(r"\n[ \t]*\n(?=[^\n])")
_LINE = re.compile(r"\n(?=[\s\S])")
_SENTENCE = re.compile(r"[。！？!?；…]+[”’」』）)\"']*|\.[\"')]*(?=\s)\s|;\s")
_WORD = re.compile(r"\s+|[，,、：:]")

Span = tuple[int, int]


class Costs(Protocol):
    """What texts cost."""

    def texts(self, texts: Sequence[str], /) -> list[int]:
        """Return the tokens of each text."""

    def ends(self, text: str, /) -> Sequence[int]:
        """Return where each token of `text` ends, ascending."""


def cut_text(text: str, limit: int, costs: Costs) -> list[str]:
    """Return pieces of at most `limit` tokens.

    Raises:
        ProjectError: `window_too_small`, when a single character does not fit.
    """
    if not text:
        return [text]
    borders, room = _Borders(text), limit
    while room > 0:
        pieces = [text[start:end] for start, end in _Cut(borders, costs.ends(text), room).whole()]
        excess = max(costs.texts(pieces)) - limit
        if excess <= 0:
            return pieces
        room -= excess
    raise ProjectError("window_too_small", limit=limit)


class _Borders:
    """Where a text may be cut, by level: the best borders first."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def levels(self) -> tuple[list[int], ...]:
        """Offsets at which a piece may begin."""
        fences = Fences(self.text).spans()
        paragraphs = [found.end() for found in _PARAGRAPH.finditer(self.text)]
        lines = [found.end() for found in _LINE.finditer(self.text)]
        return (
            heading_starts(self.text),
            outside(fences, paragraphs, paragraphs),
            outside(fences, lines, lines),
            lines,
        )

    def between(self, level: int, span: Span) -> list[int]:
        """Return the borders of a level inside `span`, its ends left out."""
        starts = self.levels[level]
        return starts[bisect_right(starts, span[0]) : bisect_left(starts, span[1])]


@dataclass(frozen=True, slots=True)
class _Cut:
    """One way to cut a text: pieces of at most `limit` tokens, as far as the ends of tokens tell."""

    borders: _Borders
    ends: Sequence[int]
    limit: int

    def whole(self) -> list[Span]:
        """Return the pieces of the whole text."""
        return self._cut((0, len(self.borders.text)), 0)

    def _cost(self, start: int, end: int) -> int:
        return bisect_right(self.ends, end) - bisect_right(self.ends, start)

    def _cut(self, span: Span, level: int) -> list[Span]:
        """Cut at the borders of `level`, and deeper where a part between two borders does not fit."""
        if self._cost(*span) <= self.limit:
            return [span]
        if level == len(self.borders.levels):
            return self._cut_line(span)
        starts = self.borders.between(level, span)
        if not starts:
            return self._cut(span, level + 1)
        return self._packed([*zip([span[0], *starts], [*starts, span[1]], strict=True)], level)

    def _packed(self, atoms: Sequence[Span], level: int) -> list[Span]:
        """Join neighbours while they fit together; an atom that does not fit is cut at deeper borders."""
        pieces: list[Span] = []
        for atom in atoms:
            if pieces and self._cost(pieces[-1][0], atom[1]) <= self.limit:
                pieces[-1] = (pieces[-1][0], atom[1])
            else:
                pieces += self._cut(atom, level + 1)
        return pieces

    def _cut_line(self, span: Span) -> list[Span]:
        start, last = span
        pieces = []
        while self._cost(start, last) > self.limit:
            first = bisect_right(self.ends, start)
            end = self.ends[first + self.limit - 1]  # as much as fits
            while end > start and self._cost(start, end) > self.limit:
                end -= 1  # several tokens end at one character
            end = _nice_end(self.borders.text, start, end) if end > start else self.ends[first]
            pieces.append((start, end))
            start = end
        return [*pieces, (start, last)]


def _nice_end(text: str, start: int, end: int) -> int:
    """Return the last end of a sentence, else of a word, in the second half of `text[start:end]`; else `end`."""
    for border in (_SENTENCE, _WORD):
        ends = [found.end() for found in border.finditer(text, start + (end - start) // 2, end)]
        if ends:
            return ends[-1]
    return end


def tail_that_fits(text: str, limit: int, costs: Costs) -> str:
    """Return the end of `text`, from a line's start where one is near, in at most `limit` tokens; may be empty."""
    ends = costs.ends(text)
    room = min(limit, len(ends))
    while room > 0:
        start = ends[-room - 1] if room < len(ends) else 0
        line = text.find("\n", start, start + (len(text) - start) // 2) + 1 if start else 0
        tail = text[line or start :]
        excess = costs.texts([tail])[0] - limit
        if excess <= 0:
            return tail
        room -= excess
    return ""
