"""The supervisor as a real process with real children: outcomes, stops, locks, secrets, and what it leaves behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from corpus_builder.errors import ProjectError, format_error_line
from trainer.children import Child, child_from_json, find_members
from trainer.locks import Lock, identify, read_lock, start_ticks
from trainer.run_paths import RunPaths, run_paths, setup_paths

pytestmark = pytest.mark.e2e  # real processes: minutes, not seconds

ROOT = Path(__file__).parents[2]
PYTHON_3_8 = Path(os.path.expanduser("~/.pyenv/versions/3.8.18/bin/python3.8"))
RUN_ID = "20260503-101500-3fa1"
VERSION = "v1"


@dataclass
class Supervised:
    """One supervisor that a test started."""

    popen: "subprocess.Popen[bytes]"
    paths: RunPaths
    lock: Path

    def json(self, path: str) -> Any:
        return json.loads(Path(path).read_text("utf-8"))

    def wait(self, timeout_s: float = 30) -> dict[str, Any]:
        self.popen.wait(timeout_s)
        return dict(self.json(self.paths.outcome))

    def wait_for(self, text: str) -> None:
        """Wait until the log holds `text`."""
        give_up = time.monotonic() + 20
        while text not in self.log:
            assert time.monotonic() < give_up, self.log
            time.sleep(0.05)

    @property
    def log(self) -> str:
        path = Path(self.paths.log)
        return path.read_text("utf-8") if path.exists() else ""

    def rows(self, path: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]


class Supervise:
    """Starts supervisors on small Python programs; ends what is left when the test is over."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self.lock = folder / "locks/run.json"
        self.started: list[Supervised] = []

    def __call__(
        self, *programs: str, kind: str = "train", name: str = RUN_ID, python: str = sys.executable, **more: Any
    ) -> Supervised:
        train = kind == "train"
        secrets, step_keys = more.pop("secrets", None), more.pop("step_keys", {})
        paths = run_paths(str(self.data), VERSION, name) if train else setup_paths(str(self.data), name)
        os.makedirs(paths.folder, mode=0o700)
        steps = [
            {"name": f"step{number}", "argv": [sys.executable, "-c", program], "cwd": str(self.data), "env": {"A": "1"},
             "secrets": list(secrets or {}), **step_keys}
            for number, program in enumerate(programs)
        ]  # fmt: skip
        if secrets:
            Path(paths.secrets).write_text(json.dumps(secrets))
        spec = {
            "kind": kind, "folder": paths.folder, "data": str(self.data), "log": paths.log, "lock": str(self.lock),
            "owner": "alice", "action": "setup-and-train", "name": name, "steps": steps, "grace_s": 60,
            "final": paths.final if train else None, **more,
        }  # fmt: skip
        Path(paths.supervisor_spec).write_text(json.dumps(spec))
        popen = subprocess.Popen(
            [python, "-m", "trainer.supervise", paths.supervisor_spec],
            env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "ZY_LR": "9"},
            stdout=subprocess.DEVNULL,
        )
        self.started.append(Supervised(popen, paths, self.lock))
        return self.started[-1]


@pytest.fixture
def supervise(tmp_path):
    starter = Supervise(tmp_path)
    yield starter
    for started in starter.started:
        started.popen.kill()
        started.popen.wait()
        for attempt in (
            started.json(started.paths.supervisor)["attempts"] if Path(started.paths.supervisor).exists() else []
        ):
            for pid in find_members(child_from_json(attempt["child"])) if attempt["child"] else []:
                os.kill(pid, signal.SIGKILL)


def final_made(paths_final: str) -> str:
    return f"import os; os.makedirs({paths_final!r})"


PROGRESS = "ZY_PROGRESS step={} total=4 loss={} lr=1e-5 epoch=0.5 total_epochs=2 thr=1.5 loss_soul=2.2"


