"""Hostile values in every setting: nothing of them is executed, no secret stands in a command line, tmux, or a log.

What is tried follows from the table of settings: a new one is tried as well. A real sshd, a real tmux, a real training.
"""

from __future__ import annotations

import io
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.box import SshBox
from controller.invocation import Options, Surroundings, perform, way_to_box
from controller.settings import SETTINGS, Settings
from tests.e2e.machine import Machine, running_machine
from tests.fetching import KEY
from tests.servers import find_sshd, running_storage

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_sshd() is None, reason="needs openssh-server"),
]
TRACE = "zqpwned"  # the file that would be there if anything were executed
SECRET = "zqsecret"  # stands in every secret
HOSTILE = {
    "newline": f"{SECRET}\ntouch {TRACE}\n#",
    "quotes": f"'\"; touch {TRACE}; echo {SECRET} '\"",
    "substitution": f"$(touch {TRACE})`touch {TRACE}`${{IFS}}{SECRET}",
    "semicolon": f";touch {TRACE};|touch {TRACE}&&touch {TRACE}#{SECRET}",
    "option": f"--option=-oProxyCommand=touch${{IFS}}{TRACE};{SECRET}",
    "unicode": f"灯塔\u202e💥\u2028{SECRET}$(touch {TRACE})",
    "long": f"{SECRET}$(touch {TRACE})" + "A" * 4096,
}
#: What makes a value acceptable to settings that look at its beginning; what follows is as hostile as before.
FRAMES = ("{}", "/zq/{}", "https://zq.example/{}", "true {}", "zq.example/{}", "[zq::1]{}")
NO_SLASH = "a b'\"$(touch zqpwned)`touch zqpwned`;touch zqpwned;&|--o=x 灯塔💥 %s \\n {x}"
#: How the machine is reached; each of these is tried alone, for nothing else works without it.
WAY = {"ZY_GPU_HOST", "ZY_GPU_PORT", "ZY_GPU_USER", "ZY_GPU_KNOWN_HOSTS", "ZY_GPU_JUMP", "ZY_GPU_KEY"}
NAMES = [setting.name for setting in SETTINGS]
IS_SECRET = {setting.name: setting.is_secret for setting in SETTINGS}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with running_machine(tmp_path_factory.mktemp("machine")) as running:
        yield running.at("", recipe="alone.yaml")


