"""Two steps of a tiny model: who trains them, what a failure says and leaves, when a receipt speaks for them.

The interpreter is a small script in place of `python -m trainer.smoke`; the real one: tests/e2e/test_environment.py.
"""

import io
import json
import os
import stat
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from controller.boxside import setup_steps, smoke
from controller.boxside.environment import find_current, find_overlay
from controller.boxside.smoke import Place, choose_place, last_words
from corpus_builder.errors import NAMED, ProjectError, parse_error_line, privacy_class
from trainer.gpus import Gpus
from trainer.locks import start_ticks
from trainer.remedies import find_remedy

pytestmark = pytest.mark.e2e  # real processes

ROOT = Path(__file__).parents[2]
#: Stands for an interpreter: notes what it was asked, then does what the test says.
PYTHON = """#!{python}
import json, os, subprocess, sys, time
assert sys.argv[1:3] == ["-m", "trainer.smoke"], sys.argv
asked = json.load(sys.stdin)
os.makedirs(sys.argv[3])
asked["env"] = {{name: os.environ.get(name) for name in ("HF_HUB_OFFLINE", "PYTHONPATH", "PATH")}}
open({calls!r}, "a").write(json.dumps(asked) + "\\n")
def step(number):
    print("ZY_PROGRESS step=%d total=2 loss=5.5 lr=1e-05 epoch=1 total_epochs=1 thr=1" % number, flush=True)
{does}
"""
GOOD = "step(1); step(2)"
RECIPE = {"deepspeed": "zero3_offload", "device": "cpu", "gpus": 4, "precision": "auto", "learning_rate": 1e-5}
OLD = {"python": "/old/bin/python", "versions": {}}


