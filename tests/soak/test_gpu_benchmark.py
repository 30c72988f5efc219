"""The benchmark for GPUs, where there is none: it claims nothing, and all of its own code works on a toy."""

import os
import subprocess
import sys

import pytest

from benchmarks.gpu import SUBJECTS
from tests.test_architecture import ROOT

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *argv]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1700)


def test_without_a_gpu_nothing_is_claimed():
    page = ROOT / "benchmarks/results/gpu.md"
    before = page.read_bytes() if page.exists() else None
    done = run()
    assert done.returncode == 2, done.stderr[-2000:]
    assert [line.removeprefix("- ") for line in done.stdout.splitlines() if line.startswith("- ")] == list(SUBJECTS)
    assert (page.read_bytes() if page.exists() else None) == before


def test_every_part_runs_on_a_toy_or_says_why_not():
    done = run("--small-cpu")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "BROKEN" not in done.stdout
    not_run = [line for line in done.stdout.splitlines() if "not run:" in line]
    assert len(not_run) == 3  # FlashAttention, Liger's kernels and 4 bits: no CUDA GPU, says the product
    assert all("method_unsupported" in line and "no CUDA GPU" in line for line in not_run)
    assert done.stdout.count("a checkpoint stops it") == 2


def test_an_unknown_word_is_refused():
    assert run("--small").returncode == 1