def test_a_setup_whose_steps_end_well_succeeds(supervise):
    run = supervise("print('one')", "print('two')", kind="setup")
    outcome = run.wait()
    assert (outcome["state"], outcome["exit_code"], outcome["signal"]) == ("succeeded", 0, None)
    assert run.log.splitlines() == [
        "ZY_EVENT name=step_started step=step0", "one", "ZY_EVENT name=step_finished step=step0 result=succeeded",
        "ZY_EVENT name=step_started step=step1", "two", "ZY_EVENT name=step_finished step=step1 result=succeeded",
    ]  # fmt: skip
    assert read_lock(str(run.lock)) is None
    assert run.popen.returncode == 0


def test_a_training_succeeds_only_with_a_final_model(supervise, tmp_path):
    final = run_paths(str(tmp_path / "data"), VERSION, RUN_ID).final
    assert supervise(final_made(final)).wait()["state"] == "succeeded"
    without = supervise("pass", name="20260503-101501-3fa1").wait()
    assert (without["state"], without["reason"]) == ("failed", "the training ended without a final model")


def test_a_failing_step_ends_the_rest_and_keeps_its_code(supervise):
    run = supervise("import sys; sys.exit(7)", "print('never')", kind="setup")
    outcome = run.wait()
    assert (outcome["state"], outcome["exit_code"]) == ("failed", 7)
    assert outcome["reason"] == "step step0 ended with exit code 7"
    assert "never" not in run.log
    assert run.popen.returncode == 6


def test_death_by_a_signal_is_kept_as_a_signal(supervise):
    outcome = supervise("import os; os.kill(os.getpid(), 11)").wait()
    assert (outcome["state"], outcome["exit_code"], outcome["signal"]) == ("failed", None, 11)


def test_a_child_tells_why_it_failed(supervise):
    line = format_error_line(ProjectError("zero_samples", path="/data"))
    outcome = supervise(f"import sys; print({line!r}, file=sys.stderr); sys.exit(7)", kind="setup").wait()
    assert outcome["error"] == {"code": "zero_samples", "values": {"path": "/data"}}


def test_a_known_failure_names_its_remedy(supervise):
    outcome = supervise("raise SystemExit('OSError: [Errno 28] No space left on device')").wait()
    assert outcome["remedy"] == "disk_full"


def test_a_child_killed_from_outside_names_its_remedy(supervise):
    outcome = supervise("import os; os.kill(os.getpid(), 9)").wait()
    assert (outcome["signal"], outcome["remedy"]) == (9, "host_oom")


def test_a_program_that_is_not_there_is_a_failure(supervise):
    run = supervise("pass", kind="setup", steps=[{"name": "x", "argv": ["/no/such"], "cwd": "/", "env": {}}])
    assert run.wait()["reason"] == "step x could not start: FileNotFoundError"


def test_progress_and_events_are_recorded(supervise, tmp_path):
    final = run_paths(str(tmp_path / "data"), VERSION, RUN_ID).final
    points = "; ".join(f"print({PROGRESS.format(step, loss)!r})" for step, loss in ((2, "2.5"), (4, "nan")))
    run = supervise(f"{points}; print('ZY_EVENT name=checkpoint_saved step=4'); {final_made(final)}")
    assert run.wait()["last_step"] == 4
    rows = run.rows(run.paths.progress)
    assert [(row["step"], row["loss"], row["extras"]) for row in rows] == [
        (2, 2.5, {"loss_soul": 2.2}), (4, "nan", {"loss_soul": 2.2}),
    ]  # fmt: skip
    events = [(row["name"], row["values"]) for row in run.rows(run.paths.events)]
    assert ("checkpoint_saved", {"step": "4"}) in events
    assert run.json(run.paths.state)["last_step"] == 4


def test_a_line_without_an_end_is_shown_and_read_once(supervise, tmp_path):
    final = run_paths(str(tmp_path / "data"), VERSION, RUN_ID).final
    line = PROGRESS.format(1, 2.0)
    run = supervise(
        f"import sys, time; w = sys.stdout.write; w({line[:40]!r}); sys.stdout.flush(); time.sleep(3);"
        f"w({line[40:]!r}); sys.stdout.flush(); {final_made(final)}"
    )
    run.wait_for(line[:40])
    run.wait()
    assert line + "\n" in run.log
    assert [row["step"] for row in run.rows(run.paths.progress)] == [1]