class Bench:
    """A root folder, a scripted interpreter, and the step."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / "root"
        self.venvs, self.calls, self.python = self.root / "venvs", folder / "calls", folder / "venv/bin/python"
        self.venvs.mkdir(parents=True, mode=0o700)
        self.root.chmod(0o700)
        self.python.parent.mkdir(parents=True)
        (self.venvs / "current.json").write_text(json.dumps(OLD))
        self.offer(GOOD)
        self.candidate()

    def offer(self, does: str) -> None:
        self.python.write_text(PYTHON.format(python=sys.executable, calls=str(self.calls), does=does))
        self.python.chmod(self.python.stat().st_mode | stat.S_IXUSR)

    def candidate(self, **changes: object) -> None:
        noted = {"python": str(self.python), "packages": "0a1b", "versions": {"torch": "2"}, "overlay": None, **changes}
        (self.venvs / "candidate.json").write_text(json.dumps(noted))

    def run(self, **recipe: object) -> tuple[int, str]:
        request = {
            "root": str(self.root), "code": str(ROOT), "python": str(self.python), "recipe": {**RECIPE, **recipe},
        }  # fmt: skip
        path = self.folder / "request.json"
        path.write_text(json.dumps(request))
        out = io.StringIO()
        with redirect_stdout(out):
            return setup_steps.run_step("smoke", str(path)), out.getvalue()

    def asked(self) -> list[dict]:
        return [json.loads(line) for line in self.calls.read_text().splitlines()] if self.calls.exists() else []


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def error_of(capfd):
    return next(error for error in map(parse_error_line, capfd.readouterr().err.splitlines()) if error is not None)


def test_what_has_trained_is_taken_into_use_and_not_trained_again(bench):
    assert bench.run()[0] == 0
    assert find_current(str(bench.root)) == str(bench.python)
    (asked,) = bench.asked()
    assert (asked["ranks"], asked["gpus"]) == (2, None)
    assert asked["recipe"] == {"deepspeed": "zero3_offload", "device": "cpu", "precision": "auto"}
    assert asked["env"]["HF_HUB_OFFLINE"] == "1"
    assert asked["env"]["PATH"].startswith(f"{bench.python.parent}:")
    assert sorted(path.name for path in bench.venvs.glob("[!s]*")) == ["candidate.json", "current.json"]
    (bench.venvs / "current.json").write_text(json.dumps(OLD))
    code, said = bench.run(learning_rate=1.0, gpus=3)  # nothing of these is the environment's
    assert (code, len(bench.asked())) == (0, 1)
    assert "trained here before" in said
    assert find_current(str(bench.root)) == str(bench.python)


@pytest.mark.parametrize(
    ("noted", "recipe"),
    [
        ({"versions": {"torch": "3"}}, {}), ({"packages": "2c3d"}, {}), ({"overlay": "/x/overlay-1"}, {}),
        ({}, {"deepspeed": "zero3"}), ({}, {"gpus": 1}), ({}, {"precision": "fp32"}), ({}, {"lora": {"r": 4}}),
        ({}, {"attn_implementation": "eager"}), ({}, {"use_liger_kernel": True}),
    ],
)  # fmt: skip
def test_another_environment_or_need_is_trained_again(bench, noted, recipe):
    assert bench.run()[0] == 0
    bench.candidate(**noted)
    assert bench.run(**recipe)[0] == 0
    assert len(bench.asked()) == 2
    assert len(list(bench.venvs.glob("smoke-*.json"))) == 2


def test_adapters_are_proved_as_adapters(bench):
    assert bench.run(lora={"r": 64, "load_in_4bit": True, "target_modules": ["q_proj"]})[0] == 0
    assert bench.asked()[0]["recipe"]["lora"] == {"load_in_4bit": True, "merge": False}


FAILS = """step(1)
print("Traceback (most recent call last):")
print("[rank0]: RuntimeError: The NVIDIA driver on your system is too old (found version 11040).")
print("[launch.py:335:sigkill_handler] ['/x/python', '-u'] exits with return code = 1")
sys.exit(1)"""


def test_a_failure_says_its_last_words_and_leaves_the_environment_before(bench, capfd):
    bench.offer(FAILS)
    code, said = bench.run()
    error = error_of(capfd)
    assert (code, error.code, error.values["path"]) == (4, "smoke_failed", str(bench.python))
    assert str(error.values["reason"]).startswith("[rank0]: RuntimeError: The NVIDIA driver on your system is too old")
    assert privacy_class(error.values["reason"]) == NAMED  # a foreign program may name files and people
    assert "ZY_PROGRESS" not in said  # it is no point of ours
    assert find_remedy(said).code == "driver_too_old"
    assert find_current(str(bench.root)) == "/old/bin/python"
    assert sorted(path.name for path in bench.venvs.iterdir()) == ["candidate.json", "current.json"]


@pytest.mark.parametrize("does", ["step(1)", "pass", "step(1); step(2); sys.exit(3)"])
def test_fewer_steps_or_an_exit_code_are_failures(bench, capfd, does):
    bench.offer(does)
    assert bench.run()[0] == 4
    assert error_of(capfd).code == "smoke_failed"
    assert list(bench.venvs.glob("smoke*")) == []


def test_what_hangs_is_ended_with_all_that_it_started(bench, capfd, monkeypatch):
    pids = bench.folder / "pids"
    bench.offer(f"""child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(pids)!r}, "w").write("%d %d" % (os.getpid(), child.pid))
