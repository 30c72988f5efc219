"""The dialog ZIP over bad networks, full disks and killed processes: real S3 servers, a real sshd, the real agent."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from controller.box import SshBox
from controller.boxside import parts
from controller.boxside.download import Link, download
from controller.inputs import check_inputs
from controller.job import Job
from controller.objects import LocalZip, resolve_dialog
from controller.send_dialogs import send_dialogs
from controller.settings import Settings
from corpus_builder.errors import ProjectError
from tests.agent_box import agent_box
from tests.e2e.machine import Machine, counts_by_class, running_machine
from tests.fetching import (
    BLOCK,
    KEY,
    before,
    cut_again_and_again,
    kill_again_and_again,
    make_zip,
    serving_zip,
    whole_blocks,
)
from tests.servers import DemoSshd, Nanio, find_sshd, running_storage
from tests.tcp_proxy import TcpProxy
from tests.test_oldest_python import find_python_3_8
from trainer.run_paths import DataPaths

pytestmark = pytest.mark.e2e
needs_sshd = pytest.mark.skipif(find_sshd() is None, reason="needs openssh-server")


@pytest.fixture(scope="module")
def nanio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Nanio, str]]:
    with serving_zip(tmp_path_factory.mktemp("nanio")) as served:
        yield served


@pytest.mark.parametrize("seed", range(4))
def test_cut_at_random_places_it_is_the_same_file(nanio, tmp_path, monkeypatch, seed):
    monkeypatch.setattr(parts, "BLOCK_BYTES", BLOCK)
    assert cut_again_and_again(*nanio, tmp_path / "d/zip", random.Random(seed)) > parts.MAX_STREAMS


def test_killed_at_any_moment_it_goes_on_with_what_is_whole(nanio, tmp_path):
    assert kill_again_and_again(*nanio, tmp_path / "d/zip", random.Random(3), most=4) >= 2


@pytest.mark.skipif(find_python_3_8() is None, reason="no Python 3.8 on this machine")
def test_the_oldest_python_downloads_too(nanio, tmp_path):
    oldest = find_python_3_8()
    assert kill_again_and_again(*nanio, tmp_path / "d/zip", random.Random(5), most=2, python=str(oldest)) == 2


def test_a_changed_or_expired_signature_is_told_by_a_server_that_checks(nanio, tmp_path, monkeypatch):
    with before(nanio[0]) as (_, link):
        changed = replace(link, url=link.url[:-1] + ("0" if link.url[-1] != "0" else "1"))
        with pytest.raises(ProjectError, match="storage_denied") as caught:
            download(changed, str(tmp_path / "d/zip"))
        assert caught.value.values["reason"] == "HTTP 403 SignatureDoesNotMatch"
        other = replace(link, url=link.url.replace("nanio-test-key", "nanio-other-key"))
        with pytest.raises(ProjectError, match="storage_denied"):
            download(other, str(tmp_path / "d/zip"))
    monkeypatch.setattr("controller.objects.EXPIRES_S", 1)
    with before(nanio[0]) as (_, link):
        time.sleep(2.1)
        with pytest.raises(ProjectError, match="storage_expired"):
            download(link, str(tmp_path / "d/zip"))


def test_motos_objects_come_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "BLOCK_BYTES", BLOCK)
    sha256 = make_zip(tmp_path / "d.zip", random.Random(2), 1_000_000)
    with running_storage(tmp_path / "d.zip", key=KEY) as storage:
        link = Link(storage.presigned_url(), [storage.endpoint.rpartition("/")[2]])
        found = download(link, str(tmp_path / "d/zip"))
        assert found.sha256 == sha256
        assert download(link, str(tmp_path / "e/zip"), known_etag=found.etag).is_known


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None or subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(folder)], check=False, capture_output=True
    ).returncode:  # fmt: skip
        pytest.skip("no small disk to fill: mounting a tmpfs takes root and `mount`")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_up(path: Path) -> None:
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 12))


def test_a_disk_that_fills_up_on_the_way_is_said_and_what_has_come_stays(nanio, small_disk, monkeypatch):
    monkeypatch.setattr(parts, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(parts, "MAX_STREAMS", 1)  # the others would be done before the disk is full
    path, filler = small_disk / "d/zip", small_disk / "filler"
    with before(nanio[0]) as (proxy, link):
        proxy.drop_after(700_000)

        def fill(line: str) -> None:
            if "trying again" in line and not filler.exists():
                fill_up(filler)
            proxy.drop_after(None)

        with pytest.raises(ProjectError, match="box_disk_full") as caught:
            download(link, str(path), say=fill, sleep=lambda seconds: None)
        assert caught.value.values["path"] == str(small_disk / "d")
        with pytest.raises(ProjectError, match="box_disk_full"):  # and the next time it is said before anything comes
            download(link, str(path))
        filler.unlink()
        assert whole_blocks(path) > 0
        assert download(link, str(path)).sha256 == nanio[1]


# --- from the runner's own disk


@pytest.fixture
def laptop_zip(tmp_path: Path) -> LocalZip:
    make_zip(tmp_path / "mine.zip", random.Random(4), 12_000_000)
    file = resolve_dialog(f"file:{tmp_path}/mine.zip", Settings.from_environment({})).file
    assert file is not None
    return file


def job_at(data: Path, told: list[str], sleep: Callable[[float], None] = lambda seconds: None) -> Job:
    return Job(
        settings=Settings.from_environment({"ZY_CODING_TRAIN_DATA": str(data)}),
        inputs=check_inputs({"action": "setup-only"}), environ={}, owner="alice", echo=told.append, sleep=sleep,
    )  # fmt: skip


@contextmanager
def box_behind(sshd: DemoSshd, proxy: TcpProxy) -> Iterator[SshBox]:
    ssh = Settings.from_environment(sshd.settings()).ssh()
    pinned = ssh.known_hosts.replace(f":{ssh.port} ", f":{proxy.port} ")
    with SshBox(replace(ssh, port=proxy.port, known_hosts=pinned), sleep=lambda seconds: proxy.heal()) as box:
        yield box


@needs_sshd
@pytest.mark.parametrize("seed", range(3))
def test_a_zip_of_the_laptop_arrives_however_often_the_link_is_cut(tmp_path, laptop_zip, seed):
    draw, told = random.Random(seed), []

    def cut_elsewhere(_: float) -> None:
        proxy.drop_after(None, went_forth=draw.randrange(2_500_000, 6_000_000))

    with DemoSshd(tmp_path / "ssh") as sshd, TcpProxy(sshd.port) as proxy, box_behind(sshd, proxy) as box:
        job = job_at(tmp_path / "data", told, cut_elsewhere)
        cut_elsewhere(0)
        send_dialogs(box, job, laptop_zip)
        arrived = Path(DataPaths(str(tmp_path / "data")).upload(laptop_zip.sha256))
        assert hashlib.sha256(arrived.read_bytes()).hexdigest() == laptop_zip.sha256
        assert list(arrived.parent.iterdir()) == [arrived]
        proxy.heal()
        send_dialogs(box, job, laptop_zip)
    left = [int(line.split(": ")[-1].split()[0]) for line in told if "sending" in line]
    assert len(left) >= 2, told
    assert left == sorted(left, reverse=True)  # each try goes on where the last one was cut
    assert left[-1] < left[0] == laptop_zip.size
    assert "nothing is sent" in told[-1]


def send(box: Any, file: LocalZip, content: bytes, offset: int = 0) -> dict[str, Any]:
    answer: dict[str, Any] = box.ask(
        "receive_upload", sha256=file.sha256, size=file.size, offset=offset, stream=[content]
    )
    return answer


def test_wrong_bytes_are_refused_and_do_not_stay(tmp_path, laptop_zip, monkeypatch):
    content = laptop_zip.path.read_bytes()
    with agent_box(tmp_path, sys.executable, monkeypatch) as box:
        state = {"sha256": laptop_zip.sha256}
        assert send(box, laptop_zip, content[:1000]) == {"bytes": 1000}
        assert box.ask("upload_state", **state) == {"is_there": False, "bytes": 1000}
        with pytest.raises(ProjectError, match="dialog_zip_unreadable"):
            send(box, laptop_zip, b"\0" + content[1:])
        assert box.ask("upload_state", **state) == {"is_there": False, "bytes": 0}
        with pytest.raises(ProjectError, match="input_invalid name=offset"):
            send(box, laptop_zip, content[9:], offset=9)
        assert send(box, laptop_zip, content + b"more") == {"bytes": laptop_zip.size}
        assert box.ask("upload_state", **state)["is_there"]


@pytest.mark.parametrize("sha256", ["", "../../etc/passwd", "a" * 63, "A" * 64, "a" * 64 + "\n", None, 7])
def test_an_upload_has_a_digest_for_a_name_and_no_other(tmp_path, monkeypatch, sha256):
    with agent_box(tmp_path, sys.executable, monkeypatch) as box:
        with pytest.raises(ProjectError, match="input_invalid"):
            box.ask("receive_upload", sha256=sha256, size=1, offset=0, stream=[b"x"])
        assert not Path(box.data.data).exists()


# --- whole actions


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with running_machine(tmp_path_factory.mktemp("machine")) as running:
        yield running


@needs_sshd
def test_an_expired_link_is_said_before_anything_is_sent(machine):
    done = machine.zy("setup-only", "--dialog-zip", "", ZY_BINGSHUO_DIALOG_URL="https://b.example/d.zip?Expires=1000")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "error: the link has expired")
    assert not Path(machine.data.data).exists()


@needs_sshd
def test_a_file_of_the_laptop_is_sent_once_and_becomes_samples(machine):
    dry = machine.zy("setup-only", "--dialog-zip", "file:dialogs.zip", "--dry-run")
    assert (dry.returncode, "send the dialog ZIP from this machine" in dry.stdout) == (0, True), dry.stderr
    assert not Path(machine.data.data).exists()
    done = machine.zy("setup-only", "--dialog-zip", "file:dialogs.zip", "--json")
    assert done.returncode == 0, done.stderr
    assert counts_by_class(json.loads(done.stdout)) == {"soul": 20, "relation": 6}
    assert "[fetch] the dialog ZIP has arrived" in done.stderr
    assert list(Path(machine.data.download).parent.iterdir()) == []
    again = machine.zy("setup-only", "--dialog-zip", "./dialogs.zip", "--json")
    assert again.returncode == 0, again.stderr
    assert "nothing is sent" in again.stderr


@needs_sshd
def test_a_link_that_expired_goes_on_with_the_archive_that_it_brought(machine, tmp_path):
    with running_storage(machine.dialog_zip, key=KEY) as storage:
        link = {"ZY_BINGSHUO_DIALOG_URL": storage.presigned_url(), "ZY_FETCH_ALLOW": "127.0.0.1"}
        first = machine.zy("setup-only", "--dialog-zip", "", **link)
        assert first.returncode == 0, first.stderr
    host = storage.endpoint.rpartition("/")[2]
    old = storage.presigned_url().partition("?")[0] + "?Expires=1000"
    with refusing(int(host.rpartition(":")[2])):
        link["ZY_BINGSHUO_DIALOG_URL"] = old
        later = machine.zy("setup-only", "--dialog-zip", "", **link)
        assert later.returncode == 0, later.stderr
        assert "the link has expired; the archive of an earlier fetch is used" in later.stdout
        fresh = machine.zy("setup-only", "--dialog-zip", "", "--fresh-zip", **link)
        assert (fresh.returncode, "the link has expired" in fresh.stderr) == (2, True)
        assert "ZY_EVENT" not in fresh.stdout  # no setup was started for it


@contextmanager
def refusing(port: int) -> Iterator[None]:
    """A storage that says of every link that it has expired."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
