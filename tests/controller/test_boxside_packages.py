"""tmux where there is none: installed only where that is asked for, by a recording package manager; else said."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from controller.boxside import packages
from tests.agent_box import agent_box

pytestmark = pytest.mark.e2e  # real processes

INSTALL = {
    "apt-get": "install -y --no-install-recommends tmux",
    "dnf": "install -y tmux",
    "yum": "install -y tmux",
    "apk": "add --no-cache tmux",
    "zypper": "--non-interactive install --no-recommends tmux",
    "pacman": "-S --noconfirm --needed tmux",
}
REFRESH = {"apt-get": "update", "pacman": "-Sy"}
#: Records its words and refuses those it does not know. `install` and `refresh` say what it then does.
MANAGER = """#!/bin/sh
echo "{name} $*" >> {folder}/calls
case "$*" in
"{words}") {install};;
{refresh}
*) echo "E: Invalid operation $*" >&2; exit 100;;
esac
"""
GIVES = "ln -s {tmux} {folder}/tmux"


class Tools:
    """A PATH with few programs, and the package managers that a test offers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("env", "python3", "sh", "ln", "rm", "test", "touch"):
            (folder / name).symlink_to(shutil.which(name))
        self.tmux = shutil.which("tmux")

    def offer(self, name: str, *, install: str = GIVES, needs_refresh: bool = False) -> None:
        fills = {"folder": self.folder, "tmux": self.tmux}
        does = install.format(**fills)
        refresh = "nothing) exit 1;;"
        if name in REFRESH:
            refresh = f'"{REFRESH[name]}") touch {self.folder}/lists;;'
        if needs_refresh:
            does = f"test -e {self.folder}/lists || exit 100; {does}"
        script = MANAGER.format(name=name, folder=self.folder, words=INSTALL[name], install=does, refresh=refresh)
        self.write(name, script)

    def write(self, name: str, script: str) -> None:
        (self.folder / name).write_text(script)
        (self.folder / name).chmod(0o755)

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def tools(tmp_path, monkeypatch):
    made = Tools(tmp_path / "tools")
    monkeypatch.setenv("PATH", str(made.folder))
    return made


def install(capfd, *, allow=True):
    packages.install_tmux({"allow": allow})
    return [line for line in capfd.readouterr().out.splitlines() if line.startswith("[setup]")]


@pytest.mark.parametrize("name", INSTALL)
def test_every_package_manager_gets_its_own_words(tools, capfd, name):
    tools.offer(name)
    said = install(capfd)
    assert tools.calls() == [f"{name} {INSTALL[name]}"]
    assert said == [
        f"[setup] installing tmux with {name}", "[setup] tmux is installed: the training will run in it",
    ]  # fmt: skip
    assert install(capfd) == []  # it is there now
    assert len(tools.calls()) == 1


@pytest.mark.parametrize("name", REFRESH)
def test_lists_that_are_empty_are_fetched_first(tools, capfd, name):
    tools.offer(name, needs_refresh=True)
    assert install(capfd)[-1].startswith("[setup] tmux is installed")
    assert tools.calls() == [f"{name} {words}" for words in (INSTALL[name], REFRESH[name], INSTALL[name])]


def test_without_the_setting_nothing_is_installed(tools, capfd):
    tools.offer("apt-get")
    (said,) = install(capfd, allow=False)
    assert "setsid holds what runs; ZY_ALLOW_INSTALL=1" in said
    assert tools.calls() == []


@pytest.mark.parametrize("does", ["exit 100", "exit 0"])
def test_what_fails_or_brings_nothing_leaves_setsid(tools, capfd, does):
    tools.offer("apt-get", install=does)
    assert install(capfd)[-1] == "[setup] tmux could not be installed: setsid holds what runs"


def test_a_box_without_a_known_package_manager(tools, capfd):
    (said,) = install(capfd)
    assert said == "[setup] tmux cannot be installed (no package manager known): setsid holds what runs"


@pytest.mark.parametrize("lets", [True, False])
def test_who_is_not_root_needs_sudo_without_a_password(tools, capfd, monkeypatch, lets):
    monkeypatch.setattr(packages.os, "getuid", lambda: 1000)
    tools.offer("apt-get")
    does = 'shift; exec "$@"' if lets else 'echo "sudo: a password is required" >&2; exit 1'
    tools.write("true", "#!/bin/sh\n")
    tools.write("sudo", f'#!/bin/sh\necho "sudo $*" >> {tools.folder}/calls\n[ "$1" = -n ] || exit 9\n{does}\n')
    said = install(capfd)
    if lets:
        assert tools.calls()[1:] == [f"sudo -n apt-get {INSTALL['apt-get']}", f"apt-get {INSTALL['apt-get']}"]
        assert said[-1].startswith("[setup] tmux is installed")
    else:
        assert tools.calls() == ["sudo -n true"]
        assert said == [
            "[setup] tmux cannot be installed (neither root nor sudo without a password): setsid holds what runs"
        ]


@pytest.mark.parametrize("allow", [True, False])
def test_a_setup_brings_tmux_and_the_training_runs_in_it(tmp_path, monkeypatch, chatml_model_dir, allow):
    with agent_box(tmp_path, sys.executable, monkeypatch) as box:
        tools = Tools(tmp_path / "tools")
        tools.offer("apt-get")
        digest = box.push()
        monkeypatch.setenv("PATH", str(tools.folder))
        box.write_base_model(chatml_model_dir)
        request = box.setup_request(digest, python="/no/such/bin/python", allow_install=allow)
        answer, lines = box.follow("setup", box.ask("start_setup", **request)["setup_id"])
        names = [line.rpartition("=")[2] for line in lines if line.startswith("ZY_EVENT name=step_started")]
        assert names == ["check", "tmux", "fetch", "environment"]
        assert answer["error"]["code"] == "environment_unusable"
        assert (len(tools.calls()), (tools.folder / "tmux").exists()) == ((1, True) if allow else (0, False))
        box.write_manifest()
        run_id = box.ask("start_train", **box.train_request(digest, "long"))["run_id"]
        box.follow("train", run_id, until="ZY_PROGRESS")
        sessions = subprocess.run(
            [tools.tmux, "list-sessions", "-F", "#{session_name}"], capture_output=True, text=True, env=dict(os.environ)
        )
        assert sessions.stdout.split() == (["zy-coding-train"] if allow else [])
        box.ask("kill", mode="checkpoint", owner="bob")
        assert box.follow("train", run_id)[0]["state"] == "interrupted"
