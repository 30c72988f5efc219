"""Values -> pieces of GitHub's Markdown that stay what they are, whatever they hold. Pure.

>>> table(("a", "b"), [("x|y", 3)])
'| a | b |\n|---|---|\n| x\\\\|y | 3 |'
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_BREAKS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
#: An underscore inside a word, a hyphen, a bracket alone mark nothing: ids and paths stay legible as they are.
_MARKS = re.compile(r"([\\`*\[\]|~$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|^[-+#>])")
_TAGS = re.compile(r"<(?=[A-Za-z/!?])")  # `5 < 100` is no tag
_ENTITIES = re.compile(r"&(?=#|[A-Za-z])")
_SURROGATES = re.compile(r"[\ud800-\udfff]")


def escape(value: object) -> str:
    """Return `value` as one line of text in which nothing is markup: no table cell, link, mention or HTML."""
    flat = _SURROGATES.sub("\ufffd", _BREAKS.sub(" ", str(value))).strip()
    return _MARKS.sub(r"\\\1", _TAGS.sub("&lt;", _ENTITIES.sub("&amp;", flat)))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; `head` is our own words, the cells are escaped."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(escape(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines)


def bullets(items: Iterable[object]) -> str:
    """Return a list, one escaped item a line."""
    return "\n".join(f"- {escape(item)}" for item in items)


def fence(text: str) -> str:
    """Return `text` as a block of code whose fence is longer than any in it; valid UTF-8, final newline included."""
    clean = _SURROGATES.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))
    longest = max((len(run) for run in re.findall(r"`+", clean)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{ticks}text\n{clean.rstrip(chr(10))}\n{ticks}"


def duration(seconds: float | None) -> str:
    """Return `1:05:09` for 3909 seconds, `–` for unknown."""
    if seconds is None:
        return "–"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def number(value: float | None) -> str:
    """Return a number with thousands separators and at most four significant decimals, `–` for unknown."""
    if value is None:
        return "–"
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:.4g}"
