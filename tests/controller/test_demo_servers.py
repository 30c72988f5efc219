"""The demo's own servers: what they promise to whoever logs in, and that nothing of them is left."""

import stat
from pathlib import Path

import paramiko
import pytest

from controller.box import SshBox
from controller.demo_sshd import DemoSshd
from controller.settings import Settings
from corpus_builder.errors import ProjectError
from tests.servers import agent_of
from trainer.locks import start_ticks

pytestmark = pytest.mark.e2e  # real processes: minutes, not seconds

LOOK = agent_of(
    "import os\n"
    "def answer(request, stream, out):\n"
    "    return {'home': os.path.expanduser('~'), 'mine': os.environ.get('MINE'), 'pid': os.getppid()}\n"
)


def test_whoever_logs_in_has_the_given_home_and_environment(tmp_path: Path):
    with (
        DemoSshd(tmp_path / "sshd", home=tmp_path / "my home", environment={"MINE": "a b"}) as sshd,
        SshBox(Settings.from_environment(sshd.settings()).ssh(), bundle=LOOK) as box,
    ):
        answer = box.ask("look", {}, timeout_s=20)
    assert (answer["home"], answer["mine"]) == (str(tmp_path / "my home"), "a b")


def test_nothing_runs_after_the_block_not_even_a_connection_in_use(tmp_path: Path):
    with DemoSshd(tmp_path) as sshd:
        box = SshBox(Settings.from_environment(sshd.settings()).ssh(), bundle=LOOK)
        served, listener = box.ask("look", {}, timeout_s=20)["pid"], sshd.pid
    box.close()
    assert [start_ticks(pid) for pid in (listener, served)] == [None, None]


def test_the_folder_is_private_and_holds_all_of_it(tmp_path: Path):
    with DemoSshd(tmp_path / "sshd", host_key_types=("ed25519", "rsa")) as sshd:
        assert stat.S_IMODE(sshd.folder.stat().st_mode) == 0o700
        assert len(sshd.known_hosts.splitlines()) == 2
        names = {path.name for path in sshd.folder.iterdir()}
    assert {"sshd_config", "sshd.log", "sshd.pid", "authorized_keys", "user_ed25519", "home"} <= names


def test_files_can_be_copied_by_sftp(tmp_path: Path):
    with DemoSshd(tmp_path) as sshd:
        key = paramiko.Ed25519Key.from_private_key_file(str(sshd.folder / "user_ed25519"))
        with paramiko.Transport((sshd.host, sshd.port)) as transport:
            transport.connect(username=sshd.user, pkey=key)
            sftp = paramiko.SFTPClient.from_transport(transport)
            assert sftp is not None
            assert sftp.stat(str(tmp_path / "sshd_config")).st_size


def test_a_folder_is_used_again_with_the_same_keys(tmp_path: Path):
    pins = []
    for _ in range(2):
        with DemoSshd(tmp_path) as sshd:
            pins.append(sshd.public_key("ed25519"))
    assert pins[0] == pins[1]


def test_a_server_that_cannot_start_says_why(tmp_path: Path):
    (tmp_path / "host_ed25519").write_text("not a key")
    (tmp_path / "host_ed25519.pub").write_text("not a key")
    with pytest.raises(ProjectError, match=r"environment_failed .*reason.sshd_start"), DemoSshd(tmp_path):
        pass
