"""The account of one corpus build: what was read, kept and dropped, per file and per class, and the gates' verdicts.

A contract. Written last, by rename: a corpus without a manifest is not a corpus. Side effects: `save_manifest`
writes, `load_manifest` reads.

    {"plan_digest": "3fa1…", "tokenizer": "9be0…", "files": [{"path": "docs/a.md", "class": "soul", "bytes": 912,
     "encoding": "utf-8", "units_read": 4, "units_kept": 4, "samples": 20, "drops": {}}], "classes": {"soul":
     {"samples": 20, "unique": 4, "characters": 1400, "tokens": 620, "trained_tokens": 410, "lost_tokens": 0}},
     "gates": [{"name": "total", "verdict": "pass", "found": 120, "wanted": 100}], "samples_sha256": "…",
     "findings": [{"kind": "email", "action": "reported", "path": "docs/a.md", "count": 2, "lines": [3, 9]}]}
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from corpus_builder.errors import ProjectError
from corpus_builder.private_file import save_private

PASS, WARN, STOP = "pass", "warn", "stop"
#: Equal parts of the window by which the samples' lengths are counted.
HISTOGRAM_BUCKETS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FileAccount:
    """One input file. Units are sections and whole files (soul), turns (relation), lines (tool)."""

    path: str
    sample_class: str
    bytes: int
    encoding: str
    units_read: int
    units_kept: int
    samples: int
    drops: dict[str, int] = field(default_factory=dict)  # reason -> units
    notes: dict[str, int] = field(default_factory=dict)  # what was noticed and kept, e.g. merged_turns -> 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassAccount:
    """One class. `lost_tokens` are tokens of kept units that reached no sample: 0, or a fault."""

    samples: int
    unique: int
    characters: int
    tokens: int
    trained_tokens: int
    lost_tokens: int
    validation_samples: int = 0  # of `samples`
    token_histogram: tuple[int, ...] = ()  # samples by length, in sixteenths of the window


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One verdict. `found` against `wanted`, in the gate's own unit; `where` says which files to look at (named)."""

    name: str
    verdict: str
    found: float
    wanted: float
    where: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found in one file: how often, and on which lines (the first ones); never the value itself.

    `kind`: a kind of `sensitive.py`, or `equal_text`, `near_copy`, `contradiction`; then `others` names the other
    files (the first ones). `action`: `redacted` or `reported`.
    """

    kind: str
    action: str
    path: str
    count: int
    lines: tuple[int, ...]
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One corpus; `tokenizer` is the digest of tokenizer and template, or `estimated`."""

    plan_name: str
    plan_digest: str
    tokenizer: str
    max_seq_len: int
    files: tuple[FileAccount, ...]
    missing: tuple[str, ...]  # files that the plan lists and that are not there
    classes: dict[str, ClassAccount]
    gates: tuple[Gate, ...]
    samples_sha256: str
    findings: tuple[Finding, ...] = ()
    contradictory_prompts: int = 0  # prompts that have several targets

    @property
    def total_samples(self) -> int:
        """Samples of all classes."""
        return sum(account.samples for account in self.classes.values())

    def found(self) -> dict[str, int]:
        """Return how often each kind was found in all files."""
        kinds: dict[str, int] = {}
        for finding in self.findings:
            kinds[finding.kind] = kinds.get(finding.kind, 0) + finding.count
        return kinds

    @property
    def verdict(self) -> str:
        """The worst verdict of all gates."""
        verdicts = {gate.verdict for gate in self.gates}
        return STOP if STOP in verdicts else WARN if WARN in verdicts else PASS


def check_adds_up(manifest: Manifest) -> None:
    """Raise `manifest_unbalanced` unless read = kept + dropped in every file and the samples add up by class."""
    for account in manifest.files:
        if account.units_read != account.units_kept + sum(account.drops.values()):
            raise ProjectError(
                "manifest_unbalanced", what=f"file {manifest.files.index(account) + 1}: read is not kept + dropped"
            )
    for name, total in manifest.classes.items():
        if total.samples != sum(account.samples for account in manifest.files if account.sample_class == name):
            raise ProjectError("manifest_unbalanced", what=f"class {name}: samples of its files do not add up")


def check_gates(manifest: Manifest) -> None:
    """Raise `gate_failed` naming every gate that stops."""
    stopped = [gate for gate in manifest.gates if gate.verdict == STOP]
    if stopped:
        raise ProjectError(
            "gate_failed",
            gates=", ".join(f"{gate.name} ({gate.found:g} < {gate.wanted:g})" for gate in stopped),
        )


def manifest_to_json(manifest: Manifest) -> dict[str, Any]:
    """Return the manifest as JSON values; the inverse of `manifest_from_json`."""
    packed = _fields(manifest)
    packed["files"] = [_renamed(_fields(file), "sample_class", "class") for file in manifest.files]
    packed["classes"] = {name: _fields(account) for name, account in manifest.classes.items()}
    packed["gates"] = [_fields(gate) for gate in manifest.gates]
    packed["findings"] = [_fields(finding) for finding in manifest.findings]
    return packed


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass; `asdict` would copy every one of them, and there may be 200,000 files."""
    return {one.name: getattr(value, one.name) for one in fields(value)}


def manifest_from_json(packed: dict[str, Any]) -> Manifest:
    """Return the manifest of its JSON values."""
    return Manifest(
        **{
            **packed,
            "files": tuple(FileAccount(**_renamed(file, "class", "sample_class")) for file in packed["files"]),
            "missing": tuple(packed["missing"]),
            "classes": {name: ClassAccount(**_tuples(account)) for name, account in packed["classes"].items()},
            "gates": tuple(Gate(**_tuples(gate)) for gate in packed["gates"]),
            "findings": tuple(Finding(**_tuples(finding)) for finding in packed.get("findings", ())),
        }
    )


def _tuples(mapping: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in mapping.items()}


def _renamed(mapping: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if key == old else key: value for key, value in mapping.items()}


def save_manifest(manifest: Manifest, path: Path) -> None:
    """Check the account and write it to `path` by rename."""
    save_private(format_manifest(manifest), path)


def format_manifest(manifest: Manifest) -> str:
    """Return the text of a manifest; raise unless its account adds up."""
    check_adds_up(manifest)
    return json.dumps(manifest_to_json(manifest), ensure_ascii=False, indent=1)


def load_manifest(path: Path) -> Manifest:
    """Return the manifest in `path`; raise `config_unreadable` when it is missing or broken."""
    try:
        return manifest_from_json(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProjectError("config_unreadable", path=str(path), reason=type(error).__name__) from error