class Watch(threading.Thread):
    """Sees every command line of this computer, as `ps` does, again and again, and what tmux tells of itself."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(daemon=True)
        self.seen: set[bytes] = set()
        self.of_tmux: set[str] = set()
        self._is_over = threading.Event()
        self._tmux = {"PATH": os.environ["PATH"], "TMUX_TMPDIR": str(machine.folder / "tmux")}

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join()

    def run(self) -> None:
        looks = 0
        while not self._is_over.wait(0.02):
            for name in filter(str.isdigit, os.listdir("/proc")):
                try:
                    self.seen.add(Path("/proc", name, "cmdline").read_bytes())
                except OSError:
                    continue
            if looks % 40 == 0:
                for words in (["-g"], ["-t", "=zy-coding-train"], ["-t", "=zy-setup"]):
                    argv = ["tmux", "show-environment", *words]
                    done = subprocess.run(argv, capture_output=True, text=True, env=self._tmux, check=False)
                    self.of_tmux.add(done.stdout)
            looks += 1


def assert_nothing_ran(machine: Machine) -> None:
    for folder in (machine.folder, Path.cwd(), Path.home(), Path("/"), Path("/tmp")):
        found = folder.rglob(TRACE) if folder == machine.folder else folder.glob(TRACE)
        assert list(found) == []


def accepted(name: str, kind: str) -> list[str]:
    """Return the forms of a hostile value that a setting takes."""
    values = [frame.format(HOSTILE[kind]) for frame in FRAMES]
    return [value for value in values if name not in Settings.read({name: value})[1]]


def ask_status(machine: Machine, **changes: str) -> tuple[int, str]:
    """Return the exit code and all words of a `status` in this process, over the real sshd."""
    environ = {**machine.settings(), **changes}
    out = io.StringIO()
    code = perform(
        "status", Options(given={}), Surroundings(environ, out, out),
        open_box=lambda kind, settings: SshBox(way_to_box(settings, environ), sleep=lambda seconds: None),
    )  # fmt: skip
    return code, out.getvalue()


def assert_silent(name: str, code: int, said: str) -> None:
    assert code in (0, 2, 3, 4), said
    assert "Traceback" not in said
    if IS_SECRET[name]:
        assert SECRET not in said


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_value_that_is_refused_is_named_and_never_repeated(name):
    for kind, value in HOSTILE.items():
        reasons = Settings.read({name: value})[1]
        assert set(reasons) <= {name}
        assert SECRET not in str(reasons), kind
        assert TRACE not in str(reasons), kind


def test_every_kind_of_setting_takes_some_hostile_value_or_none_at_all():
    """The frames reach what they are meant to reach: free texts, secrets, paths, addresses and commands."""
    takes = {name for name in NAMES for kind in HOSTILE if accepted(name, kind)}
    assert {"ZY_GPU_KEY", "ZY_GPU_KNOWN_HOSTS", "ZY_CODING_TRAIN_DATA", "PIP_INDEX_URL", "ZY_MOTHER_VENV"} <= takes
    assert not takes & {"ZY_GPU_PORT", "ZY_LANG", "ZY_COS_REGION", "AWS_REGION"}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_accepted_is_only_ever_a_value(machine, kind):
    """All settings at once that are not the way to the machine; the folders do not exist, and asking makes none."""
    changes = {name: forms[-1] for name in NAMES if name not in WAY and (forms := accepted(name, kind))}
    assert changes
    with Watch(machine) as watch:
        code, said = ask_status(machine, **changes)
    assert (code, "Traceback" in said, SECRET in _without(said, changes)) == (0, False, False), said
    assert not any(SECRET.encode() in line for line in watch.seen)
    assert_nothing_ran(machine)


def _without(said: str, changes: dict[str, str]) -> str:
    """Leave out the folders, which a status shows and which are no secrets."""
    for name in ("ZY_CODING_TRAIN_DATA", "ZY_CODING_TRAIN_ROOT"):
        said = said.replace(changes.get(name, "\0"), "")
    return "\n".join(line for line in said.splitlines() if "/zq/" not in line)


@pytest.mark.parametrize("name", sorted(WAY & set(NAMES)))
def test_a_hostile_way_to_the_machine_leads_nowhere(machine, name):
    with Watch(machine) as watch:
        for kind in HOSTILE:
            for value in accepted(name, kind)[:1]:
                code, said = ask_status(machine, **{name: value})
                assert code in (2, 3), said
                assert_silent(name, code, said)
    assert not IS_SECRET[name] or not any(SECRET.encode() in line for line in watch.seen)
    assert_nothing_ran(machine)


@pytest.fixture(scope="module")
def hostile(machine: Machine) -> Iterator[Machine]:
    """Folders of hostile names, a hostile value in every setting that takes one, and a link that works."""
    here = machine.at(NO_SLASH)
    folder = machine.folder / NO_SLASH
    (folder / "venv").symlink_to(machine.settings()["ZY_MOTHER_VENV"])
    values = {
        name: forms[-1]
        for name in NAMES
        if name not in WAY | {"ZY_CODING_TRAIN_DATA", "ZY_CODING_TRAIN_ROOT", "ZY_FETCH_ALLOW"}
        and (forms := accepted(name, "substitution"))
    }
    with running_storage(machine.dialog_zip, key=KEY) as storage:
        values["ZY_BINGSHUO_DIALOG_URL"] = f"{storage.presigned_url()}&zq={SECRET}$(touch${{IFS}}{TRACE});'--x"
        values["ZY_MOTHER_VENV"] = str(folder / "venv")
        values["ZY_FETCH_ALLOW"] = "127.0.0.1"
        yield here.at(NO_SLASH, **values)


def test_a_setup_and_a_training_execute_nothing_of_it_and_tell_no_secret(machine, hostile):
    with Watch(machine) as watch:
        done = hostile.zy("setup-and-train", "--confirm", "--watch-minutes", "8", "--dialog-zip", "")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    assert_nothing_ran(machine)
    assert not Path(hostile.data.data, TRACE).exists()

    key_lines = [line for line in machine.sshd.private_key.splitlines() if len(line) > 20 and "KEY" not in line]
    secrets = [SECRET, *key_lines]
    programs = b"\n".join(watch.seen)
    for program in (b"trainer.supervise", b"controller.boxside", b"trainer.train", b"tmux"):
        assert program in programs  # it looked at the right moments
    told = "\n".join(watch.of_tmux)
    assert "TMUX_TMPDIR" in told or "PATH=" in told
    for secret in secrets:
        assert secret.encode() not in programs
        assert secret not in told
        assert secret not in said
        assert [path for path in files(hostile) if secret.encode() in path.read_bytes()] == []


def files(machine: Machine) -> list[Path]:
    """Return every file of the machine's data and code: logs, journals, requests, what a step left."""
    folders = (Path(machine.data.data), Path(machine.root.root))
    return [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
