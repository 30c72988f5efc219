"""The end of a run where things stand badly: a full disk, no tmux, GPU memory that stays, a wish for the end.

The real agent, supervisor and tmux; a small program in the trainer's place; a real tmpfs of 256 KiB; an nvidia-smi
with the answers of a machine with two V100, which refuses what it was not told.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from controller.boxside import ending
from controller.boxside.arguments import Arguments
from corpus_builder.errors import ProjectError
from trainer.children import child_from_json, find_members
from trainer.locks import start_ticks

pytestmark = pytest.mark.e2e

#: Takes GPUs 0 and 1 by its own word, tells steps, and ends where the stop file says so; `fills`: fills its disk first.
TRAINER = """
import json, os, sys, time
recipe = json.load(open(sys.argv[-1]))
folder, wish = os.path.dirname(sys.argv[-1]), recipe["recipe"]
print("ZY_EVENT name=gpus_chosen chosen=0,1", flush=True)
for name in wish.get("gives_away", []):
    os.unlink(os.path.join(folder, name))
if wish.get("fills"):
    big = os.open(os.path.join(recipe["data"], "big"), os.O_WRONLY | os.O_CREAT)
    try:
        while os.write(big, b"x" * 4096): pass
    except OSError:
        pass
open(wish["told"], "w").write("full")
for step in range(1, 10 ** 6):
    print("ZY_PROGRESS step=%d total=9 loss=2.5 lr=1e-5 epoch=1 total_epochs=2 thr=1" % step, flush=True)
    if os.path.exists(folder + "/stop"):
        print("ZY_EVENT name=stop_requested step=%d" % step)
        sys.exit(0)
    time.sleep(0.05)
