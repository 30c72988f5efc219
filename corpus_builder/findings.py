"""Receipts and repeated units -> findings per file, for the manifest. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from corpus_builder.duplicates import Duplicates, Pair
from corpus_builder.entries import Summary
from corpus_builder.ledger import Ledger
from corpus_builder.manifest import Finding
from corpus_builder.screen import MAX_LINES, REDACT

#: Other files that a finding names.
MAX_OTHERS = 5


def receipt_findings(summaries: Iterable[Summary], policies: Mapping[str, str]) -> list[Finding]:
    """Return what the screen found, file by file."""
    return [
        Finding(
            kind=kind,
            action="redacted" if policies[kind] == REDACT else "reported",
            path=summary.file.name,
            count=receipt.count,
            lines=tuple(sorted(receipt.lines)),
        )
        for summary in summaries
        for kind, receipt in summary.receipts.items()
    ]


@dataclass(slots=True)
class _Repeats:
    """Units of one file that repeat others."""

    count: int = 0
    lines: list[int] = field(default_factory=list)
    others: dict[str, None] = field(default_factory=dict)


def duplicate_findings(ledger: Ledger, duplicates: Duplicates) -> list[Finding]:
    """Return the units that say what an earlier one says, exactly or nearly."""
    return [
        *_findings("equal_text", ledger, duplicates.equal),
        *_findings("near_copy", ledger, duplicates.near),
    ]


def contradiction_findings(ledger: Ledger, prompts: Sequence[Sequence[int]]) -> list[Finding]:
    """Return the units that answer a prompt which others answer differently."""
    pairs = [(units[0] if unit != units[0] else units[-1], unit) for units in prompts for unit in units]
    return _findings("contradiction", ledger, pairs)


def _findings(kind: str, ledger: Ledger, pairs: Iterable[Pair]) -> list[Finding]:
    by_file: dict[str, _Repeats] = {}
    for other, unit in pairs:
        place, partner = ledger.place_of(unit), ledger.place_of(other).path
        repeats = by_file.setdefault(place.path, _Repeats())
        repeats.count += 1
        if place.line not in repeats.lines and len(repeats.lines) < MAX_LINES:
            repeats.lines.append(place.line)
        if partner != place.path and len(repeats.others) < MAX_OTHERS:
            repeats.others[partner] = None
    return [
        Finding(
            kind=kind,
            action="reported",
            path=path,
            count=repeats.count,
            lines=tuple(sorted(repeats.lines)),
            others=tuple(repeats.others),
        )
        for path, repeats in sorted(by_file.items())
    ]
