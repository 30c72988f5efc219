"""`zy train` on this machine: a tiny model, the real supervisor, launcher and trainer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from corpus_builder.sample import format_sample
from tests.tiny_run import ROOT, tiny_samples, write_base_model
from trainer.base_model import find_model_faults
from trainer.build_locks import EXTENSIONS_DIR, extensions_dir
from trainer.children import child_from_json, find_members

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
CANARY = "t0ken-canary-7f3a"


@dataclass(frozen=True)
class Laptop:
    """A folder with a base model, samples and a recipe, and `zy train` in it."""

    folder: Path

    @property
    def data(self) -> Path:
        return self.folder / "train-out"

    def write_recipe(self, **keys: Any) -> None:
        recipe = {
            "name": "tiny", "version": "tiny_v1", "plan": "tiny", "base_model_dir": "base", "max_seq_len": 256,
            "num_train_epochs": 2, "learning_rate": 1.0e-3, "tokens_per_step": 250, "allow_few_steps": True, "gpus": 1,
            "device": "cpu", "packing": False, "report_every_steps": 1, "save_steps": 2,
        }  # fmt: skip
        (self.folder / "tiny.yaml").write_text(yaml.safe_dump(recipe | keys), "utf-8")

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "controller.cli", "train", "--lang", "en", *words]

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        tools = {EXTENSIONS_DIR: extensions_dir(sys.executable), "CUDA_VISIBLE_DEVICES": ""}
        return {**kept, **tools, "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8", **more}

    def zy(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*words), cwd=self.folder, env=self.environment(**more), capture_output=True, text=True,
            timeout=600, check=False,
        )  # fmt: skip

    def runs(self) -> list[Path]:
        return sorted((self.data / "runs").iterdir())

    def tree(self) -> dict[str, bytes | None]:
        return {
            str(path.relative_to(self.folder)): path.read_bytes() if path.is_file() else None
            for path in sorted(self.folder.rglob("*"))
        }


@pytest.fixture
def laptop(tmp_path) -> Laptop:
    samples = tiny_samples()
    write_base_model(tmp_path / "base", samples)
    (tmp_path / "samples.jsonl").write_text("".join(format_sample(one) + "\n" for one in samples), "utf-8")
    found = Laptop(tmp_path)
    found.write_recipe()
    return found


FRESH = ("tiny.yaml", "--samples", "samples.jsonl")


def outcome_of(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "outcome.json").read_text("utf-8")))


def test_it_trains_as_on_a_box(laptop):
    done = laptop.zy(*FRESH, "--set", "learning_rate=0.002", ZY_NUM_EPOCHS="1", WANDB_API_KEY=CANARY)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = laptop.runs()
    recipe = json.loads((run / "recipe.json").read_text("utf-8"))
    assert (recipe["recipe"]["learning_rate"], recipe["recipe"]["num_train_epochs"]) == (0.002, 1)
    assert recipe["origins"] == {"num_train_epochs": "ZY_NUM_EPOCHS", "learning_rate": "--set", "data_path": "--set"}
    assert outcome_of(run)["state"] == "succeeded"
    final = laptop.data / "checkpoints/tiny_v1" / run.name / "final"
    assert done.stdout.splitlines()[-1] == str(final)
    assert find_model_faults(str(final)) == []
    names = [json.loads(line)["name"] for line in (run / "events.jsonl").read_text("utf-8").splitlines()]
    assert names[:2] == ["step_started", "preflight"]
    assert names[-3:] == ["final_saved", "finished", "step_finished"]
    assert not (laptop.data / "locks/run.json").exists()
    # report_to names no tracker, so no process of the run ever had the token
    assert "WANDB_API_KEY" not in (laptop.data / f"logs/train-{run.name}.log").read_text("utf-8")
    assert not (run / "secrets.env").exists()


def test_a_dry_run_prints_the_command_and_changes_nothing(laptop):
    laptop.write_recipe(gpus=2)
    before = laptop.tree()
    done = laptop.zy(*FRESH, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert laptop.tree() == before
    lines = done.stdout.splitlines()
    assert any(line.startswith("ZY_EVENT name=preflight ") for line in lines)
    command = lines[-1].split()
    assert command[:3] == [sys.executable, "-m", "deepspeed.launcher.launch"]
    assert command[4:8] == ["--no_local_rank", "--master_addr", "127.0.0.1", "--master_port"]
    assert command[9:11] == ["--module", "trainer.train"]
    assert command[11].startswith(f"{laptop.data}/runs/")


@pytest.mark.parametrize(
    ("keys", "code", "said"),
    [
        ({"base_model_dir": "none"}, 2, "base_model_dir"),
        ({"allow_few_steps": False}, 2, "tokens_per_step"),
        ({"device": "cuda"}, 4, "GPUs"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_loaded(laptop, keys, code, said):
    laptop.write_recipe(**keys)
    done = laptop.zy(*FRESH)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stderr
    (run,) = laptop.runs()
    assert outcome_of(run)["exit_code"] == code
    assert "precision" not in (run / "events.jsonl").read_text("utf-8")


def wait_for_checkpoint(laptop: Laptop, child: subprocess.Popen[str]) -> Path:
    """Return the run once it has written a checkpoint and said so."""
    assert child.stdout is not None
    for line in child.stdout:
        if "name=checkpoint_saved" in line:
            return laptop.runs()[-1]
    raise AssertionError("the run ended before its first checkpoint")


def supervisor_of(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "supervisor.json").read_text("utf-8"))["attempts"][-1])


@pytest.mark.soak
def test_killed_and_resumed_is_the_same_run(laptop):
    laptop.write_recipe(num_train_epochs=6)
    with subprocess.Popen(
        laptop.argv(*FRESH), cwd=laptop.folder, env=laptop.environment(), stdout=subprocess.PIPE, text=True
    ) as child:
        run = wait_for_checkpoint(laptop, child)
        attempt = supervisor_of(run)
        os.kill(attempt["process"]["pid"], signal.SIGKILL)
        child.communicate()
    assert child.returncode == 6  # it vanished without an outcome
    give_up = time.monotonic() + 30
    while find_members(child_from_json(attempt["child"])) and time.monotonic() < give_up:
        time.sleep(0.1)
    assert not (run / "outcome.json").exists()

    done = laptop.zy("--resume", run.name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert laptop.runs() == [run]
    attempts = json.loads((run / "supervisor.json").read_text("utf-8"))["attempts"]
    assert [one["attempt"] for one in attempts] == [1, 2]
    assert "name=resumed" in done.stdout
    assert outcome_of(run)["state"] == "succeeded"


@pytest.mark.soak
def test_an_interrupted_run_goes_on_in_a_new_one(laptop):
    laptop.write_recipe(num_train_epochs=6, save_steps=1000)
    with subprocess.Popen(
        laptop.argv(*FRESH), cwd=laptop.folder, env=laptop.environment(), stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        next(line for line in child.stdout if line.startswith("ZY_PROGRESS "))
        (run,) = laptop.runs()
        refused = laptop.zy(*FRESH)
        assert (refused.returncode, laptop.runs()) == (8, [run])
        assert laptop.zy("--resume", run.name).returncode == 8
        child.send_signal(signal.SIGINT)
        child.communicate()
    assert child.returncode == 6
    assert outcome_of(run)["state"] == "interrupted"

    done = laptop.zy("--resume", run.name)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = laptop.runs()
    assert first == run
    recipe = json.loads((second / "recipe.json").read_text("utf-8"))
    assert recipe["resumed_from"] == run.name
    assert f"run={run.name}" in done.stdout
    assert outcome_of(second)["state"] == "succeeded"


@pytest.mark.parametrize(
    "words", [(), ("tiny.yaml", "--resume", "20260101-000000-abcd"), ("--resume", "x", "--set", "a=1")]
)
def test_a_recipe_or_a_run_and_not_both(laptop, words):
    assert laptop.zy(*words).returncode == 2


def test_a_run_that_is_not_there(laptop):
    done = laptop.zy("--resume", "20260101-000000-abcd")
    assert (done.returncode, laptop.data.exists()) == (6, False)
