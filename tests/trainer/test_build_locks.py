"""A lock that a killed build left goes; one of a living build, or a fresh one, stays."""

import os
import subprocess
import sys
import time

import pytest

from trainer.build_locks import EXTENSIONS_DIR, LOCK, YOUNG_S, drop_stale_locks, extensions_dir


@pytest.fixture
def lock(tmp_path):
    path = tmp_path / "py311_cpu/cpu_adam" / LOCK
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def age(path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


@pytest.mark.parametrize("seconds", [2 * YOUNG_S, -3600], ids=["old", "of before the clock was set back"])
def test_what_a_killed_build_left_goes(lock, tmp_path, seconds):
    age(lock, seconds)
    assert drop_stale_locks(str(tmp_path)) == ["cpu_adam"]
    assert not lock.exists()
    assert lock.parent.is_dir()


def test_a_fresh_lock_stays(lock, tmp_path):
    assert drop_stale_locks(str(tmp_path)) == []
    assert lock.exists()


@pytest.mark.e2e
def test_the_lock_of_a_living_build_stays(lock, tmp_path):
    age(lock, 2 * YOUNG_S)
    builder = subprocess.Popen([sys.executable, "-c", "input()"], cwd=lock.parent, stdin=subprocess.PIPE)
    try:
        assert drop_stale_locks(str(tmp_path)) == []
    finally:
        builder.communicate(b"\n")
    assert drop_stale_locks(str(tmp_path)) == ["cpu_adam"]


def test_no_folder_no_locks(tmp_path):
    assert drop_stale_locks(str(tmp_path / "none")) == []


def test_each_environment_has_a_place_of_its_own_in_torchs(monkeypatch):
    monkeypatch.delenv(EXTENSIONS_DIR, raising=False)
    cpp_extension = pytest.importorskip("torch.utils.cpp_extension")
    one, same, other = (extensions_dir(f"/venvs/{name}") for name in ("a/bin/python", "a/bin/python3", "b/bin/python"))
    assert one == same != other
    assert os.path.dirname(one) == cpp_extension.get_default_build_root()
    monkeypatch.setenv(EXTENSIONS_DIR, "/elsewhere")
    assert extensions_dir("/venvs/a/bin/python") == "/elsewhere"
