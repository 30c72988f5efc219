"""A manifest -> one self-contained HTML page: counts, gates, findings, files; Chinese or English. Pure.

Public-class unless asked otherwise: without `SEE_NAMES` a file is `#a3f2` and findings are counts (design 4.9).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape

from corpus_builder.errors import NAMED
from corpus_builder.histogram import histogram
from corpus_builder.manifest import FileAccount, Finding, Gate, Manifest
from corpus_builder.page import Page, table
from corpus_builder.say import SEE_PUBLIC

#: Rows of a table with one a file; the manifest lists all.
MAX_ROWS = 2000


def format_report(manifest: Manifest, lang: str, *, see: frozenset[str] = SEE_PUBLIC, more: Sequence[str] = ()) -> str:
    """Return the page.

    Args:
        see: Whether file names may stand in it, and findings with their places.
        more: HTML that follows the rest; its texts are escaped already.
    """
    page = Page(lang, see)
    return page.document(
        page.word("report.title", plan=manifest.plan_name),
        [
            f'<p class="{manifest.verdict}">{page.word(f"report.verdict_{manifest.verdict}")}</p>',
            f'<p class="soft">{page.word("report.window", tokens=manifest.max_seq_len)}<br>'
            f"{page.word('report.digest', digest=manifest.samples_sha256)}</p>",
            *page.section("report.classes", _classes(page, manifest)),
            *page.section("report.gates", _gates(page, manifest)),
            *page.section("report.lengths", _lengths(page, manifest)),
            *page.section("report.findings", _findings(page, manifest)),
            *page.section("report.missing", _missing(manifest)),
            *page.section("report.files", _files(page, manifest)),
            *more,
        ],
    )


_COUNTS = ("samples", "unique", "validation_samples", "characters", "tokens", "trained_tokens", "lost_tokens")


def _classes(page: Page, manifest: Manifest) -> str:
    head = [page.word(f"report.{key}") for key in ("class", *_COUNTS, "expected")]
    rows = [
        [
            page.word_or_code("class", name),
            *(f"{getattr(account, key):,}" for key in _COUNTS),
            _expected(page, manifest, name),
        ]
        for name, account in manifest.classes.items()
    ]
    sums = [sum(getattr(account, key) for account in manifest.classes.values()) for key in _COUNTS]
    rows.append([page.word("report.total"), *(f"{value:,}" for value in sums), _expected(page, manifest, "total")])
    return table("classes", head, rows, numbers=frozenset(range(1, 2 + len(_COUNTS))))


def _expected(page: Page, manifest: Manifest, name: str) -> str:
    """Return what a gate wants of a class, so that a count can be judged where it stands."""
    gates = {gate.name: gate for gate in manifest.gates}
    if name == "soul" and "soul_files_found" in gates:
        return page.word("report.expected_files", share=f"{gates['soul_files_found'].wanted:.0%}")
    gate = gates.get(name)
    return f"≥ {gate.wanted:,g}" if gate is not None else "–"


def _gates(page: Page, manifest: Manifest) -> str:
    head = [page.word(f"report.{key}") for key in ("gate", "verdict", "found", "wanted", "look_at")]
    rows = [_gate_row(page, gate, manifest.missing) for gate in manifest.gates]
    return table("gates", head, rows, numbers=frozenset({2, 3}))


def _gate_row(page: Page, gate: Gate, missing: Sequence[str]) -> list[str]:
    where = "<br>".join(escape(name) if name in missing else page.name(name) for name in gate.where)
    verdict = f'<span class="{escape(gate.verdict)}">{page.word_or_code("verdict", gate.verdict)}</span>'
    return [page.word_or_code("gate", gate.name), verdict, f"{gate.found:g}", f"{gate.wanted:g}", where]


def _lengths(page: Page, manifest: Manifest) -> str:
    charts = [
        histogram(account.token_histogram, limit=manifest.max_seq_len, caption=page.word_or_code("class", name))
        for name, account in manifest.classes.items()
        if any(account.token_histogram)
    ]
    return f'<div class="charts">{"".join(charts)}</div>' if charts else ""


def _findings(page: Page, manifest: Manifest) -> str:
    """Return counts by kind, and for a reader of names the places."""
    if not manifest.findings:
        return f'<p class="soft">{page.word("report.no_findings")}</p>'
    counts, files = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for finding in manifest.findings:
        counts[finding.kind, finding.action] += finding.count
        files[finding.kind, finding.action] += 1
    rows = [
        [
            page.word_or_code("finding", kind),
            page.word_or_code("done", action),
            f"{count:,}",
            f"{files[kind, action]:,}",
        ]
        for (kind, action), count in counts.items()
    ]
    head = [page.word(f"report.{key}") for key in ("kind", "done", "places", "in_files")]
    summed = table("findings", head, rows, numbers=frozenset({2, 3}))
    prompts = manifest.contradictory_prompts
    said = f"<p>{page.word('report.contradictory_prompts', count=prompts)}</p>" if prompts else ""
    return summed + said + (_places(page, manifest.findings) if NAMED in page.see else "")


def _places(page: Page, findings: Sequence[Finding]) -> str:
    head = [page.word(f"report.{key}") for key in ("kind", "file", "places", "lines", "others")]
    rows = [
        [
            page.word_or_code("finding", finding.kind),
            page.name(finding.path),
            f"{finding.count:,}",
            ", ".join(str(line) for line in finding.lines) + (" …" if finding.count > len(finding.lines) else ""),
            "<br>".join(page.name(name) for name in finding.others),
        ]
        for finding in findings[:MAX_ROWS]
    ]
    return table("places", head, rows, numbers=frozenset({2})) + _more(page, len(findings))


def _missing(manifest: Manifest) -> str:
    """What the plan lists and is not there: as public as the plan."""
    items = "".join(f"<li>{escape(path)}</li>" for path in manifest.missing)
    return f"<ul>{items}</ul>" if items else ""


def _files(page: Page, manifest: Manifest) -> str:
    """Return a row per file; of very many, those with something to say about them first."""
    keys = ("file", "class", "bytes", "encoding", "units_read", "units_kept", "samples", "drops", "notes")
    head = [page.word(f"report.{key}") for key in keys]
    listed = manifest.files
    if len(listed) > MAX_ROWS:
        listed = tuple(sorted(listed, key=lambda file: not (file.drops or file.notes)))[:MAX_ROWS]
    rows = (_file_row(page, file) for file in listed)
    return table("files", head, rows, numbers=frozenset({2, 4, 5, 6})) + _more(page, len(manifest.files))


def _more(page: Page, count: int) -> str:
    left = count - MAX_ROWS
    return f'<p class="soft">{page.word("report.more", count=left)}</p>' if left > 0 else ""


def _file_row(page: Page, file: FileAccount) -> list[str]:
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
