"""The corpus part of a summary: counts per class, gates with their verdicts, what is missing. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from controller.markdown import bullets, number, table
from controller.words import Words
from corpus_builder.errors import Named
from corpus_builder.manifest import STOP, WARN, Gate, Manifest

CLASSES = ("soul", "relation", "tool")  # always shown: a class without a sample is the news
MARKS = {STOP: "❌", WARN: "⚠️"}
MAX_NAMED = 20  # names per gate; the report on the box lists all


def corpus(manifest: Manifest, expected: Mapping[str, float], words: Words) -> list[str]:
    """Return the paragraphs about a corpus."""
    parts = [f"### {words('summary.samples')}", _counts(manifest, expected, words)]
    if manifest.tokenizer == "estimated":
        parts.append(words("summary.estimated"))
    parts += [f"### {words('summary.gates')}", _gates(manifest, words)]
    if manifest.missing:  # paths of the plan: as public as the plan
        parts += [f"### {words('summary.missing', count=len(manifest.missing))}", bullets(manifest.missing)]
    drops = _drops(manifest, words)
    if drops:
        parts += [f"### {words('summary.drops')}", drops]
    if manifest.findings:
        parts += [f"### {words('report.findings')}", _findings(manifest, words)]
    return parts


def _counts(manifest: Manifest, expected: Mapping[str, float], words: Words) -> str:
    head = tuple(
        words(f"summary.{name}")
        for name in ("class", "files", "count", "unique", "tokens", "trained", "lost", "expected")
    )
    names = [*CLASSES, *(name for name in manifest.classes if name not in CLASSES)]
    rows = [_class_row(manifest, name, _expectation(name, expected, words), words) for name in names]
    accounts = list(manifest.classes.values())
    sums = [sum(getattr(account, key) for account in accounts) for key in _KEYS]
    total = [words("summary.total"), number(len(manifest.files)), *(number(value) for value in sums)]
    return table(head, [*rows, [*total, _expectation("total", expected, words)]])


_KEYS = ("samples", "unique", "tokens", "trained_tokens", "lost_tokens")


def _class_row(manifest: Manifest, name: str, expectation: str, words: Words) -> list[str]:
    account = manifest.classes.get(name)
    files = sum(1 for file in manifest.files if file.sample_class == name)
    counts = [number(getattr(account, key)) if account else "0" for key in _KEYS]
    return [words.sample_class(name), number(files), *counts, expectation]


def _expectation(name: str, expected: Mapping[str, float], words: Words) -> str:
    """Return what the plan's gates hope for, so that a count can be judged where it stands."""
    if name == "soul" and "soul_share" in expected:
        return words("summary.expect_soul", share=f"{expected['soul_share']:.0%}")
    if name in ("relation", "total") and name in expected:
        return words(f"summary.expect_{name}", count=int(expected[name]))
    return "–"


def _gates(manifest: Manifest, words: Words) -> str:
    head = tuple(words(f"summary.{name}") for name in ("gate", "verdict", "found", "wanted", "look_at"))
    rows = [
        (
            words.gate(gate.name),
            f"{MARKS.get(gate.verdict, '✅')} {words.or_itself('verdict', gate.verdict)}",
            number(gate.found),
            number(gate.wanted),
            _look_at(gate, manifest, words),
        )
        for gate in manifest.gates
    ]
    return table(head, rows)


def _look_at(gate: Gate, manifest: Manifest, words: Words) -> str:
    """Return the files a gate points at: plan paths as they are, names of dialogs and documents by class."""
    shown = [name if name in manifest.missing else words.shown(Named(name)) for name in gate.where[:MAX_NAMED]]
    more = len(gate.where) - MAX_NAMED
    return ", ".join(shown) + (f" … +{more}" if more > 0 else "") or "–"


def _drops(manifest: Manifest, words: Words) -> str:
    counted: Counter[tuple[str, str]] = Counter()
    for file in manifest.files:
        for reason, units in file.drops.items():
            counted[file.sample_class, reason] += units
    if not counted:
        return ""
    head = (words("summary.class"), words("summary.reason"), words("summary.units"))
    return table(
        head,
        [(words.sample_class(name), reason, number(units)) for (name, reason), units in sorted(counted.items())],
    )


def _findings(manifest: Manifest, words: Words) -> str:
    """Return what the checks found, counted by kind; the places stand in the manifest on the box."""
    counts: Counter[tuple[str, str]] = Counter()
    for finding in manifest.findings:
        counts[finding.kind, finding.action] += finding.count
    head = (words("report.kind"), words("report.done"), words("report.places"))
    rows = [
        (words.or_itself("finding", kind), words.or_itself("done", action), number(count))
        for (kind, action), count in counts.items()
    ]
    return table(head, rows)
