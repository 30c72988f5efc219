"""Checkpoints: complete by their last file, the newest by number, a limit that touches this run only."""

from pathlib import Path

import pytest

from corpus_builder.errors import ProjectError
from trainer.checkpoints import complete_checkpoints, delete_incomplete, delete_old, find_resume_point, mark_complete


def make(run_dir: Path, step: int, *, is_complete: bool = True) -> Path:
    path = run_dir / f"checkpoint-{step}"
    (path / f"global_step{step}").mkdir(parents=True)
    if is_complete:
        mark_complete(path, step=step, ranks=2)
    return path


def test_order_is_by_number(tmp_path):
    for step in (1000, 200, 90):
        make(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "final").mkdir()
    assert [path.name for path in complete_checkpoints(tmp_path)] == [
        "checkpoint-90",
        "checkpoint-200",
        "checkpoint-1000",
    ]


def test_a_folder_without_its_mark_is_no_checkpoint(tmp_path):
    make(tmp_path, 100)
    make(tmp_path, 200, is_complete=False)
    assert find_resume_point(tmp_path, None) == tmp_path / "checkpoint-100"


def test_a_new_run_starts_anew(tmp_path):
    assert find_resume_point(tmp_path / "none", None) is None


def test_own_checkpoints_win_over_another_runs(tmp_path):
    make(tmp_path / "other", 500)
    assert find_resume_point(tmp_path / "own", str(tmp_path / "other")) == tmp_path / "other/checkpoint-500"
    make(tmp_path / "own", 20)
    assert find_resume_point(tmp_path / "own", str(tmp_path / "other")) == tmp_path / "own/checkpoint-20"


def test_a_checkpoint_can_be_named_itself(tmp_path):
    make(tmp_path, 500)
    older = make(tmp_path, 400)
    assert find_resume_point(tmp_path / "own", str(older)) == older


def test_nothing_to_go_on_from_is_refused(tmp_path):
    make(tmp_path / "other", 5, is_complete=False)
    with pytest.raises(ProjectError, match="checkpoint_missing"):
        find_resume_point(tmp_path / "own", str(tmp_path / "other"))


def test_retention_keeps_the_newest(tmp_path):
    for step in (5, 10, 100):
        make(tmp_path, step)
    half = make(tmp_path, 200, is_complete=False)
    (tmp_path / "notes").mkdir()
    assert delete_old(tmp_path, keep=2) == ["checkpoint-5"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-100", half.name, "notes"]


def test_retention_never_deletes_the_last_one(tmp_path):
    make(tmp_path, 5)
    assert delete_old(tmp_path, keep=1) == []
    assert delete_old(tmp_path / "none", keep=1) == []


def test_what_an_interrupted_save_left_goes(tmp_path):
    make(tmp_path, 5)
    make(tmp_path, 6, is_complete=False)
    assert delete_incomplete(tmp_path) == ["checkpoint-6"]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]
