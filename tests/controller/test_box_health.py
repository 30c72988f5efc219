"""What a box says of its health, by a captured nvidia-smi, and what of it is a warning, in both languages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from controller.box_health import clock_offset_s, find_notices
from controller.boxside import facts, health
from controller.boxside.arguments import Arguments
from controller.boxside.health import HealthQuery, is_foreign, parse_health, read_driver, read_health
from controller.summary_box import box
from controller.words import Words
from corpus_builder.say import LANGUAGES, SEE_PUBLIC
from trainer import gpus
from trainer.children import MARK

#: Answers what it was captured with, and refuses every other question.
NVIDIA_SMI = """#!/bin/sh
[ "$2" = --format=csv,noheader,nounits ] || {{ echo "bad format: $2" >&2; exit 9; }}
case "$1" in
--query-gpu=index,name,memory.total,memory.used,utilization.gpu,compute_cap,uuid) cat {folder}/gpus;;
--query-gpu=index,driver_version,ecc.errors.uncorrected.volatile.total,remapped_rows.failure) {newer};;
--query-gpu=index,driver_version,ecc.errors.uncorrected.volatile.total) cat {folder}/older;;
--query-gpu=index,driver_version) cat {folder}/driver;;
--query-compute-apps=gpu_uuid,pid,used_memory) cat {folder}/apps;;
*) echo "Field \\"$1\\" is not a valid field to query." >&2; exit 2;;
esac
"""
GPUS = """0, NVIDIA A100-SXM4-80GB, 81920, 4, 0, 8.0, GPU-aaaa
1, NVIDIA A100-SXM4-80GB, 81920, 30511, 98, 8.0, GPU-bbbb
"""
HEALTH = """0, 535.104.05, 0, No
1, 535.104.05, 3, Yes
"""
OLDER = """0, 418.87.01, [N/A]
1, 418.87.01, [Not Supported]
"""


@pytest.fixture
def tools(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "tools"
    folder.mkdir()
    for name, text in (("gpus", GPUS), ("health", HEALTH), ("older", OLDER), ("driver", "0, 535.104.05\n")):
        (folder / name).write_text(text)
    (folder / "apps").write_text("")
    write(folder, "nvidia-smi", NVIDIA_SMI.format(folder=folder, newer=f"cat {folder}/health"))
    write(folder, "dmesg", "#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def ask(tmp_path) -> dict:
    return facts.facts(Arguments({"data": str(tmp_path / "data"), "root": str(tmp_path / "root")}))


def read_all() -> dict:
    return read_health(HealthQuery(), None, is_at_work=False)


def test_gpus_say_their_driver_and_their_trouble(tools, tmp_path):
    found = ask(tmp_path)
    assert found["health"]["driver"] == "535.104.05"
    keys = ("index", "ecc_uncorrected", "rows_failed", "foreign")
    assert [tuple(row[key] for key in keys) for row in found["gpus"]] == [(0, 0, False, 0), (1, 3, True, 0)]
    assert found["health"]["xids"] is None  # the kernel's log is not ours to read
    assert not found["gpus_silent"]
    assert read_driver() == "535.104.05"


def test_an_old_driver_is_asked_for_less(tools, tmp_path):
    write(tools, "nvidia-smi", NVIDIA_SMI.format(folder=tools, newer="exit 2"))
    found = ask(tmp_path)
    assert found["health"]["driver"] == "418.87.01"
    assert [(row["ecc_uncorrected"], row["rows_failed"]) for row in found["gpus"]] == [(None, None)] * 2


def test_a_driver_that_does_not_answer_is_no_box_without_gpus(tools, tmp_path):
    write(tools, "nvidia-smi", "#!/bin/sh\nexit 9\n")
    found = ask(tmp_path)
    assert (found["gpus"], found["gpus_silent"], found["health"]["driver"]) == (None, True, None)
    (tools / "nvidia-smi").unlink()
    found = ask(tmp_path)
    assert (found["gpus"], found["gpus_silent"]) == (None, False)


def test_a_driver_that_hangs_costs_its_patience_once(tools, monkeypatch):
    write(tools, "nvidia-smi", "#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setattr(health, "_TIMEOUT_S", 0.2)
    asked = []
    start = gpus.start_query
    for module in (gpus, health):  # nvidia-smi is asked by the one, the kernel by the other
        monkeypatch.setattr(module, "start_query", lambda argv: asked.append(argv) or start(argv))
    assert read_all()["driver"] is None
    assert [argv[0] for argv in asked] == ["nvidia-smi", "dmesg"]  # it is not asked again for less


def test_trouble_that_the_driver_noted(tools):
    lines = (
        "[1] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
        "[2] NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, MMU Fault\n[3] Xid 48 in somebody's words\n"
        "[4] NVRM: Xid (PCI:0000:af:00): 48, pid=4711, DBE\n[5] NVRM: Xid (PCI:0000:af:00): 79, again\n"
    )
    write(tools, "dmesg", f"#!/bin/sh\ncat <<'EOT'\n{lines}EOT\n")
    assert read_all()["xids"] == [48, 79]  # 31 is a program's fault
    write(tools, "dmesg", "#!/bin/sh\necho nothing\n")
    assert read_all()["xids"] == []


def test_a_process_that_is_no_run_of_ours_is_foreign(tools, tmp_path):
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    with (
        subprocess.Popen(sleep, env={**os.environ, MARK: "/data/runs/r1"}) as ours,
        subprocess.Popen(sleep) as other,
    ):
        try:
            (tools / "apps").write_text(
                f"GPU-aaaa, {ours.pid}, 20000\nGPU-bbbb, {other.pid}, 100\nGPU-bbbb, 4194999, 9\n"
            )
            assert [row["foreign"] for row in ask(tmp_path)["gpus"]] == [0, 2]
            assert not is_foreign(ours.pid, is_at_work=False)
            assert is_foreign(other.pid, is_at_work=True)
            assert not is_foreign(4194999, is_at_work=True)  # may be ours, seen from another container
        finally:
            ours.kill()
            other.kill()


def test_nothing_that_can_be_asked_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(health.os, "statvfs", lambda path: (_ for _ in ()).throw(FileNotFoundError(path)))
    monkeypatch.setattr(health.resource, "getrlimit", lambda kind: (_ for _ in ()).throw(OSError()))
    assert health.read_os(str(tmp_path / "none")) is None
    assert health.read_ram(str(tmp_path / "none")) is None
    found = read_all()
    assert (found["driver"], found["xids"], found["shm"]) == (None, None, None)
    assert found["limits"] == {"nofile": None, "memlock": None, "nproc": None}
    assert find_notices({"health": found, "gpus": None}, ranks=8, clock_offset_s=None) == ()


def test_this_machine_answers(tmp_path):
    found = ask(tmp_path)["health"]
    assert found["ram"]["total_gib"] >= found["ram"]["available_gib"] > 0
    assert found["shm"]["total_gib"] > 0
    assert found["os"]
    soft = subprocess.run(["sh", "-c", "ulimit -n"], capture_output=True, text=True).stdout.strip()
    assert found["limits"]["nofile"] == (-1 if soft == "unlimited" else int(soft))


def test_lines_that_are_no_rows_are_left_out():
    assert parse_health("NVIDIA-SMI has failed, because\nNo devices were found\n", health.FIELDS) == []


def test_an_adapter_is_told_from_a_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert facts.read_base_model(str(tmp_path))["adapter"]
    (tmp_path / "config.json").write_text("{}")
    assert not facts.read_base_model(str(tmp_path))["adapter"]


@pytest.mark.parametrize(
    ("told", "offset"), [(1777803300.0, 0.0), (1777803000.0, -300.0), (1777810500.5, 7200.5), (None, None)]
)
def test_clocks_are_compared_in_the_middle_of_the_question(told, offset):
    found = clock_offset_s({"health": {"time": told}}, "20260503-101459", "20260503-101501")
    assert found == (None if offset is None else pytest.approx(offset))
    assert clock_offset_s({}, "20260503-101459", "20260503-101501") is None


WELL = {
    "gpus": [{"index": 0, "name": "V100", "ecc_uncorrected": 0, "rows_failed": False, "foreign": 0}],
    "health": {
        "os": "Ubuntu 22.04", "driver": "535", "xids": [], "shm": {"free_gib": 1.0, "total_gib": 1.0},
        "ram": {"total_gib": 500.0, "available_gib": 400.5}, "limits": {"nofile": 1024, "memlock": 65536, "nproc": -1},
    },
    "gpus_silent": False, "python": "3.10.12", "tmux": None,
}  # fmt: skip


def ill(**changes):
    gpu = {key: changes.pop(key) for key in ("ecc_uncorrected", "rows_failed", "foreign") if key in changes}
    silent = changes.pop("gpus_silent", False)
    return {
        **WELL, "gpus": [{**WELL["gpus"][0], **gpu}], "gpus_silent": silent, "health": {**WELL["health"], **changes},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("found", "ranks", "offset", "keys"),
    [
        (WELL, 4, 299.0, []),
        ({}, 4, None, []),
        (WELL, 4, 301.0, ["clock_off"]),
        (WELL, 4, -3600.0, ["clock_off"]),
        (ill(shm={"free_gib": 0.06, "total_gib": 0.06}), 2, None, ["shm_small"]),
        (ill(shm={"free_gib": 0.06, "total_gib": 0.06}), 1, None, []),
        (ill(shm={"free_gib": 0.1, "total_gib": 8.0}), 4, None, []),
        (ill(limits={"nofile": 1023, "nproc": 100}), 1, None, ["few_files", "few_processes"]),
        (ill(limits={"nofile": -1, "nproc": None}), 1, None, []),
        (ill(ecc_uncorrected=2), 1, None, ["ecc_errors"]),
        (ill(rows_failed=True), 1, None, ["rows_failed"]),
        (ill(foreign=1), 1, None, ["foreign"]),
        (ill(ecc_uncorrected=None, rows_failed=None, foreign=None), 1, None, []),
        (ill(xids=[79], gpus_silent=True), 1, None, ["gpus_silent", "xid"]),
    ],
)
def test_what_is_a_warning(found, ranks, offset, keys):
    assert [notice.key for notice in find_notices(found, ranks=ranks, clock_offset_s=offset)] == keys


@pytest.mark.parametrize("lang", LANGUAGES)
def test_warnings_and_facts_are_said_in_the_readers_language(lang):
    everything = ill(
        xids=[48, 79], gpus_silent=True, ecc_uncorrected=7, rows_failed=True, foreign=2,
        shm={"free_gib": 0.06, "total_gib": 0.0625}, limits={"nofile": 256, "memlock": -1, "nproc": 64},
    )  # fmt: skip
    notices = find_notices(everything, ranks=4, clock_offset_s=-7200)
    assert len(notices) == 9
    text = "\n\n".join(box(everything, notices, Words(lang, SEE_PUBLIC)))
    assert text.count("⚠️") == 9
    for value in ("48, 79", "256", "-120", "7", "0.0625", "Ubuntu 22.04", "1 × V100", "535", "400.5 / 500 GiB"):
        assert value in text
    assert ("Machine" in text) == (lang == "en")
    assert ("Limits" in text) == (lang == "en")


def test_a_box_that_says_nothing_has_no_paragraph():
    assert box({}, (), Words("en", SEE_PUBLIC)) == []
