"""What the builder is asked for: one JSON file. Side effects: `load_request` reads it.

{"plan": {…}, "sources_dir": "…/sources", "dialog_dir": "…/bingshuo-dialog", "base_model_dir": "…",
 "max_seq_len": 4096, "samples": "…/coding-sft.jsonl", "manifest": "….manifest.json", "report": "….report.html",
 "suite": {…} | null, "lang": "zh"}
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corpus_builder.config import validate
from corpus_builder.errors import ProjectError
from corpus_builder.plan import Plan
from corpus_builder.say import LANGUAGES
from corpus_builder.suite import Suite


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to build from what; paths are on this machine."""

    plan: Plan
    sources_dir: Path
    dialog_dir: Path | None
    base_model_dir: Path
    max_seq_len: int
    samples: Path
    manifest: Path
    report: Path
    suite: Suite | None
    lang: str

    @property
    def full_report(self) -> Path:
        """The report with texts in it: beside the other, for who may read the samples as well."""
        return self.report.with_name(self.report.name.removesuffix(".html") + ".full.html")


def load_request(path: Path) -> Request:
    """Return the request in `path`; raise `config_unreadable` or `config_invalid`."""
    try:
        packed: dict[str, Any] = json.loads(path.read_text("utf-8"))
        plan = validate(Plan, packed["plan"], where="plan")
        dialog_dir = packed["dialog_dir"] or plan.dialog_dir
        return Request(
            plan=plan,
            sources_dir=Path(packed["sources_dir"]),
            dialog_dir=Path(dialog_dir) if dialog_dir else None,
            base_model_dir=Path(packed["base_model_dir"]),
            max_seq_len=int(packed["max_seq_len"]),
            samples=Path(packed["samples"]),
            manifest=Path(packed["manifest"]),
            report=Path(packed["report"]),
            suite=validate(Suite, packed["suite"], where="suite") if packed["suite"] else None,
            lang=packed["lang"] if packed["lang"] in LANGUAGES else LANGUAGES[0],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProjectError("config_unreadable", path=str(path), reason=f"{type(error).__name__}: {error}") from error