"""

GPU_QUERY = "--query-gpu=index,name,memory.total,memory.used,utilization.gpu,compute_cap,uuid"
APP_QUERY = "--query-compute-apps=gpu_uuid,pid,used_memory"
NVIDIA_SMI = """#!/bin/sh
case "$*" in
"{gpus} --format=csv,noheader,nounits") cat {folder}/gpus ;;
"{apps} --format=csv,noheader,nounits") cat {folder}/apps ;;
*) echo "$*" >> {folder}/refused; exit 9 ;;
esac
"""


@pytest.fixture
def small_data(box):
    """The box's data folder as a disk of 256 KiB."""
    if os.getuid() != 0 or shutil.which("mount") is None:
        pytest.skip("no small disk to fill: mounting a tmpfs takes root and `mount`")
    folder = Path(box.data.data)
    folder.mkdir(mode=0o700)
    words = ["mount", "-t", "tmpfs", "-o", "size=256k,mode=0700", "tmpfs", str(folder)]
    answer = subprocess.run(words, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        pytest.skip(f"no small disk to fill: {answer.stderr.strip()}")
    yield folder
    box.end()  # nobody may be at work on it
    subprocess.run(["umount", "-l", str(folder)], check=True)


class Smi:
    """nvidia-smi as it answered on a machine with two V100, first in PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        program = folder / "nvidia-smi"
        program.write_text(NVIDIA_SMI.format(folder=folder, gpus=GPU_QUERY, apps=APP_QUERY))
        program.chmod(0o755)
        self.answer([3, 3], {})

    def answer(self, used_mib: list[int], pids: dict[int, int]) -> None:
        """Let GPUs hold `used_mib`, and processes be on them, by the number of the GPU."""
        rows = [f"{n}, Tesla V100-SXM2-32GB, 32768, {mib}, 0, 7.0, GPU-{n}a" for n, mib in enumerate(used_mib)]
        (self.folder / "gpus").write_text("\n".join(rows) + "\n")
        apps = [f"GPU-{n}a, {pid}, {used_mib[n]}" for n, pid in pids.items()]
        (self.folder / "apps").write_text("".join(f"{row}\n" for row in apps))

    @property
    def refused(self) -> bool:
        return (self.folder / "refused").exists()


@pytest.fixture
def smi(tmp_path, monkeypatch):
    made = Smi(tmp_path / "smi")
    monkeypatch.setenv("PATH", f"{made.folder}:{os.environ['PATH']}")
    return made


def request_of(box, recipe, **more):
    """Return the request for a run of our program, which tells a file once it is at work."""
    program = box.folder / "own/bin/python"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!{sys.executable}\n{TRAINER}")
    program.chmod(0o755)
    box.write_manifest()
    return box.train_request(
        box.push(), recipe={"told": str(box.folder / "told"), **recipe}, python=str(program), **more
    )


def start(box, *, on_end=None, **recipe):
    """Start a run and return its id once it is at work, on a full disk where it was asked to fill it."""
    run_id = box.ask("start_train", **request_of(box, recipe, on_end=on_end))["run_id"]
    wait_until((box.folder / "told").exists, "the run began")
    return run_id


def wait_until(is_so, what, timeout_s=20.0):
    give_up = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < give_up, what
        time.sleep(0.05)


def processes_of(box, run_id):
    """Return supervisor and child of a run, and who else carries its mark."""
    attempt = box.attempts("train", run_id)[-1]
    return [attempt["process"]["pid"], *find_members(child_from_json(attempt["child"]))]


def outcome_of(box, run_id):
    return json.loads((Path(box.data.runs) / run_id / "outcome.json").read_text())


def ended(run_id, state, **more):
    return {"ended": [{"kind": "train", "id": run_id, "state": state}], "alive": 0, **more}


# --- a full disk


@pytest.mark.parametrize("gives_away", [[], ["stop.reserve"]])
def test_kill_now_works_on_a_full_disk(box, small_data, gives_away):
    """By the file that has its room, and by a signal where even that is gone."""
    run_id = start(box, fills=True, gives_away=gives_away)
    pids = processes_of(box, run_id)
    with pytest.raises(OSError, match="No space left"):
        (small_data / "more").write_text("x" * 9000)
    (small_data / "more").unlink()
    began = time.monotonic()
    answer = box.ask("kill", mode="now", owner="bob")
    assert time.monotonic() - began < ending.END_PATIENCE_S  # the supervisor heard it: nobody used force
    assert answer == ended(run_id, "killed", audited=answer["audited"])
    assert [start_ticks(pid) for pid in pids] == [None] * len(pids)
    assert (outcome_of(box, run_id)["state"], outcome_of(box, run_id)["reason"]) == (
        "killed",
        "ended at once on request",
    )
    status = box.ask("status")
    assert (status["run"]["state"], status["locks"]["run"]) == ("killed", None)


def test_kill_with_a_checkpoint_works_on_a_full_disk(box, small_data):
    audit = Path(box.data.audit)
    audit.write_bytes(b" " * 4095 + b"\n")  # a whole block: the disk may be full before the start has its line
    run_id = start(box, fills=True)
    if left := -audit.stat().st_size % 4096:
        with open(audit, "ab") as file:  # to the end of its block: the next line finds no room
            file.write(b" " * (left - 1) + b"\n")
    answer = box.ask("kill", mode="checkpoint", owner="bob")
    assert (answer["alive"], answer["ended"][0]["id"], answer["audited"]) == (0, run_id, False)
    wait_until(lambda: box.ask("status")["run"]["state"] == "interrupted", "the ranks read the request")
    assert box.ask("gone", ids=[run_id]) == {"alive": 0, "gpus": [], "has_gpus": False}


def test_a_checkpoint_is_asked_for_by_a_signal_where_no_file_can_say_it(box, small_data):
    run_id = start(box, fills=True, gives_away=["stop.reserve"])
    box.ask("kill", mode="checkpoint", owner="bob")
    stop = Path(box.data.runs) / run_id / "stop"
    assert not stop.exists()
    assert box.ask("status")["run"]["state"] in ("starting", "running")  # TERM is a request, and nothing is written
    os.truncate(small_data / "big", 0)
    wait_until(lambda: box.ask("status")["run"]["state"] == "interrupted", "it was written when there was room")
    assert stop.read_text() == "checkpoint\n"


def test_a_supervisor_that_does_not_answer_is_ended_on_a_full_disk(box, small_data, monkeypatch):
    run_id = start(box, fills=True)
    box.end_tmux()  # it would wake what is stopped
    os.kill(box.supervisor_pid("train", run_id), signal.SIGSTOP)
    monkeypatch.setattr(ending, "END_PATIENCE_S", 0.5)
    answer = ending.kill(Arguments({**box.places, "mode": "now", "owner": "bob"}))
    assert answer == ended(run_id, "killed", audited=answer["audited"])
    assert outcome_of(box, run_id)["signal"] == 9


def test_a_line_that_a_full_disk_tore_is_left_behind(box):
    Path(box.data.data).mkdir(mode=0o700)
    Path(box.data.audit).write_text('{"at": "2026-05-03T10:15:00Z", "who": "al')
    assert box.ask("kill", mode="now", owner="bob")["audited"]
    torn, whole = Path(box.data.audit).read_text().splitlines()
    assert torn.endswith('"al')
    assert json.loads(whole)["who"] == "bob"


# --- the memory of GPUs


def test_gpu_memory_is_looked_for_after_the_end(box, smi, monkeypatch):
    run_id = start(box)
    pids = processes_of(box, run_id)
    smi.answer([20_000, 20_000], {0: pids[-1], 1: os.getpid()})
    monkeypatch.setattr(ending, "GPU_PATIENCE_S", 0)

    def gone():
        return ending.gone(Arguments({**box.places, "ids": [run_id]}))

    # while it is alive: the process of ours that holds memory is named, somebody else's is nobody's business
    assert gone() == {
        "alive": len(pids), "gpus": [{"index": 0, "used_mib": 20_000, "pids": [pids[-1]]}], "has_gpus": True,
    }  # fmt: skip
    assert box.ask("kill", mode="now", owner="bob") == ended(run_id, "killed", audited=True)
    # its end has freed GPU 1 alone; of GPU 0, the driver names a process that is not there
    smi.answer([20_000, 3], {0: pids[-1]})
    assert gone() == {"alive": 0, "gpus": [{"index": 0, "used_mib": 20_000, "pids": []}], "has_gpus": True}
    smi.answer([3, 800], {})
    assert gone() == {"alive": 0, "gpus": [], "has_gpus": True}
    (smi.folder / "apps").unlink()
    assert gone() == {"alive": 0, "gpus": None, "has_gpus": True}
    assert not smi.refused


def test_memory_that_the_driver_gives_back_late_is_waited_for(box, smi):
    run_id = start(box)
    box.ask("kill", mode="now", owner="bob")
    smi.answer([20_000, 3], {})
    late = subprocess.Popen(
        ["sh", "-c", f"sleep 1.5; sed 's/20000/3/' {smi.folder}/gpus > {smi.folder}/new; "
                     f"mv {smi.folder}/new {smi.folder}/gpus"]
    )  # fmt: skip
    assert box.ask("gone", ids=[run_id])["gpus"] == []
    assert late.wait(10) == 0


def test_on_a_gpu_that_the_run_had_not_only_what_is_ours_counts(box, smi, monkeypatch):
    run_id = start(box)
    box.ask("kill", mode="now", owner="bob")
    monkeypatch.setattr(ending, "GPU_PATIENCE_S", 0)
    smi.answer([3, 3, 30_000], {})
    assert ending.gone(Arguments({**box.places, "ids": [run_id]}))["gpus"] == []


# --- tmux


def test_the_run_goes_on_when_the_tmux_server_is_killed(box):
    run_id = start(box)
    box.end_tmux()
    at = box.ask("status")["run"]["last_step"]
    wait_until(lambda: box.ask("status")["run"]["last_step"] > at + 3, "it tells steps")
    assert box.ask("status")["run"]["state"] == "running"
    box.ask("kill", mode="checkpoint", owner="bob")
    assert box.follow("train", run_id)[0]["state"] == "interrupted"


# --- ZY_ON_END


def on_end_rows(box, run_id):
    path = Path(box.data.runs) / run_id / "events.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row["values"] for row in rows if row["name"] == "on_end"]


@pytest.fixture
def at_once(monkeypatch):
    """Nobody reads along here: what is wished for the end need not wait."""
    from controller.boxside import train_plan

    real = train_plan.train_spec
    monkeypatch.setattr(train_plan, "train_spec", lambda *args, **more: {**real(*args, **more), "on_end_after_s": 0})


def test_the_wish_lies_in_the_secret_file_alone_and_is_done_after_a_kill(box, tmp_path, at_once):
    out = tmp_path / "off"
    wish = shlex.join(["touch", str(out), str(tmp_path / "t0ken-canary")])

    def in_process(op, **args):
        from controller.boxside.__main__ import OPS

        return OPS[op](Arguments({**box.places, **args}))

    program = Path(box.trainer())
    program.write_text(f"#!{sys.executable}\n{TRAINER}")
    box.write_manifest()
    request = request_of(box, {}, on_end=wish, secrets={"WANDB_API_KEY": "0123456789"})
    run_id = in_process("start_train", **request)["run_id"]
    box.follow("train", run_id, until="ZY_PROGRESS")
    assert box.ask("status")["secrets"] == ["WANDB_API_KEY", "ZY_ON_END"]
    folder = Path(box.data.runs) / run_id
    assert json.loads((folder / "spec.json").read_text())["steps"][0]["secrets"] == ["WANDB_API_KEY"]
    holders = [path.name for path in folder.iterdir() if "t0ken-canary" in path.read_text(errors="replace")]
    assert holders == ["secrets.env"]
    assert "t0ken-canary" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    child = box.attempts("train", run_id)[-1]["child"]["pid"]
    assert b"ZY_ON_END" not in Path(f"/proc/{child}/environ").read_bytes()
    assert box.ask("kill", mode="now", owner="bob") == ended(run_id, "killed", audited=True)
    wait_until(out.exists, "the command ran")
    wait_until(lambda: len(on_end_rows(box, run_id)) == 2, "it was told")
    assert on_end_rows(box, run_id)[-1] == {"what": "command", "result": "ended", "code": "0"}
    assert box.ask("status")["secrets"] == []


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_wish_is_done_even_where_the_supervisor_had_to_be_ended(box, tmp_path, monkeypatch):
    out = tmp_path / "off"
    run_id = start(box, on_end=f"touch {out}")
    spec = Path(box.data.runs) / run_id / "spec.json"
    spec.write_text(json.dumps({**json.loads(spec.read_text()), "on_end_after_s": 0}))
    box.end_tmux()  # it would wake what is stopped
    os.kill(box.supervisor_pid("train", run_id), signal.SIGSTOP)
    answer = subprocess.run(
        [sys.executable, "-c", "import json, sys; from controller.boxside import ending; ending.END_PATIENCE_S = 0.5;"
         "from controller.boxside.arguments import Arguments;"
         "print(json.dumps(ending.kill(Arguments(json.loads(sys.argv[1])))))",
         json.dumps({**box.places, "mode": "now", "owner": "bob"})],
        capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    assert json.loads(answer.stdout) == ended(run_id, "killed", audited=True)
    wait_until(out.exists, "the command ran")
    wait_until(lambda: len(on_end_rows(box, run_id)) == 2, "it was told")


def test_a_wish_that_is_no_command_starts_nothing(box):
    program = box.trainer()
    box.write_manifest()
    with pytest.raises(ProjectError, match="input_invalid"):
        box.ask("start_train", **box.train_request(box.push(), python=program, on_end="'unfinished"))
    assert not Path(box.data.runs).exists()
