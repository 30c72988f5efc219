"""What killed requests and setups leave on a box, and what two at once do to each other: the real agent."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from controller.boxside.facts import is_release_present
from controller.boxside.fetch import fetch_dialogs
from corpus_builder.errors import ProjectError
from tests.agent_box import AgentBox, agent_box
from trainer.run_paths import DataPaths

pytestmark = pytest.mark.e2e


@pytest.fixture
def box(tmp_path, monkeypatch) -> Iterator[AgentBox]:
    with agent_box(tmp_path, sys.executable, monkeypatch) as made:
        yield made


def test_of_two_that_bring_the_same_release_the_later_one_leaves_what_the_first_put_there(box):
    """A setup may run from it already; it is not taken away under its feet, not even for a moment."""
    release = box.release()
    is_free = threading.Event()

    def slowly() -> Iterator[bytes]:
        first, *rest = list(release.stream())
        yield first[:100]
        assert is_free.wait(60)
        yield first[100:]
        yield from rest

    with ThreadPoolExecutor() as pool:
        later = pool.submit(
            box.ask, "receive_release", digest=release.digest, files=release.files(), stream=slowly()
        )  # fmt: skip
        try:
            box.push()
            used = os.open(box.root.release(release.digest), os.O_RDONLY)
        finally:
            is_free.set()
        assert later.result()["digest"] == release.digest
    try:
        assert os.path.samestat(os.fstat(used), os.stat(box.root.release(release.digest)))
    finally:
        os.close(used)
    assert sorted(os.listdir(box.root.releases)) == sorted(["current", release.digest])


def test_a_torn_release_gives_way_to_a_whole_one(box):
    digest = box.push()
    Path(box.root.release(digest), "release.json").unlink()
    Path(box.root.release(digest), "code/trainer/locks.py").write_text("torn")
    assert not is_release_present(box.root.root, digest)
    box.push()
    assert is_release_present(box.root.root, digest)
    assert Path(box.root.release(digest), "code/trainer/locks.py").read_text() != "torn"
    assert sorted(os.listdir(box.root.releases)) == sorted(["current", digest])


def test_what_a_killed_request_unpacked_goes_and_what_a_living_one_unpacks_stays(box):
    gone = subprocess.Popen(["true"])
    gone.wait()
    releases = Path(box.root.releases)
    releases.mkdir(parents=True, mode=0o700)
    Path(box.root.root).chmod(0o700)
    for pid in (gone.pid, os.getpid()):
        (releases / f".{'a' * 16}.partial.{pid}").mkdir()
    digest = box.push()
    assert set(os.listdir(releases)) == {"current", digest, f".{'a' * 16}.partial.{os.getpid()}"}


def test_a_disk_that_takes_the_archive_and_no_pointer_to_it_is_named_and_with_room_it_goes_on(tmp_path):
    """Out of inodes, after the folder of the archive, its file and its account."""
    paths = DataPaths(str(tmp_path / "data"))
    raw = Path(paths.archives).parent
    raw.mkdir(parents=True)
    Path(paths.data).chmod(0o700)
    words = ["mount", "-t", "tmpfs", "-o", "mode=0700,nr_inodes=5", "tmpfs", str(raw)]
    if shutil.which("mount") is None or subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("no disk of the test's own: mounting a tmpfs takes root and `mount`")
    try:
        with redirect_stdout(io.StringIO()) as said, pytest.raises(ProjectError) as caught:
            fetch_path(paths, zip_at(tmp_path / "d.zip"))
        assert "1 file(s) kept" in said.getvalue()
        assert (caught.value.code, caught.value.values["path"]) == ("box_disk_full", paths.archives)
        subprocess.run(["mount", "-o", "remount,nr_inodes=50", str(raw)], check=True)
        with redirect_stdout(io.StringIO()):
            fetch_path(paths, tmp_path / "d.zip")
        assert Path(paths.dialog_pointer, "one.md").read_text() == "User: hello\n"
    finally:
        subprocess.run(["umount", "-l", str(raw)], check=True)


def zip_at(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("one.md", "User: hello\n")
    return path


def fetch_path(paths: DataPaths, zip_path: Path) -> None:
    dialog = {"kind": "path", "path": str(zip_path), "sha256": None, "fresh": False}
    fetch_dialogs({"data": paths.data, "allow": [], "limits": None, "dialog": dialog}, {})


def test_what_a_killed_setup_extracted_goes_and_an_archive_it_had_moved_aside_comes_back(tmp_path):
    paths = DataPaths(str(tmp_path / "data"))
    half, aside, both = (Path(paths.archive(letter * 64)) for letter in "abc")
    for folder in (f"{half}.partial", f"{aside}.old", f"{both}.old", both):
        Path(folder).mkdir(parents=True)
        Path(folder, "text.md").write_text(Path(folder).name)
    Path(paths.data).chmod(0o700)
    Path(paths.archives).chmod(0o700)
    with redirect_stdout(io.StringIO()):
        fetch_path(paths, zip_at(tmp_path / "d.zip"))
    fetched = os.path.basename(os.readlink(paths.dialog_pointer))
    assert set(os.listdir(paths.archives)) == {fetched, aside.name, both.name}
    assert (aside / "text.md").read_text() == f"{aside.name}.old"
    assert (both / "text.md").read_text() == both.name
