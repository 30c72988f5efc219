"""Boxes that lose things: the controller, the supervisor, power, the clock, disk space, a run's folder, a program.

A real sshd, real kills, file systems of a few megabytes; one process on the CPU trains a random model of two layers.
The tests go from one to the next on one machine: each begins where the one before left it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.e2e.end_state import TRAIN, EndState, dispatch_twice, kill_controller, sha256
from tests.e2e.machine import ROOT, SMOKED, Machine, running_machine, until, write_dialogs
from tests.fetching import KEY
from tests.servers import DemoSshd, find_sshd, running_storage
from tests.smoke_receipt import place_receipt
from tests.tcp_proxy import TcpProxy
from trainer.checkpoints import complete_checkpoints, find_fault
from trainer.locks import start_ticks

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_sshd() is None, reason="needs openssh-server"),
]
LONG = ("--set", "num_train_epochs=4000", "--set", "save_steps=100000")
MB = 1 << 20


# --- small disks


@dataclass(frozen=True)
class Disk:
    """A file system of the test's own; a value of `size` or `nr_inodes` holds from the moment it is set."""

    folder: Path

    def set(self, **options: object) -> None:
        words = ",".join(["remount", *(f"{name}={value}" for name, value in options.items())])
        subprocess.run(["mount", "-o", words, str(self.folder)], check=True, capture_output=True)

    def fill(self) -> Path:
        """Leave not one page free; return the file that holds them."""
        path = self.folder / "filler"
        with path.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                return path


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Disk]:
    folder.mkdir(parents=True, exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", ",".join(["mode=0700", *options]), "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("no disk of the test's own: mounting a tmpfs takes root and `mount`")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


# --- the machine


@pytest.fixture(scope="module")
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, stack: ExitStack) -> Iterator[Machine]:
    """Programs cannot be run from its TMPDIR, where that can be arranged: everything here works all the same."""
    folder = tmp_path_factory.mktemp("machine")
    temporary = folder / "tmp"
    try:
        stack.enter_context(mounted(temporary, "noexec"))
    except pytest.skip.Exception:
        temporary.mkdir(exist_ok=True)
    with running_machine(folder, of_user={"TMPDIR": str(temporary)}) as running:
        yield running.at("", recipe="alone.yaml")


# --- two at the same instant; the controller dies


@pytest.fixture(scope="module")
def undisturbed(machine: Machine) -> EndState:
    """Two dispatches at the same instant, of which exactly one trains, undisturbed."""
    return dispatch_twice(machine.at("two"))


def test_of_two_dispatches_at_the_same_instant_exactly_one_trains(undisturbed):
    assert undisturbed.samples


@pytest.mark.parametrize("seed", [5, 6])  # as the setup ends and the training is asked for; as it begins
def test_a_controller_that_is_killed_and_called_again_gets_what_an_undisturbed_one_gets(machine, undisturbed, seed):
    kill_controller(machine.at(f"killed-{seed}"), undisturbed, random.Random(seed))


# --- disks that fill up


