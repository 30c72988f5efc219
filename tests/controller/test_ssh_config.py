"""A laptop's own ssh: what `~/.ssh/config` says, read as ssh reads it, and never on a runner."""

from __future__ import annotations

import socket
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from controller.addresses import first_hop
from controller.dial import Dialed
from controller.settings import Settings, Ssh
from controller.ssh_config import is_laptop, laptop_ssh
from corpus_builder.errors import ProjectError
from tests.servers import free_port

CONFIG = """
Include extra/*.conf
Host gpu
  HostName 10.0.0.7
  Port 2222
  User trainer
  IdentityFile ~/.ssh/mine
  ProxyJump door,other@inner:2022
Host *
  User everybody
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".ssh" / "extra").mkdir(parents=True)
    return tmp_path


def way(home: Path, config: str, **environ: str) -> Ssh:
    (home / ".ssh" / "config").write_text(config, "utf-8")
    around = {"HOME": str(home), "ZY_GPU_HOST": "gpu", **environ}
    return laptop_ssh(Settings.from_environment(around), around)


def test_an_alias_is_followed_hop_by_hop_as_ssh_does(home):
    (home / ".ssh" / "extra" / "a.conf").write_text("Host door\n  HostName door.example\n  Port 2200\n")
    ssh = way(home, CONFIG)
    assert ssh.route() == [
        ("everybody", "door.example", 2200),
        ("other", "inner", 2022),
        ("trainer", "10.0.0.7", 2222),
    ]
    assert (ssh.key, ssh.password, ssh.uses_agent) == (None, None, False)


def test_ssh_itself_reads_the_same(home):
    """`ssh -G` prints what OpenSSH makes of the file."""
    config = CONFIG.replace("Include extra/*.conf\n", "").replace("~", str(home))
    ssh = way(home, config)
    said = subprocess.run(
        ["ssh", "-G", "-F", str(home / ".ssh" / "config"), "gpu"], capture_output=True, text=True, check=True
    ).stdout
    found = dict(line.partition(" ")[::2] for line in said.splitlines())
    assert (found["user"], found["hostname"], int(found["port"])) == (ssh.user, ssh.host, ssh.port)
    assert found["identityfile"] == ssh.key_files[0]


def test_settings_win_over_the_file(home):
    ssh = way(home, CONFIG, ZY_GPU_USER="me", ZY_GPU_PORT="22", ZY_GPU_JUMP="hop:23", ZY_GPU_KNOWN_HOSTS="x y z")
    assert ssh.route() == [("everybody", "hop", 23), ("me", "10.0.0.7", 22)]
    assert ssh.known_hosts == "x y z"


def test_a_block_goes_on_after_what_it_includes(home):
    (home / ".ssh" / "extra" / "a.conf").write_text("Host unrelated\n  Port 1\n")
    config = "Host gpu\n  Include extra/a.conf\n  HostName 10.0.0.7\n"
    assert way(home, config).host == "10.0.0.7"


def test_an_include_of_itself_ends(home):
    assert way(home, "Include config\nHost gpu\n  Port 2222\n").port == 2222


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("Host gpu\n  ProxyCommand nc %h %p\n", "reason.proxy_command"),
        ("Host gpu\n  ProxyJump a\nHost a\n  ProxyJump b\nHost b\n  ProxyJump a\n", "reason.jump_circle"),
        ("Host gpu\n  HostName -oProxyCommand=id\n", "reason.host_spaces"),
        ("Host gpu\n  ProxyJump a@b@c\n", "reason.jump"),
        ("Host gpu\n  Port 99999\n", "reason.port"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_reason(home, config, reason):
    with pytest.raises(ProjectError) as caught:
        way(home, config)
    assert (caught.value.code, caught.value.values["reason"]) == ("config_unreadable", reason)


def test_match_exec_without_the_package_that_runs_it_is_refused(home, monkeypatch):
    monkeypatch.setattr("paramiko.config.invoke", None)
    monkeypatch.setattr("paramiko.config.invoke_import_error", ImportError("no invoke here"))
    with pytest.raises(ProjectError) as caught:
        way(home, "Match exec true\n  HostName 10.0.0.7\n")
    assert (caught.value.code, caught.value.values["reason"]) == ("config_unreadable", "reason.match_exec")


def test_an_agents_key_is_chosen_by_the_public_halves(home):
    (home / ".ssh" / "mine.pub").write_text("ssh-ed25519 AAAAC3Nz comment\n")
    config = "Host gpu\n  IdentityFile ~/.ssh/mine\n  IdentitiesOnly yes\n".replace("~", str(home))
    ssh = way(home, config, SSH_AUTH_SOCK="/nowhere")
    assert (ssh.uses_agent, len(ssh.agent_only or ())) == (False, 1)


@pytest.mark.parametrize(
    "environ", [{"GITHUB_ACTIONS": "true"}, {"ZY_GPU_KEY": "a key"}, {"ZY_GPU_PASSWORD": "a password"}]
)
def test_a_runner_or_a_key_of_ones_own_asks_nothing_of_the_laptop(environ):
    assert is_laptop(Settings.from_environment({}), {})
    assert not is_laptop(Settings.from_environment(environ), environ)


# --- a connection begun early


def test_a_dialed_connection_is_taken_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialed = Dialed("127.0.0.1", server.getsockname()[1], "")
        taken = dialed.take()
        assert taken is not None
        taken.transport.close()
        assert dialed.take() is None
        dialed.close()


def test_a_failure_to_dial_is_told_once():
    dialed = Dialed("127.0.0.1", free_port(), "")
    with pytest.raises(ConnectionRefusedError):
        dialed.take()
    assert dialed.take() is None


@pytest.mark.parametrize("stands_already", [True, False])
def test_a_connection_that_nobody_took_is_closed(stands_already):
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialed = Dialed("127.0.0.1", server.getsockname()[1], "")
        if stands_already:
            dialed._thread.join()
        dialed.close()
        there, _ = server.accept()
        with there, there.makefile("rb") as stream:
            assert stream.read().partition(b"\r\n")[0] in (b"", b"SSH-2.0-paramiko_" + version("paramiko").encode())
        dialed._thread.join()


def test_nothing_is_dialed_where_the_pins_cannot_be_read():
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialed = Dialed("127.0.0.1", server.getsockname()[1], "no pins at all")
        assert dialed.take() is None
        there, _ = server.accept()
        with there:
            assert there.recv(1) == b""


@pytest.mark.parametrize(
    ("environ", "hop"),
    [
        ({"HOST": " gpu-1 ", "KEY": "k"}, ("gpu-1", 22)),
        ({"HOST": "gpu-1", "PORT": "2200", "PASSWORD": "p"}, ("gpu-1", 2200)),
        ({"HOST": "gpu-1", "KEY": "k", "JUMP": "me@door:23"}, ("door", 23)),
        ({"HOST": "gpu-1"}, None),  # a laptop's own ssh may know better
        ({"KEY": "k"}, None),
        ({"HOST": "gpu-1", "PORT": "ssh", "KEY": "k"}, None),
        ({"HOST": "-oProxyCommand=x", "KEY": "k"}, None),
        ({"HOST": "gpu-1", "KEY": "k", "JUMP": "a b"}, None),
    ],
)
def test_the_first_hop_is_read_from_the_settings_or_not_at_all(environ, hop):
    assert first_hop({f"ZY_GPU_{name}": text for name, text in environ.items()}) == hop
