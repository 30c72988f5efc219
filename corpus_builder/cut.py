"""A text -> pieces that fit, cut at the best borders; joined, the pieces are the text. Pure.

Borders, best first: headings, paragraphs, lines (outside of code fences), lines, sentences, words, characters.
Tokens do not add up over a cut, so every piece is measured as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from corpus_builder.errors import ProjectError
from corpus_builder.markdown import Fences, heading_starts, is_inside

Measure = Callable[[str], int]

_PARAGRAPH = re.compile(r"\n[ \t]*\n+(?=[^\n])")
_LINE = re.compile(r"\n(?=[\s\S])")
_SENTENCE = re.compile(r"[。！？!?；…]+[”’」』）)\"']*|\.[\"')]*(?=\s)\s|;\s")
_WORD = re.compile(r"\s+|[，,、：:]")


def cut_text(text: str, limit: int, measure: Measure) -> list[str]:
    """Return pieces of at most `limit` tokens by `measure`.

    Raises:
        ProjectError: `window_too_small`, when a single character does not fit.
    """
    return _cut(text, limit, measure, 0)


def _paragraph_starts(text: str) -> list[int]:
    return _outside_of_fences(text, [found.end() for found in _PARAGRAPH.finditer(text)])


def _line_starts(text: str) -> list[int]:
    return [found.end() for found in _LINE.finditer(text)]


def _whole_line_starts(text: str) -> list[int]:
    return _outside_of_fences(text, _line_starts(text))


def _outside_of_fences(text: str, starts: list[int]) -> list[int]:
    spans = Fences(text).spans()
    return [start for start in starts if not is_inside(start, spans)]


_BORDERS: tuple[Callable[[str], list[int]], ...] = (
    heading_starts,
    _paragraph_starts,
    _whole_line_starts,
    _line_starts,
)


def _cut(text: str, limit: int, measure: Measure, level: int) -> list[str]:
    """Cut at the borders of `level`, and deeper where a part between two borders does not fit."""
    if measure(text) <= limit:
        return [text]
    if level == len(_BORDERS):
        return _cut_line(text, limit, measure)
    starts = [start for start in _BORDERS[level](text) if 0 < start < len(text)]
    atoms = [text[start:end] for start, end in zip([0, *starts], [*starts, len(text)], strict=True)]
    if len(atoms) == 1:
        return _cut(text, limit, measure, level + 1)
    pieces: list[str] = []
    for piece in _pack(atoms, limit, measure, level):
        # A joined piece may be dearer than its parts: seldom, and then it is cut again.
        pieces += [piece] if measure(piece) <= limit else _cut(piece, limit, measure, level + 1)
    return pieces


def _pack(atoms: Sequence[str], limit: int, measure: Measure, level: int) -> list[str]:
    """Join neighbours while their tokens fit together; an atom that does not fit is cut at deeper borders."""
    pieces = [""]
    filled = 0
    for atom in atoms:
        cost = measure(atom)
        if filled + cost <= limit:
            pieces[-1] += atom
            filled += cost
            continue
        parts = [atom] if cost <= limit else _cut(atom, limit, measure, level + 1)
        pieces += parts
        filled = measure(parts[-1])
    return pieces if pieces[0] else pieces[1:]


def _cut_line(text: str, limit: int, measure: Measure) -> list[str]:
    pieces = []
    while text:
        end = _prefix_end(text, limit, measure)
        if end == 0:
            raise ProjectError("window_too_small", limit=limit)
        if end < len(text):
            nicer = _nice_end(text, end)
            end = nicer if measure(text[:nicer]) <= limit else end
        pieces.append(text[:end])
        text = text[end:]
    return pieces


def _nice_end(text: str, end: int) -> int:
    """Return the last end of a sentence, else of a word, in the second half of `text[:end]`; else `end`."""
    for border in (_SENTENCE, _WORD):
        ends = [found.end() for found in border.finditer(text, end // 2, end)]
        if ends:
            return ends[-1]
    return end


def _prefix_end(text: str, limit: int, measure: Measure) -> int:
    """Return the length of a prefix that fits and is about as long as can be; 0 if not one character fits."""
    fits, step = 0, max(1, limit)
    while fits < len(text) and measure(text[: fits + step]) <= limit:
        fits = min(len(text), fits + step)
        step *= 2
    too_long = min(len(text) + 1, fits + step)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if measure(text[:middle]) <= limit:
            fits = middle
        else:
            too_long = middle
    return fits


def tail_that_fits(text: str, limit: int, measure: Measure) -> str:
    """Return the end of `text`, from a line's start where one is near, in at most `limit` tokens; may be empty."""
    first, last = 0, len(text)  # text[last:] fits
    while last - first > 1:
        middle = (first + last) // 2
        if measure(text[middle:]) <= limit:
            last = middle
        else:
            first = middle
    line = text.find("\n", last, last + (len(text) - last) // 2) + 1
    return text[line:] if line and measure(text[line:]) <= limit else text[last:]
