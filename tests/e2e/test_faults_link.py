"""Connections that are cut: of the release, of the ZIP, of the download, of a request. Whole actions, a real sshd.

Every cut is followed by the same action over a sound network: it must find nothing half done that counts as whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import yaml

from controller.box import SshBox
from controller.boxside.facts import is_release_present
from controller.inputs import check_inputs
from controller.job import Job
from controller.objects import resolve_dialog
from controller.release import CODE_ROOT, agent_bundle, gather
from controller.send_dialogs import MAX_TRIES, send_dialogs
from controller.settings import Settings
from corpus_builder.config import validate
from corpus_builder.errors import ProjectError
from corpus_builder.plan import Plan
from tests.e2e.machine import Machine, counts_by_class, running_machine, until, write_dialogs
from tests.fetching import KEY
from tests.servers import find_sshd, running_storage
from tests.tcp_proxy import TcpProxy

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_sshd() is None, reason="needs openssh-server"),
]
COUNTS = {"soul": 20, "relation": 6}
FILLER_BYTES = 9_000_000  # more than one block of a download, and than what a proxy holds in flight


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with running_machine(tmp_path_factory.mktemp("machine")) as running:
        yield running.at("", recipe="alone.yaml")


@pytest.fixture(scope="module")
def large_zip(machine: Machine) -> Path:
    """The machine's dialogs, in a ZIP of many megabytes."""
    path = machine.folder / "large.zip"
    write_dialogs(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("filler.bin", random.Random(1).randbytes(FILLER_BYTES))
    return path


def assert_cut(done: CompletedProcess[str]) -> None:
    """The link is at fault, and that is what is said: exit 3, three lines, no traceback."""
    assert done.returncode == 3, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert lines[0].startswith("error: "), done.stderr
    assert re.search("connection|answer", lines[0]), done.stderr
    assert "next:" in done.stderr
    assert "Traceback" not in done.stderr


def dialogs(machine: Machine) -> str:
    """Return the sha256 of the archive that the pointer leads to."""
    return Path(os.readlink(machine.data.dialog_pointer)).name


def releases(machine: Machine) -> list[str]:
    folder = Path(machine.root.releases)
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_a_release_that_is_cut_is_none_and_comes_whole_the_next_time(machine):
    plan = validate(Plan, yaml.safe_load((machine.repository / "plan.yaml").read_text("utf-8")), where="plan")
    size, agent = sum(map(len, gather(CODE_ROOT, machine.repository, plan).stream())), len(agent_bundle())
    with TcpProxy(machine.sshd.port) as proxy:
        for share in (-0.01, 0.4, 0.95):  # within the second request, in the middle of its stream, towards the end
            proxy.drop_after(None, went_forth=2 * agent + int(share * size))
            assert_cut(machine.behind(proxy.port).zy("setup-only"))
            assert proxy.reached.is_set()
            proxy.reached.clear()
            until(lambda: releases(machine) == [], "what had come of the release is gone")
    assert machine.status()["setup"] is None
    done = machine.zy("setup-only", "--json")
    assert done.returncode == 0, done.stderr
    assert counts_by_class(json.loads(done.stdout)) == COUNTS
    [digest] = [name for name in releases(machine) if name != "current"]
    assert is_release_present(machine.root.root, digest)


def test_a_request_that_is_cut_anywhere_begins_one_setup_or_none(machine):
    """Where it was heard and only the answer is lost, the same request again joins what it began."""
    wish = ("setup-only", "--set", "max_seq_len=200")
    agent, before = len(agent_bundle()), len(started(machine))
    with TcpProxy(machine.sshd.port) as proxy:
        far = machine.behind(proxy.port)
        for limit in (agent // 2, agent + 6_000 + agent // 2):  # within the question for facts; within `start_setup`
            proxy.drop_after(None, went_forth=limit)
            assert_cut(far.zy(*wish))
        assert len(started(machine)) == before
        proxy.heal()
        with far.started(*wish) as child:
            until(lambda: len(setups(machine)) > before, "the setup's folder")
            proxy.fall_silent()
            until((setups(machine)[-1] / "supervisor.json").exists, "the setup began")
            proxy.drop_all()
            said, _ = child.communicate(timeout=60)
        assert child.returncode == 3, said
    done = machine.zy(*wish, "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["is_attached"]) == (0, True), done.stderr
    assert len(started(machine)) == len(setups(machine)) == before + 1
    assert machine.status()["locks"] == {"setup": None, "run": None}


def test_an_answer_that_is_cut_is_no_answer(machine):
    with TcpProxy(machine.sshd.port) as proxy:
        assert machine.behind(proxy.port).zy("status").returncode == 0
        proxy.drop_after(proxy.carried["back"] - 400)
        assert_cut(machine.behind(proxy.port).zy("status"))


def started(machine: Machine) -> list[str]:
    return [row["name"] for row in machine.audit() if row["change"] == "start_setup"]


def setups(machine: Machine) -> list[Path]:
    return sorted(Path(machine.data.setups).iterdir())


def test_a_zip_from_the_laptop_goes_on_where_each_cut_was_and_is_whole_in_the_end(machine, large_zip):
    with TcpProxy(machine.sshd.port) as proxy:
        proxy.drop_after(None, went_forth=4_000_000)
        done = machine.behind(proxy.port).zy("setup-only", "--dialog-zip", f"file:{large_zip}", "--json")
        assert proxy.accepted >= 3
    assert done.returncode == 0, done.stderr
    left = [int(found) for found in re.findall(r"sending the dialog ZIP: (\d+) of", done.stderr)]
    assert len(left) >= 3
    assert left == sorted(set(left), reverse=True)
    assert counts_by_class(json.loads(done.stdout)) == COUNTS
    assert dialogs(machine) == hashlib.sha256(large_zip.read_bytes()).hexdigest()


def test_an_upload_that_is_always_cut_is_given_up_as_a_lost_connection(machine, tmp_path):
    file = tmp_path / "mine.zip"
    write_dialogs(file)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("filler.bin", random.Random(2).randbytes(2_000_000))
    source = resolve_dialog(f"file:{file}", Settings.from_environment({})).file
    assert source is not None
    waited: list[float] = []
    with TcpProxy(machine.sshd.port) as proxy:
        here = machine.behind(proxy.port)
        settings = Settings.from_environment(here.settings())
        job = Job(
            settings=settings, inputs=check_inputs({"action": "setup-only"}), environ={}, owner="alice",
            echo=lambda line: None, sleep=waited.append,
        )  # fmt: skip
        proxy.drop_after(None, went_forth=2 * len(agent_bundle()))  # and nothing of the ZIP
        with SshBox(settings.ssh()) as box, pytest.raises(ProjectError) as caught:
            send_dialogs(box, job, source)
    assert caught.value.exit_code == 3
    assert len(waited) == MAX_TRIES - 1
    assert not Path(machine.data.upload(source.sha256)).exists()


def test_the_download_and_the_watching_are_cut_and_neither_is_lost(machine, large_zip):
    here = machine.at("download")
    with (
        running_storage(large_zip, key=KEY) as storage,
        TcpProxy(int(storage.endpoint.rpartition(":")[2])) as bucket,
        TcpProxy(machine.sshd.port) as proxy,
    ):
        url = storage.presigned_url().replace(storage.endpoint, f"http://127.0.0.1:{bucket.port}")
        link = {"ZY_BINGSHUO_DIALOG_URL": url, "ZY_FETCH_ALLOW": "127.0.0.1"}
        bucket.drop_after(2_500_000)
        with here.behind(proxy.port).started("setup-only", "--dialog-zip", "", "--json", **link) as child:
            assert bucket.reached.wait(60), "nothing was downloaded"
            proxy.drop_all()
            out, _ = child.communicate(timeout=120)
    assert child.returncode == 0, out
    assert "cut after" in out
    assert proxy.accepted >= 2, "the watching was not cut"
    assert len(started(here)) == 1
    assert dialogs(here) == hashlib.sha256(large_zip.read_bytes()).hexdigest()
    assert [path.name for path in Path(here.data.download).parent.iterdir()] == []
