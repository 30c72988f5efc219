"""`zy corpus preview` and `zy corpus report` on a corpus that was built."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from corpus_builder.build import build
from corpus_builder.plan import load_plan
from corpus_builder.request import load_request

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory, chatml_model_dir):
    """A folder with the demo's corpus."""
    out = tmp_path_factory.mktemp("corpus")
    plan = load_plan(ROOT / "configs/corpus/demo.yaml", environment={}).value
    request = {
        "plan": plan.model_dump(mode="json"), "sources_dir": str(ROOT), "dialog_dir": str(ROOT / "demo/dialogs"),
        "base_model_dir": str(chatml_model_dir), "max_seq_len": 1024, "suite": None, "lang": "zh",
        "samples": str(out / "coding-sft.jsonl"), "manifest": str(out / "coding-sft.manifest.json"),
        "report": str(out / "coding-sft.report.html"),
    }  # fmt: skip
    (out / "request.json").write_text(json.dumps(request), "utf-8")
    build(load_request(out / "request.json"))
    return out


def zy(*args, **environ):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ZY_", "GITHUB_"))}
    command = [sys.executable, "-m", "controller.cli", "corpus", *map(str, args)]
    return subprocess.run(command, env={**kept, **environ}, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_preview_shows_counts_and_marks_what_is_trained(built):
    done = zy("preview", "--out", built, "--rows", 1, "--lang", "en")
    assert done.returncode == 0
    assert "relation: samples 23, unique 23" in done.stdout
    assert "[user]\n  What is your name?\n[assistant]\n┃ I am Kestrin" in done.stdout
    assert "3 of 58 samples are shown" in done.stdout


def test_preview_of_one_class_shows_no_other(built):
    text = zy("preview", "--out", built, "--class", "tool", "--rows", 2, "--lang", "en").stdout
    assert "2 of 3 samples are shown" in text
    assert "soul ·" not in text


def test_preview_on_a_runner_shows_counts_only(built):
    text = zy("preview", "--out", built, "--lang", "en", GITHUB_ACTIONS="true").stdout
    assert "relation: samples 23" in text
    assert "Kestrin" not in text


def test_report_is_written_again_in_another_language(built):
    path = built / "coding-sft.report.html"
    assert 'lang="zh"' in path.read_text("utf-8")
    assert zy("report", "--out", built, "--lang", "en").stdout.strip() == str(path)
    assert 'lang="en"' in path.read_text("utf-8")


@pytest.mark.parametrize("what", ["preview", "report"])
def test_folder_without_a_corpus_is_named(tmp_path, what):
    done = zy(what, "--out", tmp_path, "--lang", "en")
    assert done.returncode == 2
    assert "coding-sft.manifest.json" in done.stderr
