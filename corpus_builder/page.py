"""One self-contained HTML page: its frame, its words, its tables. No network, light and dark. Pure.

Style is one block whose hash the page's policy names, so nothing else can style it, and no script runs.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from corpus_builder.errors import Named, Value
from corpus_builder.say import say, shown

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --paper: #fcfcfd; --line: #d9dce1; --soft: #60646c;
  --pass: #18794e; --warn: #ab6400; --stop: #ce2c31; --bar: #3e63dd; --taught: #d3e7d9; --taught-too: #b4dcc0; }
@media (prefers-color-scheme: dark) { :root { --ink: #edeef0; --paper: #111113; --line: #363a3f; --soft: #b0b4ba;
  --pass: #3dd68c; --warn: #ffca16; --stop: #ff9592; --bar: #8da4ef; --taught: #1d3b2a; --taught-too: #28543a; } }
body { margin: 2rem auto; max-width: 64rem; padding: 0 1rem; color: var(--ink); background: var(--paper);
  font: 15px/1.55 system-ui, "Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei", sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } h3 { font-size: .95rem; margin-bottom: .25rem; }
table { border-collapse: collapse; width: 100%; } .wide { overflow-x: auto; }
th, td { text-align: left; padding: .35rem .75rem .35rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 600; } td.number, th.number { text-align: right;
  font-variant-numeric: tabular-nums; overflow-wrap: normal; white-space: nowrap; }
.pass { color: var(--pass); } .warn { color: var(--warn); } .stop { color: var(--stop); }
.pass, .warn, .stop { font-weight: 600; } .soft { color: var(--soft); }
.charts { display: flex; flex-wrap: wrap; gap: 1.5rem; } figure { margin: 0; flex: 1 1 18rem; max-width: 26rem; }
figcaption { font-weight: 600; } svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 11px; }
.bar { fill: var(--bar); } .rule { stroke: var(--line); }
article { border: 1px solid var(--line); border-radius: .4rem; padding: .5rem 1rem; margin: 1rem 0; }
.turn { white-space: pre-wrap; overflow-wrap: anywhere; margin: .25rem 0 .75rem; }
.taught { background: var(--taught); } .taught-too { background: var(--taught-too); }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_POLICY = f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True, slots=True)
class Page:
    """Words for one reader, escaped for HTML."""

    lang: str
    see: frozenset[str]

    def word(self, key: str, **values: Value) -> str:
        """Return a sentence of the catalogue."""
        return escape(say(key, self.lang, see=self.see, **values))

    def word_or_code(self, prefix: str, code: str) -> str:
        """Return the word for a code, the code itself where the catalogue has none."""
        try:
            return self.word(f"{prefix}.{code}")
        except KeyError:
            return escape(code)

    def name(self, name: str) -> str:
        """Return a file's name as this reader may see it."""
        return escape(shown(Named(name), self.see))

    def reasons(self, counts: Mapping[str, int]) -> str:
        """Return counts by reason, one a line."""
        return "<br>".join(f"{self.word_or_code('reason', reason)}: {count:,}" for reason, count in counts.items())

    def section(self, key: str, content: str) -> Iterable[str]:
        """Return a heading and what stands under it; nothing where there is nothing."""
        return (f"<h2>{self.word(key)}</h2>", content) if content else ()

    def document(self, title: str, parts: Iterable[str]) -> str:
        """Return the whole page; `title` and `parts` are HTML."""
        return (
            f'<!doctype html>\n<html lang="{escape(self.lang)}">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
            + "\n".join(parts)
            + "\n</body>\n</html>\n"
        )


def table(name: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: frozenset[int]) -> str:
    """Return a table with the id `name`; the columns in `numbers` stand on the right."""

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f'<{tag} class="number">{value}</{tag}>' if at in numbers else f"<{tag}>{value}</{tag}>"
            for at, value in enumerate(values)
        )

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    top = f"<thead><tr>{cells('th', head)}</tr></thead>"
    return f'<div class="wide"><table id="{name}">\n{top}\n<tbody>\n{body}\n</tbody></table></div>'