STOPPABLE = """
import os, sys, time
print('ready', flush=True)
while not os.path.exists({stop!r}): time.sleep(0.05)
print('ZY_EVENT name=stop_requested step=3', flush=True)
"""


@pytest.mark.parametrize("by_signal", [False, True])
def test_a_stop_with_a_checkpoint_interrupts(supervise, tmp_path, by_signal):
    paths = run_paths(str(tmp_path / "data"), VERSION, RUN_ID)
    run = supervise(STOPPABLE.format(stop=paths.stop))
    run.wait_for("ready")
    if by_signal:
        run.popen.send_signal(signal.SIGTERM)
    else:
        Path(paths.stop).write_text("checkpoint\n")
    outcome = run.wait()
    assert (outcome["state"], outcome["exit_code"]) == ("interrupted", 0)
    assert Path(paths.stop).read_text() == "checkpoint\n"


#: Ignores SIGTERM, and so do its children: one in the group, one in a session of its own.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
children = [subprocess.Popen([sys.executable, "-c", code], start_new_session=new) for new in (False, True)]
time.sleep(1)
print("pids", *(child.pid for child in children), flush=True)
time.sleep(600)
"""


def grandchildren(run: Supervised) -> list[int]:
    run.wait_for("pids")
    return [int(pid) for pid in next(line for line in run.log.splitlines() if line.startswith("pids")).split()[1:]]


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("now", "ended at once on request"), ("checkpoint", "no checkpoint within 0.5 s of the request to stop")],
)
def test_a_stop_ends_everything_and_proves_it(supervise, mode, reason):
    run = supervise(STUBBORN, grace_s=0.5)
    pids = grandchildren(run)
    assert all(start_ticks(pid) for pid in pids)
    Path(run.paths.stop).write_text(mode)
    outcome = run.wait()
    assert (outcome["state"], outcome["reason"]) == ("killed", reason)
    assert [start_ticks(pid) for pid in pids] == [None, None]


def test_a_supervisor_that_fails_ends_what_it_started(supervise):
    run = supervise(STUBBORN, step_keys={"log": "\0"})  # no path: the first line to copy raises
    assert run.wait()["reason"] == "the supervisor failed: ValueError"
    assert run.popen.returncode == 1
    (attempt,) = run.json(run.paths.supervisor)["attempts"]
    assert find_members(child_from_json(attempt["child"])) == []
    assert read_lock(str(run.lock)) is None


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB where the data folder lies."""
    folder = tmp_path / "data"
    folder.mkdir()
    if os.getuid() != 0 or shutil.which("mount") is None:
        pytest.skip("no small disk to fill: mounting a tmpfs takes root and `mount`")
    words = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    answer = subprocess.run(words, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        pytest.skip(f"no small disk to fill: {answer.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


FILL = """
import os
descriptor = os.open({big!r}, os.O_WRONLY | os.O_CREAT)
try:
    while os.write(descriptor, b"x" * 4096): pass
except OSError: pass
"""


def test_a_full_disk_leaves_no_process_no_lock_and_nothing_green(small_disk, supervise):
    long = "import os, time; open({pid!r}, 'w').write(str(os.getpid())); print('x' * 9000, flush=True); time.sleep(1)"
    pid_path = small_disk.parent / "pid"
    run = supervise(FILL.format(big=str(small_disk / "big")), long.format(pid=str(pid_path)), kind="setup")
    assert run.popen.wait(30) != 0
    assert start_ticks(int(pid_path.read_text())) is None  # the step ran to its end, and is gone
    assert read_lock(str(run.lock)) is None
    assert not Path(run.paths.outcome).exists()
    assert [path.name for path in Path(run.paths.folder).iterdir() if "partial" in path.name] == []


def test_a_disk_that_was_full_for_a_while_costs_lines_and_no_run(small_disk, supervise):
    final = run_paths(str(small_disk), VERSION, RUN_ID).final
    fill = FILL.format(big=str(small_disk / "big"))
    room = f"import os, time; time.sleep(1.5); os.unlink({str(small_disk / 'big')!r}); time.sleep(0.5)"
    points = "; ".join(f"print({PROGRESS.format(step, 2.5)!r}, flush=True)" for step in range(1, 200))
    run = supervise(fill, f"{points}; {room}; {final_made(final)}")
    outcome = run.wait()
    assert (outcome["state"], outcome["last_step"]) == ("succeeded", 199)
    (said,) = [line for line in run.log.splitlines() if "could not be written" in line]
    assert int(said.split()[1]) == run.json(run.paths.state)["unwritten_lines"] > 0
    assert run.json(run.paths.supervisor)["attempts"][0]["child"] is not None


def test_a_request_to_stop_is_heard_on_a_full_disk(small_disk, supervise, tmp_path):
    pid_path = tmp_path / "pid"
    program = f"import os, time; open({str(pid_path)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    run = supervise(FILL.format(big=str(small_disk / "big")), program, kind="setup")
    give_up = time.monotonic() + 20
    while not pid_path.exists() or not pid_path.read_text():
        assert time.monotonic() < give_up
        time.sleep(0.05)
    run.popen.send_signal(signal.SIGTERM)
    assert run.popen.wait(30) != 0
    assert not Path(run.paths.stop).exists()
    assert start_ticks(int(pid_path.read_text())) is None
    assert read_lock(str(run.lock)) is None


@pytest.mark.parametrize("code", [0, 3])
def test_a_training_that_goes_by_itself_when_told_to_end_was_killed(supervise, tmp_path, code):
    stop = run_paths(str(tmp_path / "data"), VERSION, RUN_ID).stop
    run = supervise(f"open({stop!r}, 'w').write('now'); raise SystemExit({code})")
    outcome = run.wait()
    assert (outcome["state"], outcome["reason"]) == ("killed", "ended at once on request")


def test_a_setup_ends_at_sigterm(supervise):
    run = supervise("import time; print('ready', flush=True); time.sleep(600)", "print('never')", kind="setup")
    run.wait_for("ready")
    run.popen.send_signal(signal.SIGTERM)
    assert run.wait()["state"] == "killed"
    assert "never" not in run.log


def test_the_end_of_a_terminal_changes_nothing(supervise):
    run = supervise("import time; print('ready', flush=True); time.sleep(1)", kind="setup")
    run.wait_for("ready")
    run.popen.send_signal(signal.SIGHUP)
    assert run.wait()["state"] == "succeeded"


def test_leftovers_of_a_step_are_ended(supervise):
    run = supervise(
        "import subprocess, sys; print('pids', subprocess.Popen(['sleep', '600']).pid, flush=True)", kind="setup"
    )
    (pid,) = grandchildren(run)
    assert run.wait()["state"] == "succeeded"
    assert start_ticks(pid) is None


def test_a_held_lock_refuses_and_touches_nothing(supervise):
    first = supervise("import time; print('ready', flush=True); time.sleep(600)")
    first.wait_for("ready")
    before = {path: path.read_bytes() for path in Path(first.paths.folder).iterdir() if path.name != "state.json"}
    second = supervise("print('never')", name="20260503-101501-3fa1", secrets={"TOKEN": "abcdefgh"})
    assert second.popen.wait(10) == 8
    error = second.json(second.paths.error)
    assert (error["code"], error["values"]["name"]) == ("lock_held", RUN_ID)
    assert not Path(second.paths.outcome).exists()
    assert not Path(second.paths.secrets).exists()
    assert {path: path.read_bytes() for path in before} == before
    assert read_lock(str(first.lock)).name == RUN_ID


def test_a_lock_of_a_dead_process_is_taken_over(supervise):
    supervise.lock.parent.mkdir(parents=True)
    gone = subprocess.Popen(["true"])
    process = identify(os.getpid())
    gone.wait()
    lock = Lock("bob", "setup-only", "old", process)
    packed = {"owner": lock.owner, "action": lock.action, "name": lock.name}
    supervise.lock.write_text(
        json.dumps({**packed, "process": {"pid": gone.pid, "start_ticks": 1, "boot_id": process.boot_id}})
    )
    assert supervise("pass", kind="setup").wait()["state"] == "succeeded"


def test_secrets_reach_the_child_and_nothing_else(supervise):
    secret = "s3cr3t-'$(touch x)-value"
    program = (
        "import os; print('got', os.environ['TOKEN'] == " + repr(secret) + ", 'ZY_LR' in os.environ);"
        "print('leak', os.environ['TOKEN']); print(open('/proc/self/cmdline').read().count('s3cr3t-v'))"
    )
    run = supervise(program, kind="setup", secrets={"TOKEN": secret})
    run.wait()
    assert "[setup] environment TOKEN=<redacted>" in run.log
    assert "got True False" in run.log
    assert "leak <redacted>" in run.log
    texts = [path.read_text("utf-8") for path in Path(run.paths.folder).iterdir() if path.name != "spec.json"]
    assert not any(secret in text for text in [*texts, run.log])
    assert not Path(run.paths.secrets).exists()


@pytest.mark.parametrize(("names", "seen"), [({"secrets": ["OTHER"]}, "['OTHER']"), ({"secrets": []}, "[]")])
def test_a_step_sees_only_the_secrets_that_it_names(supervise, names, seen):
    program = "import os; print('sees', sorted({'TOKEN', 'OTHER'} & set(os.environ)))"
    run = supervise(program, kind="setup", secrets={"TOKEN": "abcdefgh", "OTHER": "ijklmnop"}, step_keys=names)
    run.wait()
    assert f"sees {seen}" in run.log


def test_a_spec_of_before_names_no_secrets(supervise):
    step = {"name": "x", "argv": ["env"], "cwd": "/", "env": {}}
    run = supervise(kind="setup", secrets={"TOKEN": "abcdefgh"}, steps=[step])
    assert run.wait()["state"] == "succeeded"
    assert "\nTOKEN=" not in run.log


def test_a_killed_supervisor_leaves_no_outcome_and_no_child(supervise):
    run = supervise("import time; print('ready', flush=True); time.sleep(600)")
    run.wait_for("ready")
    child = child_from_json(run.json(run.paths.supervisor)["attempts"][-1]["child"])
    run.popen.kill()
    run.popen.wait()
    give_up = time.monotonic() + 10
    while find_members(child):
        assert time.monotonic() < give_up
        time.sleep(0.05)
    assert not Path(run.paths.outcome).exists()


def test_a_second_attempt_is_listed_beside_the_first(supervise, tmp_path):
    first = supervise("import time; print('ready', flush=True); time.sleep(600)")
    first.wait_for("ready")
    first.popen.kill()
    first.popen.wait()
    subprocess.run(
        [sys.executable, "-m", "trainer.supervise", first.paths.supervisor_spec],
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}, stdout=subprocess.DEVNULL, timeout=30, check=False,
        preexec_fn=lambda: Path(first.paths.stop).write_text("now"),
    )  # fmt: skip
    attempts = first.json(first.paths.supervisor)["attempts"]
    assert [attempt["attempt"] for attempt in attempts] == [1, 2]
    assert attempts[1]["log_start"] > 0


def test_a_reused_pid_is_nobody_of_ours():
    me = identify(os.getpid())
    older = Child(type(me)(os.getppid(), 1, me.boot_id), os.getppid(), "/no/such/mark")
    assert find_members(older) == []


@pytest.mark.skipif(not PYTHON_3_8.exists(), reason="no Python 3.8 interpreter here: not run with it")
def test_it_runs_on_python_3_8(supervise):
    run = supervise(STUBBORN, python=str(PYTHON_3_8), secrets={"TOKEN": "abcdefgh"})
    pids = grandchildren(run)
    Path(run.paths.stop).write_text("now")
    assert run.wait()["state"] == "killed"
    assert [start_ticks(pid) for pid in pids] == [None, None]
