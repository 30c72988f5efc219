"""Acceptance: greedy answers by the frame, judged by the suite, in a file for its owner only."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from corpus_builder.errors import parse_error_line
from corpus_builder.sample import Message, Sample
from tests.tiny_run import ROOT, make_run

pytestmark = pytest.mark.e2e  # whole processes that import torch
ASKED, ANSWER = "Who keeps the lamp?", "Kestrin does."


def teach(folder: Path, base_dir: Path, **keys) -> str:
    """Return what the tiny model became when it had learned one answer by heart."""
    sample = Sample(messages=(Message("user", ASKED), Message("assistant", ANSWER)), source="test", sample_class="soul")
    other = Sample(
        messages=(Message("user", "Tell me about fog."), Message("assistant", "It comes and goes.")),
        source="other", sample_class="soul",
    )  # fmt: skip
    run = make_run(folder, base_dir, [sample, other], num_train_epochs=60, learning_rate=1e-2, **keys)
    assert run.launch(alone=True).exit_code == 0
    return run.paths.final


@pytest.fixture(scope="module")
def taught(tmp_path_factory, tiny_dir) -> str:
    return teach(tmp_path_factory.mktemp("taught"), tiny_dir)


def ask(
    model_dir: str, out: Path, *questions: dict, base_model_dir: str | None = None, **suite
) -> subprocess.CompletedProcess[str]:
    request = out.with_name("request.json")
    tree = {"name": "t", "pass_at_least": 1, "questions": list(questions)} | suite
    base = {} if base_model_dir is None else {"base_model_dir": base_model_dir}
    request.write_text(json.dumps({"model_dir": model_dir, "suite": tree, "out": str(out)} | base))
    return subprocess.run(
        [sys.executable, "-m", "trainer.accept", str(request)], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, check=False,
    )  # fmt: skip


def test_answers_are_judged(taught, tmp_path):
    done = ask(
        taught, tmp_path / "out.json", {"ask": ASKED, "any_of": ["kestrin"]}, {"ask": ASKED, "none_of": ["Kestrin"]}
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert result == {
        "suite": "t", "right": 1, "total": 2, "wanted": 1,
        "answers": [
            {"ask": ASKED, "answer": ANSWER, "is_right": True},
            {"ask": ASKED, "answer": ANSWER, "is_right": False},
        ],
    }  # fmt: skip
    assert stat.S_IMODE((tmp_path / "out.json").stat().st_mode) == 0o600
    assert "[check] 1 of 2 questions right" in done.stdout


def test_what_the_model_says_stays_out_of_the_log(taught, tmp_path):
    done = ask(taught, tmp_path / "out.json", {"ask": ASKED})
    assert ANSWER not in done.stdout + done.stderr


def test_answers_are_bounded(taught, tmp_path):
    ask(taught, tmp_path / "out.json", {"ask": ASKED}, max_new_tokens=1)
    answer = json.loads((tmp_path / "out.json").read_text("utf-8"))["answers"][0]["answer"]
    assert len(answer) < len(ANSWER)


@pytest.mark.parametrize(("suite", "code"), [({}, "base_model_missing"), ({"unknown": 1}, "config_invalid")])
def test_bad_requests(tiny_dir, tmp_path, suite, code):
    model_dir = str(tiny_dir) if suite else str(tmp_path / "none")
    done = ask(model_dir, tmp_path / "out.json", {"ask": "?"}, **suite)
    (error,) = filter(None, map(parse_error_line, done.stderr.splitlines()))
    assert (error.code, done.returncode) == (code, 2)
    assert not (tmp_path / "out.json").exists()


def test_an_adapter_answers_on_its_base(tiny_dir, tmp_path):
    lora = {"r": 32, "lora_dropout": 0.0, "modules_to_save": ["lm_head"], "merge": False}
    adapter = teach(tmp_path / "data", tiny_dir, lora=lora)
    done = ask(adapter, tmp_path / "out.json", {"ask": ASKED, "any_of": ["kestrin"]}, base_model_dir=str(tiny_dir))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out.json").read_text("utf-8"))["answers"][0]["answer"] == ANSWER

    done = ask(adapter, tmp_path / "out2.json", {"ask": ASKED})
    (error,) = filter(None, map(parse_error_line, done.stderr.splitlines()))
    assert error.code == "base_model_is_adapter"  # an adapter's folder alone is not a model