time.sleep(600)""")
    monkeypatch.setattr(smoke, "TIMEOUT_S", 3.0)
    assert bench.run()[0] == 4
    assert error_of(capfd).values["reason"] == "reason.no_end 3 s"
    assert [start_ticks(int(pid)) for pid in pids.read_text().split()] == [None, None]
    assert list(bench.venvs.glob("smoke*")) == []


def test_what_a_killed_setup_left_is_cleared_away(bench):
    (bench.venvs / "smoke-scratch/run").mkdir(parents=True)
    assert bench.run()[0] == 0
    assert not (bench.venvs / "smoke-scratch").exists()


def test_no_environment_is_proved_that_was_not_looked_at(bench, capfd):
    bench.candidate(python="/another/bin/python")
    assert bench.run()[0] == 4
    assert error_of(capfd).code == "environment_failed"
    assert bench.asked() == []


def gpu(index, *, used_mib=3):
    return {"index": index, "name": "V100", "compute_capability": "7.0", "used_mib": used_mib, "processes": 0}


FOUR = Gpus(True, [gpu(0, used_mib=9999), gpu(1), gpu(2), gpu(3)])


@pytest.mark.parametrize(
    ("recipe", "seen", "place"),
    [
        ({"device": "cpu", "gpus": 4}, FOUR, Place(2)),
        ({"device": "auto", "gpus": 1}, Gpus(False, None), Place(1)),
        ({"gpus": 4}, FOUR, Place(2, [1, 2], "V100 (7.0)")),
        ({"gpus": 1}, FOUR, Place(1, [1], "V100 (7.0)")),
        ({"gpus": [0, 3]}, FOUR, Place(1, [3], "V100 (7.0)")),
        ({"gpus": [0]}, FOUR, "every GPU is in use"),
        ({"gpus": [9]}, FOUR, "no GPU answers"),
        ({"gpus": 2}, Gpus(True, None), "no GPU answers"),
        ({"device": "cuda"}, Gpus(False, None), "no GPU answers"),
    ],
)
def test_who_trains_two_steps(recipe, seen, place):
    assert choose_place(recipe, seen) == place


NVIDIA_SMI = """#!/bin/sh
case "$1" in
--query-gpu=*compute_cap*) echo "0, Tesla V100-SXM2-32GB, 32768, {used}, 0, 7.0, GPU-a";;
--query-gpu=index,driver_version) echo "0, 535.104.05";;
--query-compute-apps=*) ;;
*) echo "unknown: $1" >&2; exit 2;;
esac
"""


@pytest.mark.parametrize("had", [OLD, None])
def test_a_gpu_in_use_is_left_alone_and_the_environment_before_stays(bench, monkeypatch, had):
    tools = bench.folder / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    smi = tools / "nvidia-smi"
    smi.write_text(NVIDIA_SMI.format(used=30000))
    smi.chmod(0o755)
    if had is None:
        (bench.venvs / "current.json").unlink()
    code, said = bench.run(device="auto")
    assert (code, bench.asked()) == (0, [])
    assert "every GPU is in use; the next setup tries again" in said
    assert find_current(str(bench.root)) == ("/old/bin/python" if had else str(bench.python))
    smi.write_text(NVIDIA_SMI.format(used=3))
    assert bench.run(device="auto")[0] == 0
    assert bench.asked()[0]["gpus"] == [0]
    (receipt,) = bench.venvs.glob("smoke-*.json")
    proves = json.loads(receipt.read_text())["proves"]
    assert (proves["card"], proves["driver"]) == ("Tesla V100-SXM2-32GB (7.0)", "535.104.05")


def test_a_training_has_what_its_environment_was_proved_with(bench):
    overlay = bench.venvs / "overlay-1"
    overlay.mkdir()
    bench.candidate(overlay=str(overlay))
    assert bench.run()[0] == 0
    assert bench.asked()[0]["env"]["PYTHONPATH"].split(":")[-1] == str(overlay)
    assert f"{overlay}/bin" in bench.asked()[0]["env"]["PATH"].split(":")
    assert find_overlay(str(bench.root), str(bench.python)) == str(overlay)
    assert find_overlay(str(bench.root), "/old/bin/python") is None


def test_our_own_error_says_more_than_the_launcher_after_it():
    line = 'ZY_ERROR {"code": "precision_unsupported", "values": {"precision": "bf16", "device": "V100"}}'
    lines = ["ValueError: x", line, "[launch.py] exits with return code = 4", ""]
    assert last_words(lines) == str(ProjectError("precision_unsupported", precision="bf16", device="V100"))
    assert last_words(["ImportError: libcudart.so.12: cannot open", "  at exit", ""]).startswith("ImportError")
    assert last_words(["torch.distributed.DistBackendError: NCCL error", "bye"]).startswith("torch.distributed")
    assert last_words(["a", "b", "  "]) == "b"
    assert last_words([]) == ""