@pytest.fixture(scope="module")
def large_zip(machine: Machine) -> Path:
    path = machine.folder / "large.zip"
    write_dialogs(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("filler.bin", random.Random(1).randbytes(9 * MB))
    return path


def assert_full(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    assert done.returncode == 4, done.stdout + done.stderr
    assert "GiB needed" in done.stderr.splitlines()[0], done.stderr
    assert str(folder) in done.stderr, done.stderr
    assert "next:" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_disk_that_is_full_for_the_release_the_zip_or_the_corpus_is_said_and_leaves_what_was_there(
    machine, large_zip
):
    here = machine.at("disks")
    root, raw, processed = (Path(name) for name in (here.root.root, here.data.archives, here.data.samples))
    raw, processed = raw.parent, processed.parent
    with mounted(root, "size=1m") as of_root, mounted(raw, "size=6m") as of_raw, mounted(processed, "size=8m") as disk:
        Path(here.data.data).chmod(0o700)

        assert_full(here.zy("setup-only"), root)
        assert [path for path in root.rglob("*") if path.is_file()] == []
        of_root.set(size="64m")
        place_receipt(root, **SMOKED[here.recipe])

        assert_full(here.zy("setup-only", "--dialog-zip", str(large_zip)), raw)
        assert tree(raw) == {}
        of_raw.set(size="64m")

        done = here.zy("setup-only")
        assert done.returncode == 0, done.stderr
        before = {path: text for path, text in tree(processed).items() if "/." not in path}
        assert here.data.manifest in before
        filler = disk.fill()
        assert_full(here.zy("setup-only", "--set", "max_seq_len=200"), processed)
        filler.unlink()
        assert {path: text for path, text in tree(processed).items() if "/." not in path} == before
        assert list(processed.rglob("*.partial")) == []

        done = here.zy("setup-only", "--set", "max_seq_len=200")
        assert done.returncode == 0, done.stderr
        assert json.loads(Path(here.data.manifest).read_text())["max_seq_len"] == 200


def test_a_data_folder_without_room_for_a_setup_is_said_before_one_begins(machine):
    here = machine.at("full")
    data = Path(here.data.data)
    with mounted(data, "size=1m") as disk:
        disk.fill().chmod(0o600)
        assert_full(here.zy("setup-only"), data)
        assert [path.name for path in data.rglob("*") if path.is_file()] == ["filler"]
    assert here.status()["locks"] == {"setup": None, "run": None}


def test_a_disk_that_fills_up_during_the_download_is_said_and_with_room_again_it_comes(machine, large_zip):
    here = machine.at("download")
    raw = Path(here.data.archives).parent
    with (
        mounted(raw, "size=200m") as disk,
        running_storage(large_zip, key=KEY) as storage,
        TcpProxy(int(storage.endpoint.rpartition(":")[2])) as bucket,
    ):
        Path(here.data.data).chmod(0o700)
        url = storage.presigned_url().replace(storage.endpoint, f"http://127.0.0.1:{bucket.port}")
        link = {"ZY_BINGSHUO_DIALOG_URL": url, "ZY_FETCH_ALLOW": "127.0.0.1"}
        bucket.fall_silent_after(3 * MB)
        with here.started("setup-only", "--dialog-zip", "", **link) as child:
            assert bucket.reached.wait(60), "nothing was downloaded"
            disk.set(size="7m")
            bucket.heal()
            said, _ = child.communicate(timeout=120)
        assert_full(subprocess.CompletedProcess("", child.returncode, "", said[said.index("error:") :]), raw)
        assert not os.path.lexists(here.data.dialog_pointer)
        disk.set(size="200m")
        done = here.zy("setup-only", "--dialog-zip", "", **link)
        assert done.returncode == 0, done.stderr
        assert Path(os.readlink(here.data.dialog_pointer)).name == sha256(large_zip)


def test_a_disk_that_takes_no_second_checkpoint_ends_the_run_and_leaves_the_first(machine):
    """Out of inodes: the look at the free bytes lets it begin."""
    checkpoints = Path(machine.data.checkpoints)
    with mounted(checkpoints, "size=200m,nr_inodes=24"):
        Path(machine.data.data).chmod(0o700)
        done = machine.zy(*TRAIN, "--set", "save_steps=1", "--set", "num_train_epochs=40")
        assert done.returncode == 6, done.stdout[-3000:] + done.stderr
        assert "disk" in done.stderr.splitlines()[0], done.stderr
        [(run, outcome)] = machine.runs().items()
        assert (outcome["state"], outcome["remedy"]) == ("failed", "disk_full")
        begun = [path for path in (checkpoints / "tiny_v1" / run).iterdir() if path.name.startswith("checkpoint-")]
        whole = complete_checkpoints(checkpoints / "tiny_v1" / run)
        assert 0 < len(whole) < len(begun)
        assert [find_fault(path) for path in whole] == [None] * len(whole)
    assert machine.processes() == []
    assert machine.status()["locks"] == {"setup": None, "run": None}


# --- kill -9, a reboot, a clock that is set back, a folder that goes


@pytest.fixture(scope="module")
def an_hour_ago(machine: Machine) -> dict[str, str]:
    """What lets a controller believe that it is an hour earlier."""
    folder = machine.folder / "clock"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import time\n"
        "now, broken_down = time.time, time.gmtime\n"
        "time.time = lambda: now() - 3600\n"
        "time.gmtime = lambda at=None: broken_down(time.time() if at is None else at)\n"
    )
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def begin(machine: Machine, **changes: str) -> str:
    """Start a training that would take hours; return its id once it has told a step."""
    known = set(machine.runs())
    started = machine.zy("setup-and-train", "--confirm", "--watch-minutes", "0", *LONG, **changes)
    assert started.returncode == 0, started.stderr
    [run] = set(machine.runs()) - known
    return run


def test_a_supervisor_that_is_killed_leaves_a_lost_run_without_processes(machine):
    with machine.started("setup-and-train", "--confirm", "--watch-minutes", "8", *LONG) as watching:
        run = machine.wait_for_step(after=machine.run_id())["id"]
        os.kill(machine.supervisor("runs", run), signal.SIGKILL)
        said, _ = watching.communicate(timeout=120)
    assert watching.returncode == 6, said[-2000:]
    assert "vanished" in said
    until(lambda: not machine.processes(), "the trainer ends with its supervisor")
    status = machine.status()
    assert (status["run"]["id"], status["run"]["state"], status["locks"]["run"]) == (run, "lost", None)
    assert Path(machine.root.run_lock).exists()  # stale, and known as that


def test_a_clock_that_is_set_back_hides_no_run_and_a_reboot_loses_it(machine, an_hour_ago):
    before = machine.run_id()
    run = begin(machine, **an_hour_ago)
    assert before is not None
    assert run < before  # ids begin with the time
    assert machine.wait_for_step(after=before)["id"] == run
    second = machine.zy("setup-and-train", "--confirm", *LONG)
    assert (second.returncode, run in second.stderr) == (8, True)
    for path in Path(machine.data.data).rglob("*"):
        if path.is_file() and "checkpoints" not in path.parts:
            os.utime(path, (time.time() + 3600,) * 2)
    assert machine.status()["run"]["state"] == "running"

    machine.reboot()
    status = machine.status()
    assert (status["run"]["id"], status["run"]["state"]) == (run, "lost")
    assert status["locks"] == {"setup": None, "run": None}
    lock = Path(machine.root.run_lock)
    packed = json.loads(lock.read_text())
    packed["process"].update(pid=os.getpid(), start_ticks=start_ticks(os.getpid()))  # a pid that is used again
    lock.write_text(json.dumps(packed))
    assert machine.status()["locks"]["run"] is None


def test_a_run_whose_folder_goes_is_still_seen_and_ended(machine):
    before = machine.run_id()
    run = begin(machine)
    machine.wait_for_step(after=before)
    with machine.started("setup-and-train", "--confirm", "--watch-minutes", "8", *LONG) as refused:
        said, _ = refused.communicate(timeout=60)
    assert (refused.returncode, run in said) == (8, True)
    gone = Path(machine.data.runs) / run
    shutil.rmtree(gone.rename(machine.folder / "gone"))  # at once: the run writes while it is deleted
    status = machine.status()
    assert (status["run"]["id"], status["run"]["state"]) == (run, "running")
    assert status["locks"]["run"]["name"] == run
    with machine.started("tail-log", "--follow", "--watch-minutes", "5") as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline()
        killed = machine.zy("kill", "--json")
        said, _ = watching.communicate(timeout=60)
    assert killed.returncode == 0, killed.stdout + killed.stderr
    [ended] = json.loads(killed.stdout)["ended"]
    assert (ended["id"], ended["state"]) == (run, "interrupted")
    assert (watching.returncode, "interrupted" in said) == (6, True), said[-2000:]
    assert machine.processes() == []
    assert machine.status()["locks"] == {"setup": None, "run": None}


def test_a_setup_whose_supervisor_is_killed_is_lost_and_the_next_one_works(machine, an_hour_ago):
    with machine.started("setup-only", **an_hour_ago) as watching:
        setup = machine.wait_for_setup()
        until((Path(machine.data.setups) / setup / "supervisor.json").exists, "the supervisor's word")
        os.kill(machine.supervisor("setups", setup), signal.SIGKILL)
        said, _ = watching.communicate(timeout=60)
    assert (watching.returncode, "vanished" in said) == (6, True)
    status = machine.status()
    assert (status["setup"]["id"], status["setup"]["state"], status["locks"]["setup"]) == (setup, "lost", None)
    assert machine.zy("setup-only").returncode == 0
    assert machine.status()["setup"]["state"] == "succeeded"


# --- boxes that lack something


@contextmanager
def with_path(machine: Machine, *programs: str, python: str | None = None) -> Iterator[Machine]:
    """The same machine behind a login that finds the named programs and no others."""
    folder = machine.folder / machine.place / "path"
    folder.mkdir()
    for name in programs:
        found = shutil.which(name)
        assert found is not None, name
        (folder / name).symlink_to(found)
    if python is not None:
        (folder / "python3").write_text(f'#!/bin/sh\nexec "{python}" "$@"\n')
        (folder / "python3").chmod(0o755)
    environment = {"PATH": str(folder), "TMUX_TMPDIR": str(machine.folder / "tmux"), "CUDA_VISIBLE_DEVICES": ""}
    with DemoSshd(folder / "ssh", home=machine.folder / "home", environment=environment) as sshd:
        yield replace(machine, sshd=sshd)


def test_a_box_without_tmux_sets_up_all_the_same(machine):
    with with_path(machine.at("no-tmux"), "sh", "env", python=os.path.realpath(sys.executable)) as here:
        done = here.zy("setup-only")
        assert done.returncode == 0, done.stderr
        assert here.status()["setup"]["state"] == "succeeded"
        assert here.processes() == []


def test_a_box_without_python_is_unfit_and_the_next_step_says_why(machine):
    with with_path(machine.at("no-python"), "sh", "env") as here:
        done = here.zy("status")
    assert done.returncode == 4, done.stderr
    assert "python3" in done.stderr
    assert "next:" in done.stderr


def find_old_python() -> str | None:
    candidates = [shutil.which("python3.7"), *Path("~/.pyenv/versions").expanduser().glob("3.7.*/bin/python3.7")]
    for path in candidates:
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return str(path)
    return None


@pytest.mark.skipif(find_old_python() is None, reason="no Python 3.7 on this machine: the box with one was not tried")
def test_a_box_with_python_3_7_is_unfit_by_that_name(machine):
    with with_path(machine.at("old-python"), "sh", "env", python=find_old_python()) as here:
        done = here.zy("setup-only")
    assert (done.returncode, "3.7" in done.stderr, "Traceback" in done.stderr) == (4, True, False), done.stderr
    assert not Path(here.data.data).exists()


def test_a_root_that_cannot_be_written_is_unfit_and_can_still_be_asked(machine):
    here = machine.at("read-only")
    with mounted(Path(here.root.root), "size=1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk.folder)], check=True)
        done = here.zy("setup-only")
        assert here.zy("status").returncode == 0
    assert done.returncode == 4, done.stderr
    assert here.root.root in done.stderr
    assert not Path(here.data.data).exists()


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_root_that_others_can_write_to_is_refused_with_the_chmod(machine, mode):
    here = machine.at(f"open-{mode:o}")
    Path(here.root.root).mkdir()
    Path(here.root.root).chmod(mode)
    done = here.zy("setup-only")
    assert done.returncode == 4, done.stderr
    assert f"chmod 700 {here.root.root}" in done.stderr
    assert f"{mode:o}" in done.stderr
    assert list(Path(here.root.root).iterdir()) == []


def test_programs_cannot_be_run_from_the_temporary_folder_that_all_of_this_used(machine):
    temporary = machine.folder / "tmp"
    if not os.path.ismount(temporary):
        pytest.skip("no TMPDIR that is mounted noexec: that takes root and `mount`")
    (temporary / "program").write_text("#!/bin/sh\n")
    (temporary / "program").chmod(0o755)
    with pytest.raises(PermissionError):
        subprocess.run([str(temporary / "program")], check=False)
