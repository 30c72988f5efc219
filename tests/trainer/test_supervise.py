"""The supervisor as a real process with real children: outcomes, stops, locks, secrets, and what it leaves behind."""

import json
import os
import shlex
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
from trainer import on_end
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
        path = more.pop("path", os.environ["PATH"])
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
            env={"PYTHONPATH": str(ROOT), "PATH": path, "ZY_LR": "9"},
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
        for pid in left_behind(started):
            os.kill(pid, signal.SIGKILL)
        for attempt in (
            started.json(started.paths.supervisor)["attempts"] if Path(started.paths.supervisor).exists() else []
        ):
            for pid in find_members(child_from_json(attempt["child"])) if attempt["child"] else []:
                os.kill(pid, signal.SIGKILL)


def left_behind(run: Supervised) -> list[int]:
    """Return who still has the supervisor's command line: the process that waits to do `ZY_ON_END`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if run.paths.supervisor_spec.encode() in words.split(b"\0") and int(entry.name) != run.popen.pid:
            found.append(int(entry.name))
    return found


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


#: Fills the disk and goes on as a program of its own, which writes where its pid is looked for.
SELF = "import os; open({pid!r}, 'w').write(str(os.getpid()));"


@pytest.mark.parametrize(
    ("last", "found"),
    [
        ("", ("succeeded", 0, None)),
        ("raise SystemExit('OSError: [Errno 28] No space left on device')", ("failed", 1, "disk_full")),
        ("os.kill(os.getpid(), 9)", ("failed", None, "host_oom")),
    ],
)
def test_a_disk_that_is_full_to_the_end_hides_no_end(small_disk, supervise, last, found):
    pid_path = small_disk.parent / "pid"
    program = SELF.format(pid=str(pid_path)) + f"print('x' * 9000, flush=True); {last}"
    run = supervise(FILL.format(big=str(small_disk / "big")), program, kind="setup")
    outcome = run.wait()
    assert os.statvfs(small_disk).f_bavail <= 4  # what the reserves gave back
    assert "x" * 9000 not in run.log  # the lines by which the remedy was found are nowhere but there
    assert (outcome["state"], outcome["exit_code"], outcome["remedy"]) == found
    assert start_ticks(int(pid_path.read_text())) is None
    assert read_lock(str(run.lock)) is None
    assert [path.name for path in Path(run.paths.folder).iterdir() if path.suffix in (".partial", ".reserve")] == []


def test_an_outcome_that_a_full_disk_cannot_take_is_told_without_its_error(small_disk, supervise):
    line = format_error_line(ProjectError("zero_samples", path="/data/" + "x" * 20_000))
    run = supervise(FILL.format(big=str(small_disk / "big")), f"print({line!r}); raise SystemExit(7)", kind="setup")
    outcome = run.wait()
    assert (outcome["state"], outcome["exit_code"], outcome["error"]) == ("failed", 7, None)


def test_without_a_reserve_a_full_disk_takes_the_outcome_and_nothing_else(small_disk, supervise):
    """What the reserve is for: the same end with the room given away."""
    folder = run_paths(str(small_disk), VERSION, RUN_ID).folder
    give_away = f"import os, glob; [os.unlink(path) for path in glob.glob({folder + '/*.reserve'!r})]"
    run = supervise(give_away, FILL.format(big=str(small_disk / "big")))
    assert run.popen.wait(30) != 0
    assert not Path(run.paths.outcome).exists()
    assert read_lock(str(run.lock)) is None


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


def wait_for_file(path: Path) -> None:
    give_up = time.monotonic() + 20
    while not path.exists() or not path.read_text():
        assert time.monotonic() < give_up, path
        time.sleep(0.05)


def test_a_request_to_stop_is_heard_on_a_full_disk(small_disk, supervise, tmp_path):
    pid_path = tmp_path / "pid"
    program = SELF.format(pid=str(pid_path)) + "import time; time.sleep(600)"
    run = supervise(FILL.format(big=str(small_disk / "big")), program, kind="setup")
    wait_for_file(pid_path)
    run.popen.send_signal(signal.SIGTERM)
    assert run.wait()["state"] == "killed"
    assert start_ticks(int(pid_path.read_text())) is None
    assert read_lock(str(run.lock)) is None


#: A training that fills the disk itself, tells a file elsewhere, and ends where it reads the stop file.
FULL_AND_STOPPABLE = """
import glob, os, sys, time
for path in glob.glob({give_away!r}): os.unlink(path)
{fill}
open({told!r}, "w").write(str(os.getpid()))
while not os.path.exists({stop!r}): time.sleep(0.05)
print("ZY_EVENT name=stop_requested step=3", flush=True)
"""


def full_training(small_disk, supervise, tmp_path, give_away="", **more):
    paths, told = run_paths(str(small_disk), VERSION, RUN_ID), tmp_path / "told"
    fill = FILL.format(big=str(small_disk / "big"))
    words = {"give_away": give_away and paths.folder + give_away, "fill": fill, "told": str(told), "stop": paths.stop}
    run = supervise(FULL_AND_STOPPABLE.format(**words), **more)
    wait_for_file(told)
    return run


def test_on_a_full_disk_every_rank_reads_the_request_to_stop(small_disk, supervise, tmp_path):
    run = full_training(small_disk, supervise, tmp_path)
    run.popen.send_signal(signal.SIGTERM)
    assert run.wait()["state"] == "interrupted"


def test_a_request_that_no_file_took_is_written_when_there_is_room_again(small_disk, supervise, tmp_path):
    run = full_training(small_disk, supervise, tmp_path, "/stop.reserve")
    run.popen.send_signal(signal.SIGTERM)
    time.sleep(1)  # some looks of the supervisor, none of which finds room
    assert not Path(run.paths.stop).exists()
    assert run.popen.poll() is None
    os.truncate(small_disk / "big", 0)
    assert run.wait()["state"] == "interrupted"


@pytest.mark.parametrize("earlier", [[], [signal.SIGTERM]])
def test_now_is_a_signal_where_no_file_can_say_it(small_disk, supervise, tmp_path, earlier):
    run = full_training(small_disk, supervise, tmp_path, "/stop.reserve")
    for number in (*earlier, signal.Signals(run.json(run.paths.supervisor)["attempts"][-1]["now_signal"])):
        run.popen.send_signal(number)
        time.sleep(0.3)  # two signals at once may be heard in either order
    outcome = run.wait(10)
    assert (outcome["state"], outcome["reason"]) == ("killed", "ended at once on request")


def test_a_log_that_was_moved_or_deleted_goes_on_under_its_name(supervise, tmp_path):
    go = tmp_path / "go"
    run = supervise(
        f"import os, time; print('one', flush=True)\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)\n"
        "time.sleep(1.2); print('two', flush=True)",
        kind="setup",
    )
    run.wait_for("one")
    Path(run.paths.log).rename(run.paths.log + ".1")
    go.touch()
    assert run.wait()["state"] == "succeeded"
    assert "two" in run.log
    assert "one" not in run.log
    attempt = run.json(run.paths.supervisor)["attempts"][-1]
    assert (attempt["log_start"], attempt["log_end"]) == (0, len(run.log))


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


def test_a_disk_that_takes_no_lock_is_said_and_leaves_no_secret(supervise):
    run = supervise("print('never')", secrets={"TOKEN": "abcdefgh"}, lock="/dev/null/locks/run.json")
    assert run.popen.wait(10) == 4
    error = run.json(run.paths.error)
    assert (error["code"], error["values"]["reason"]) == ("box_not_writable", "Not a directory")
    assert not Path(run.paths.secrets).exists()
    assert "never" not in run.log


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


#: Stands for a program that puts the machine out: records its words, and answers what its own file says.
RECORDER = """#!/bin/sh
echo "${{0##*/}} $*" >> {out}/asked
[ -f {out}/${{0##*/}}.says ] && echo "its own words"
exit "$(cat {out}/${{0##*/}}.code 2>/dev/null || echo 1)"
"""
WAYS = ("systemctl", "poweroff", "shutdown", "sudo")


class Machine:
    """Programs that would put a machine out, all of them ours and first in PATH: no real one is ever reached."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in WAYS:
            (folder / name).write_text(RECORDER.format(out=folder))
            (folder / name).chmod(0o755)
        for program in ("sh", "cat", "env"):
            (folder / program).symlink_to(shutil.which(program))

    def accept(self, name: str) -> None:
        (self.folder / f"{name}.code").write_text("0")

    @property
    def asked(self) -> list[str]:
        path = self.folder / "asked"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path / "tools")


def end_of(run: Supervised, **values: str) -> None:
    """Wait until the run's events say how `ZY_ON_END` went, and expect exactly that."""
    give_up = time.monotonic() + 20
    while time.monotonic() < give_up:
        rows = [row["values"] for row in run.rows(run.paths.events) if row["name"] == "on_end"]
        if len(rows) > 1:
            assert rows == [{"what": values["what"], "result": "after_the_run"}, values]
            line = " ".join(f"{key}={value}" for key, value in values.items())
            assert f"ZY_EVENT name=on_end {line}\n" in run.log
            return
        time.sleep(0.05)
    raise AssertionError(run.log)


def ending(supervise, machine, program, wish, **more):
    return supervise(
        program, secrets={"ZY_ON_END": wish}, step_keys={"secrets": []}, path=str(machine.folder),
        **{"on_end_after_s": 0, **more},
    )  # fmt: skip


@pytest.mark.parametrize("way", ["systemctl", "poweroff", "shutdown", "sudo", None])
def test_after_the_end_the_machine_goes_off_by_the_first_way_that_accepts(supervise, machine, way):
    if way is not None:
        machine.accept(way)
    run = ending(supervise, machine, "pass", "poweroff")
    assert run.wait()["state"] == "failed"  # however it ended
    ways = ["systemctl poweroff", "poweroff ", "shutdown -h now"]
    ways += [f"sudo -n {words.strip()}" for words in ways]
    said = {"systemctl": "systemctl-poweroff", "sudo": "sudo-systemctl-poweroff"}
    if way is None:
        end_of(run, what="poweroff", result="refused")
    else:
        end_of(run, what="poweroff", by=said.get(way, way), result="accepted")
    assert machine.asked == ways[: 6 if way is None else WAYS.index(way) + 1]


@pytest.mark.parametrize("mode", ["checkpoint", "now"])
def test_a_stop_is_an_end_too(supervise, machine, mode, tmp_path):
    machine.accept("systemctl")
    stop = run_paths(str(tmp_path / "data"), VERSION, RUN_ID).stop
    run = ending(supervise, machine, STOPPABLE.format(stop=stop), "poweroff")
    run.wait_for("ready")
    Path(stop).write_text(mode)
    assert run.wait()["state"] == {"checkpoint": "interrupted", "now": "killed"}[mode]
    end_of(run, what="poweroff", by="systemctl-poweroff", result="accepted")


def test_the_outcome_is_written_and_the_lock_let_go_before_a_command_runs(supervise, machine, tmp_path):
    out = tmp_path / "seen"
    paths = run_paths(str(tmp_path / "data"), VERSION, RUN_ID)
    code = (
        f"import os, sys; open({str(out)!r}, 'w').write(repr((os.path.exists({paths.outcome!r}), "
        f"os.path.exists({str(supervise.lock)!r}), os.path.exists({paths.secrets!r}), sys.argv[1:])))"
    )
    code += "; print('its words; and ZY_ON_END'); sys.exit(3)"
    words = [sys.executable, "-c", code, "a b", "$(touch x)", "; touch y"]
    run = ending(supervise, machine, "pass", shlex.join(words))
    run.wait()
    end_of(run, what="command", result="ended", code="3")
    assert out.read_text() == repr((True, False, False, ["a b", "$(touch x)", "; touch y"]))
    assert "its words; and ZY_ON_END" in run.log
    assert machine.asked == []


@pytest.mark.parametrize(
    ("wish", "result"), [("/no/such --flag", "not_found"), ("'unfinished", "unreadable"), ("", "unreadable")]
)
def test_a_command_that_cannot_run_is_said(supervise, machine, wish, result):
    run = ending(supervise, machine, "pass", wish)
    run.wait()
    end_of(run, what="command", result=result)


def test_a_command_that_the_system_refuses_has_a_shells_code(supervise, machine, tmp_path):
    program = tmp_path / "of-no-interpreter"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o700)
    run = ending(supervise, machine, "pass", str(program))
    run.wait()
    end_of(run, what="command", result="ended", code="126")


def test_a_command_is_nowhere_but_in_the_secret_file_and_no_step_sees_it(supervise, machine):
    wish = "sh -c 'echo t0ken-c4nary' --key s3cr3t-value"
    run = ending(supervise, machine, "import os; print('sees', 'ZY_ON_END' in os.environ)", wish)
    run.wait()
    end_of(run, what="command", result="ended", code="0")
    assert "sees False" in run.log
    texts = [path.read_text("utf-8") for path in Path(run.paths.folder).iterdir()]
    assert not any("s3cr3t-value" in text for text in [*texts, run.log])


def test_a_machine_never_goes_off_under_another_work(supervise, machine, tmp_path):
    other = tmp_path / "locks/setup.json"
    other.parent.mkdir()
    me = identify(os.getpid())
    packed = {"owner": "bob", "action": "setup-only", "name": "s1"}
    process = {"pid": me.pid, "start_ticks": me.start_ticks, "boot_id": me.boot_id}
    other.write_text(json.dumps({**packed, "process": process}))
    run = ending(supervise, machine, "pass", "poweroff", on_end_locks=[str(other)])
    run.wait()
    end_of(run, what="poweroff", result="skipped", reason="at_work")
    assert machine.asked == []


def test_neither_a_setup_nor_a_refused_run_puts_a_machine_out(supervise, machine):
    setup = ending(supervise, machine, "pass", "poweroff", kind="setup", name="s1")
    assert setup.wait()["state"] == "succeeded"
    first = supervise("import time; print('ready', flush=True); time.sleep(600)")
    first.wait_for("ready")
    refused = ending(supervise, machine, "pass", "poweroff", name="20260503-101501-3fa1")
    assert refused.popen.wait(10) == 8
    last = ending(supervise, machine, "pass", "poweroff", name="20260503-101502-3fa1", lock=str(supervise.lock) + "2")
    last.wait()
    end_of(last, what="poweroff", result="refused")  # whatever the others left behind had the same time
    assert len(machine.asked) == 6


def test_a_command_that_does_not_end_is_ended_with_all_it_started(tmp_path, monkeypatch):
    paths = run_paths(str(tmp_path), VERSION, RUN_ID)
    os.makedirs(paths.folder)
    monkeypatch.setattr(on_end, "COMMAND_TIMEOUT_S", 1.0)
    wish = shlex.join(["sh", "-c", f"sleep 600 & echo $! > {tmp_path}/pid; wait"])
    on_end.carry_out(on_end.OnEnd(wish, 0, [], 1), paths)
    assert "ZY_EVENT name=on_end what=command result=timed_out" in Path(paths.log).read_text()
    pid = int((tmp_path / "pid").read_text())
    give_up = time.monotonic() + 5
    while start_ticks(pid) is not None and time.monotonic() < give_up:
        time.sleep(0.05)  # from a KILL to the end
    if start_ticks(pid) is not None:
        os.kill(pid, signal.SIGKILL)
        raise AssertionError("what the command started goes on")


def test_whoever_reads_along_is_not_kept_waiting_by_the_end(supervise, machine):
    run = ending(supervise, machine, "pass", "true", on_end_after_s=600)
    run.wait()
    [waiting] = left_behind(run)
    assert os.getsid(waiting) == waiting
    give_up = time.monotonic() + 10
    while [os.readlink(f"/proc/{waiting}/fd/{number}") for number in (0, 1, 2)] != ["/dev/null"] * 3:
        assert time.monotonic() < give_up
        time.sleep(0.05)


def test_what_came_from_outside_is_let_go_and_what_python_opened_stays():
    """Found on Python 3.8: numbers that had been closed under their objects were closed again, under others."""
    code = (
        "import os; from trainer import on_end\n"
        "ours, (_, theirs) = open(os.devnull), os.pipe()\n"
        "os.set_inheritable(theirs, True)\n"
        "on_end._let_go_of_files()\n"
        "os.fstat(ours.fileno())\n"
        "try: os.fstat(theirs)\n"
        "except OSError: os._exit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 7


@pytest.mark.skipif(not PYTHON_3_8.exists(), reason="no Python 3.8 interpreter here: not run with it")
def test_it_runs_on_python_3_8(supervise, machine):
    secrets = {"TOKEN": "abcdefgh", "ZY_ON_END": "sh -c 'echo done'"}
    run = supervise(STUBBORN, python=str(PYTHON_3_8), secrets=secrets, path=str(machine.folder), on_end_after_s=0)
    pids = grandchildren(run)
    Path(run.paths.stop).write_text("now")
    assert run.wait()["state"] == "killed"
    assert [start_ticks(pid) for pid in pids] == [None, None]
    end_of(run, what="command", result="ended", code="0")
