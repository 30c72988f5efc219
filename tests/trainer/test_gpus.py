"""Which GPUs a run takes: nvidia-smi's own answers, parsed; busy ones skipped and named."""

import os
import stat
from pathlib import Path

import pytest

from corpus_builder.errors import ProjectError
from trainer.gpus import BUSY_ABOVE_MIB, FIELDS, Choice, GpuQuery, Gpus, choose_gpus, is_busy, parse_gpus

#: The form of `nvidia-smi --query-gpu=<FIELDS> --format=csv,noheader,nounits`; uuids shortened.
GPUS = """0, Tesla V100-SXM2-32GB, 32768, 3, 0, 7.0, GPU-aaaa
1, Tesla V100-SXM2-32GB, 32768, 30511, 98, 7.0, GPU-bbbb
2, Tesla V100-SXM2-32GB, 32768, 310, 0, 7.0, GPU-cccc
3, Tesla V100-SXM2-32GB, 32768, [N/A], [N/A], [N/A], GPU-dddd
"""
APPS = """GPU-bbbb, 4711, 29870
GPU-bbbb, 4712, 630
GPU-cccc, 4713, [N/A]
"""


def row(index: int, *, used_mib: int | None = 3, processes: int | None = 0) -> dict[str, object]:
    return {"index": index, "used_mib": used_mib, "processes": processes}


def test_rows_of_a_machine_with_neighbours():
    rows = parse_gpus(GPUS, APPS)
    assert [(one["index"], one["used_mib"], one["processes"]) for one in rows] == [
        (0, 3, 0), (1, 30511, 2), (2, 310, 1), (3, None, 0),
    ]  # fmt: skip
    assert [one["compute_capability"] for one in rows] == ["7.0", "7.0", "7.0", None]
    assert [is_busy(one) for one in rows] == [False, True, True, False]


def test_processes_that_could_not_be_asked_are_unknown_and_not_none():
    assert [one["processes"] for one in parse_gpus(GPUS, None)] == [None] * 4
    assert [is_busy(one) for one in parse_gpus(GPUS, None)] == [False, True, False, False]


def test_an_old_driver_has_no_compute_capability():
    fields = tuple(name for name in FIELDS if name != "compute_cap")
    (one,) = parse_gpus("0, Tesla V100, 32768, 3, 0, GPU-aaaa\n", "GPU-aaaa, 1, 5\n", fields)
    assert (one["compute_capability"], one["processes"]) == (None, 1)


def test_lines_that_are_no_rows_are_left_out():
    assert parse_gpus("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n") == []


@pytest.mark.parametrize(("used_mib", "is_taken"), [(None, False), (BUSY_ABOVE_MIB, False), (BUSY_ABOVE_MIB + 1, True)])
def test_memory_alone_makes_busy_above_a_gibibyte(used_mib, is_taken):
    assert is_busy(row(0, used_mib=used_mib, processes=None)) is is_taken


@pytest.mark.parametrize(
    ("wanted", "choice"),
    [
        (1, Choice([0], [])),
        (2, Choice([0, 2], [1])),
        (3, Choice([0, 2, 3], [1])),
        ((2, 0), Choice([2, 0], [])),
        ([3], Choice([3], [])),
    ],
)
def test_busy_ones_are_skipped_and_named(wanted, choice):
    seen = [row(0), row(1, processes=1), row(2), row(3), row(4, used_mib=9999)]
    assert choose_gpus(wanted, seen) == choice


@pytest.mark.parametrize(
    ("wanted", "code", "values"),
    [
        (3, "gpus_busy", {"wanted": 3, "free": 2, "busy": "1"}),
        (4, "gpus_missing", {"wanted": 4, "found": 3}),
        ((0, 1), "gpus_busy", {"wanted": 2, "free": 1, "busy": "1"}),
        ((0, 7), "gpus_missing", {"wanted": 8, "found": 3}),
    ],
)
def test_too_few_are_an_error_that_names_them(wanted, code, values):
    with pytest.raises(ProjectError) as refusal:
        choose_gpus(wanted, [row(0), row(1, processes=1), row(2)])
    assert (refusal.value.code, refusal.value.values) == (code, values)


def write_nvidia_smi(folder: Path, script: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def tools(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin:/bin")
    return tmp_path


def test_the_program_is_asked_for_gpus_and_processes(tools):
    (tools / "gpus").write_text(GPUS)
    (tools / "apps").write_text(APPS)
    write_nvidia_smi(tools, 'case "$1" in --query-gpu=*) cat gpus;; --query-compute-apps=*) cat apps;; esac'.replace(
        "cat ", f"cat {tools}/"))  # fmt: skip
    assert GpuQuery().read() == Gpus(True, parse_gpus(GPUS, APPS))


def test_a_driver_without_compute_capability_is_asked_again(tools):
    write_nvidia_smi(
        tools,
        'case "$1" in *compute_cap*) exit 2;; --query-gpu=*) echo "0, V100, 32768, 3, 0, GPU-a";; *) exit 2;; esac',
    )
    found = GpuQuery().read()
    assert found.rows is not None
    assert [(one["name"], one["compute_capability"], one["processes"]) for one in found.rows] == [("V100", None, None)]


def test_no_program_is_no_gpu_and_a_failing_one_is_unknown(tools):
    assert GpuQuery().read() == Gpus(False, None)
    write_nvidia_smi(tools, "exit 9")
    assert GpuQuery().read() == Gpus(True, None)
