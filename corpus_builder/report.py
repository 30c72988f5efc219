"""A manifest -> one self-contained HTML page: no network, light and dark, Chinese or English. Pure.

Public-class unless asked otherwise: without `SEE_NAMES` a file is `#a3f2` (design 4.9).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from corpus_builder.errors import Named, Value
from corpus_builder.manifest import FileAccount, Gate, Manifest
from corpus_builder.say import SEE_PUBLIC, say, shown

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --paper: #fcfcfd; --line: #d9dce1; --soft: #60646c;
  --pass: #18794e; --warn: #ab6400; --stop: #ce2c31; }
@media (prefers-color-scheme: dark) { :root { --ink: #edeef0; --paper: #111113; --line: #363a3f; --soft: #b0b4ba;
  --pass: #3dd68c; --warn: #ffca16; --stop: #ff9592; } }
body { margin: 2rem auto; max-width: 64rem; padding: 0 1rem; color: var(--ink); background: var(--paper);
  font: 15px/1.55 system-ui, "Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei", sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; } .wide { overflow-x: auto; }
th, td { text-align: left; padding: .35rem .75rem .35rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 600; } td.number, th.number { text-align: right;
  font-variant-numeric: tabular-nums; overflow-wrap: normal; }
.pass { color: var(--pass); } .warn { color: var(--warn); } .stop { color: var(--stop); }
.pass, .warn, .stop { font-weight: 600; } .soft { color: var(--soft); }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_POLICY = f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True, slots=True)
class _Page:
    """Words for one reader, escaped for HTML."""

    lang: str
    see: frozenset[str]

    def word(self, key: str, **values: Value) -> str:
        return escape(say(key, self.lang, see=self.see, **values))

    def word_or_code(self, prefix: str, code: str) -> str:
        try:
            return self.word(f"{prefix}.{code}")
        except KeyError:
            return escape(code)

    def name(self, name: str) -> str:
        return escape(shown(Named(name), self.see))

    def reasons(self, counts: Mapping[str, int]) -> str:
        return "<br>".join(f"{self.word_or_code('reason', reason)}: {count:,}" for reason, count in counts.items())


def format_report(manifest: Manifest, lang: str, *, see: frozenset[str] = SEE_PUBLIC) -> str:
    """Return the page. `see` says whether file names may stand in it."""
    page = _Page(lang, see)
    title = page.word("report.title", plan=manifest.plan_name)
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="{manifest.verdict}">{page.word(f"report.verdict_{manifest.verdict}")}</p>',
        f'<p class="soft">{page.word("report.window", tokens=manifest.max_seq_len)}<br>'
        f"{page.word('report.digest', digest=manifest.samples_sha256)}</p>",
        *_section(page, "report.classes", _classes(page, manifest)),
        *_section(page, "report.gates", _gates(page, manifest)),
        *_section(page, "report.missing", _missing(manifest)),
        *_section(page, "report.files", _files(page, manifest)),
    ]
    return (
        f'<!doctype html>\n<html lang="{escape(lang)}">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _section(page: _Page, key: str, content: str) -> Iterable[str]:
    return (f"<h2>{page.word(key)}</h2>", content) if content else ()


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: frozenset[int]) -> str:
    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f'<{tag} class="number">{value}</{tag}>' if at in numbers else f"<{tag}>{value}</{tag}>"
            for at, value in enumerate(values)
        )

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    top = f"<thead><tr>{cells('th', head)}</tr></thead>"
    return f'<div class="wide"><table>\n{top}\n<tbody>\n{body}\n</tbody></table></div>'


_COUNTS = ("samples", "unique", "characters", "tokens", "trained_tokens", "lost_tokens")


def _classes(page: _Page, manifest: Manifest) -> str:
    head = [page.word("report.class"), *(page.word(f"report.{key}") for key in _COUNTS)]
    rows = [
        [page.word_or_code("class", name), *(f"{getattr(account, key):,}" for key in _COUNTS)]
        for name, account in manifest.classes.items()
    ]
    sums = [sum(getattr(account, key) for account in manifest.classes.values()) for key in _COUNTS]
    rows.append([page.word("report.total"), *(f"{value:,}" for value in sums)])
    return _table(head, rows, numbers=frozenset(range(1, 1 + len(_COUNTS))))


def _gates(page: _Page, manifest: Manifest) -> str:
    head = [page.word(f"report.{key}") for key in ("gate", "verdict", "found", "wanted", "look_at")]
    rows = [_gate_row(page, gate, manifest.missing) for gate in manifest.gates]
    return _table(head, rows, numbers=frozenset({2, 3}))


def _gate_row(page: _Page, gate: Gate, missing: Sequence[str]) -> list[str]:
    where = "<br>".join(escape(name) if name in missing else page.name(name) for name in gate.where)
    verdict = f'<span class="{escape(gate.verdict)}">{page.word_or_code("verdict", gate.verdict)}</span>'
    return [page.word_or_code("gate", gate.name), verdict, f"{gate.found:g}", f"{gate.wanted:g}", where]


def _missing(manifest: Manifest) -> str:
    """What the plan lists and is not there: as public as the plan."""
    items = "".join(f"<li>{escape(path)}</li>" for path in manifest.missing)
    return f"<ul>{items}</ul>" if items else ""


def _files(page: _Page, manifest: Manifest) -> str:
    keys = ("file", "class", "bytes", "encoding", "units_read", "units_kept", "samples", "drops", "notes")
    head = [page.word(f"report.{key}") for key in keys]
    return _table(head, (_file_row(page, file) for file in manifest.files), numbers=frozenset({2, 4, 5, 6}))


def _file_row(page: _Page, file: FileAccount) -> list[str]:
    return [
        page.name(file.path),
        page.word_or_code("class", file.sample_class),
        f"{file.bytes:,}",
        escape(file.encoding),
        f"{file.units_read:,}",
        f"{file.units_kept:,}",
        f"{file.samples:,}",
        page.reasons(file.drops),
        page.reasons(file.notes),
    ]
