"""`zy corpus build`: the builder as a child on this machine, its log shown, its manifest said. Side effects: files.

corpus-out/ coding-sft.jsonl coding-sft.manifest.json coding-sft.report.html
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from controller.build_bar import BuildBar
from controller.configuration import CODE_ROOT
from controller.github import defuse
from controller.inputs import parse_set
from controller.invocation import Surroundings, choose_lang, tell_error
from controller.job import SEES
from controller.summary_corpus import corpus
from controller.words import Words
from corpus_builder.errors import ProjectError, parse_error_line
from corpus_builder.log_lines import public_line
from corpus_builder.manifest import load_manifest, manifest_to_json
from corpus_builder.plan import load_plan

SAMPLES, MANIFEST, REPORT = "coding-sft.jsonl", "coding-sft.manifest.json", "coding-sft.report.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusWish:
    """What the command line gave; paths as they were typed."""

    plan_name: str
    base_model_dir: str
    dialog_dir: str | None
    max_seq_len: int
    repo_root: str
    sets: tuple[str, ...]
    out: str
    is_json: bool
    lang: str | None


def perform(around: Surroundings, wish: CorpusWish) -> int:
    """Build and return the exit code; the counts are printed also when a gate stops."""
    lang = choose_lang(wish.lang, around.environ)
    request = make_request(wish, around.environ, lang)
    manifest_path = Path(str(request["manifest"]))
    manifest_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    error = _build(request, around, is_json=wish.is_json)
    if error is None or error.code in ("gate_failed", "zero_samples"):
        _show(manifest_path, around, lang, is_json=wish.is_json)
    return 0 if error is None else tell_error(error, around, lang)


def make_request(wish: CorpusWish, environ: Mapping[str, str], lang: str) -> dict[str, object]:
    """Return the builder's request; raise what is wrong with the plan or an override. Reads the plan."""
    is_path = wish.plan_name.endswith((".yaml", ".yml"))
    plan_path = Path(wish.plan_name) if is_path else CODE_ROOT / "configs" / "corpus" / f"{wish.plan_name}.yaml"
    sets = [parse_set(text) for text in wish.sets]
    plan = load_plan(plan_path, environment=environ, sets=sets).value
    folder = Path(wish.out).absolute()
    dialog_dir = plan.dialog_dir or wish.dialog_dir
    return {
        "plan": plan.model_dump(mode="json"),
        "sources_dir": str((Path(wish.repo_root) / plan.repo_root).absolute()),
        "dialog_dir": None if dialog_dir is None else str(Path(dialog_dir).absolute()),
        "base_model_dir": str(Path(wish.base_model_dir).absolute()),
        "max_seq_len": wish.max_seq_len,
        "samples": str(folder / SAMPLES),
        "manifest": str(folder / MANIFEST),
        "report": str(folder / REPORT),
        "suite": None,
        "lang": lang,
    }


def _build(request: Mapping[str, object], around: Surroundings, *, is_json: bool) -> ProjectError | None:
    """Run the builder with its log shown; return why it failed, None when it did not."""
    bar = BuildBar(around.err if is_json else around.out)
    sees = around.runner.sees()
    environment = {**os.environ, "PYTHONPATH": str(CODE_ROOT), "PYTHONUNBUFFERED": "1"}
    error: ProjectError | None = None
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "request.json"
        path.write_text(json.dumps(request, ensure_ascii=False), "utf-8")
        command = [sys.executable, "-m", "corpus_builder.build", str(path)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, encoding="utf-8",
            errors="replace",
        ) as child:  # fmt: skip
            assert child.stdout is not None
            for line in child.stdout:
                told = parse_error_line(line.rstrip("\n"))
                error = told or error
                shown = line if sees == "text" else public_line(line)
                if told is None and shown is not None:
                    bar.add(defuse(shown.rstrip("\n")))
            bar.end()
    if child.returncode == 0:
        return None
    return error or ProjectError("setup_failed", step="corpus", exit_code=child.returncode, name="corpus build")


def _show(path: Path, around: Surroundings, lang: str, *, is_json: bool) -> None:
    manifest = load_manifest(path)
    if is_json:
        around.out.write(json.dumps(manifest_to_json(manifest), ensure_ascii=False, indent=1) + "\n")
        return
    paragraphs = corpus(manifest, {}, Words(lang, SEES[around.runner.sees()]))
    around.out.write("\n\n".join(paragraphs) + f"\n\n{path.parent}\n")
