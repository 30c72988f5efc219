"""Counts -> a histogram as inline SVG, styled by the page's own style. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_WIDTH, _HEIGHT, _BASE = 320, 120, 100  # the last 20 are for the axis


def histogram(counts: Sequence[int], *, limit: int, caption: str) -> str:
    """Return a figure of `counts`, samples in equal parts of 0 to `limit` tokens; `caption` is HTML."""
    most = max(counts, default=0) or 1
    width = _WIDTH / max(1, len(counts))
    bars = "".join(_bar(at, count, most, width, limit // max(1, len(counts))) for at, count in enumerate(counts))
    axis = (
        f'<line class="rule" x1="0" y1="{_BASE}" x2="{_WIDTH}" y2="{_BASE}"/>'
        f'<text x="0" y="{_HEIGHT - 5}">0</text>'
        f'<text x="{_WIDTH / 2:g}" y="{_HEIGHT - 5}" text-anchor="middle">{limit // 2:,}</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT - 5}" text-anchor="end">{limit:,}</text>'
    )
    return (
        f"<figure><figcaption>{caption}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(caption)}">{bars}{axis}</svg></figure>'
    )


def _bar(at: int, count: int, most: int, width: float, step: int) -> str:
    """Return one bar; a few samples beside many still show as a line."""
    if not count:
        return ""
    height = max(2.0, (_BASE - 14) * count / most)
    top = _BASE - height
    label = f"{at * step + 1:,}–{(at + 1) * step:,}: {count:,}"
    number = f'<text x="{(at + 0.5) * width:g}" y="{top - 3:g}" text-anchor="middle">{count:,}</text>'
    return (
        f'<rect class="bar" x="{at * width + 1:g}" y="{top:g}" width="{width - 2:g}" height="{height:g}">'
        f"<title>{label}</title></rect>" + (number if count == most else "")
    )
