"""Buffers of dead runs go; mapped ones, fresh ones and other files stay."""

import mmap
import os
import time

import pytest

from trainer.shared_buffers import NAME, YOUNG_S, drop_dead_buffers, drop_own_buffers


@pytest.fixture
def buffer(tmp_path):
    path = tmp_path / f"{NAME}0_127.0.0.1_29500_0"
    path.write_bytes(bytes(4096))
    os.utime(path, (time.time() - 2 * YOUNG_S,) * 2)
    return path


def test_what_a_dead_run_left_goes(buffer, tmp_path):
    (tmp_path / "other").touch()
    assert drop_dead_buffers(tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_mapped_buffer_stays(buffer, tmp_path):
    with buffer.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert drop_dead_buffers(tmp_path) == 0
    assert drop_dead_buffers(tmp_path) == 1


def test_what_a_dead_run_left_before_the_clock_was_set_back_goes(buffer, tmp_path):
    os.utime(buffer, (time.time() + 3600,) * 2)
    assert drop_dead_buffers(tmp_path) == 1


def test_a_fresh_buffer_stays(buffer, tmp_path):
    os.utime(buffer)
    assert drop_dead_buffers(tmp_path) == 0


def test_a_run_takes_its_own_along(buffer, tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29501")
    assert drop_own_buffers(tmp_path) == 0
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert drop_own_buffers(tmp_path) == 1
