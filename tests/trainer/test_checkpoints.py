"""Checkpoints: complete by their last file, proven before use, the newest by number, a limit of this run only.

The files are real: weights by safetensors, shards by torch, in the layout that DeepSpeed and one process write.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from corpus_builder.errors import ProjectError
from trainer import checkpoints
from trainer.checkpoints import (
    Mark,
    best_checkpoint,
    check_room_for_result,
    complete_checkpoints,
    delete_old,
    delete_unusable,
    disk_short,
    estimated_bytes,
    find_fault,
    find_resume_point,
    folder_bytes,
    has_room,
    mark_complete,
    needed_bytes,
    read_mark,
)
from trainer.device import Place
from trainer.run_paths import CHECKPOINT_COMPLETE

TWO_RANKS, ONE_RANK, ALONE = Place(0, 0, 2, True), Place(0, 0, 1, True), Place(0, 0, 1, False)


def make(run_dir: Path, step: int, *, is_complete: bool = True, **mark) -> Path:
    """Write a checkpoint of two DeepSpeed ranks."""
    path = run_dir / f"checkpoint-{step}"
    shards = path / f"global_step{step}"
    shards.mkdir(parents=True)
    for rank in range(2):
        torch.save({"moments": torch.ones(64)}, shards / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        torch.save({}, shards / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        torch.save({}, path / f"rng_state_{rank}.pth")
    save_file({"a": torch.ones(8, 8), "scalar": torch.tensor(1.0)}, path / "model.safetensors")
    (path / "latest").write_text(f"global_step{step}")
    state = {"global_step": step, "log_history": [{"loss": math.nan, "grad_norm": math.inf}]}
    (path / "trainer_state.json").write_text(json.dumps(state))
    if is_complete:
        mark_complete(path, Mark(**({"step": step, "ranks": 2} | mark)))
    return path


def make_plain(run_dir: Path, step: int) -> Path:
    """Write a checkpoint of one plain process."""
    path = run_dir / f"checkpoint-{step}"
    path.mkdir(parents=True)
    torch.save({"moments": torch.ones(64)}, path / "optimizer.pt")
    save_file({"a": torch.ones(8, 8)}, path / "model.safetensors")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    mark_complete(path, Mark(step=step, ranks=1, is_launched=False))
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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
    assert find_resume_point(tmp_path, None, TWO_RANKS).path == tmp_path / "checkpoint-1000"


def test_the_mark_names_every_file_with_its_size(tmp_path):
    path = make(tmp_path, 7, eval_loss=1.25, best_loss=1.0, best_step=5, stale_looks=1)
    mark = read_mark(path)
    assert (mark.step, mark.ranks, mark.eval_loss, mark.best_step) == (7, 2, 1.25, 5)
    assert len(mark.files) == 9
    assert mark.files["global_step7/zero_pp_rank_1_mp_rank_00_optim_states.pt"] > 256
    assert all((path / name).stat().st_size == size for name, size in mark.files.items())


def test_a_mark_of_an_earlier_version_is_enough(tmp_path):
    path = make(tmp_path, 7)
    (path / CHECKPOINT_COMPLETE).write_text('{"step": 7, "ranks": 2}')
    assert find_resume_point(tmp_path, None, TWO_RANKS).path == path


def test_a_mark_of_a_later_version_is_read_as_far_as_it_is_known(tmp_path):
    path = make(tmp_path, 7)
    packed = json.loads((path / CHECKPOINT_COMPLETE).read_text())
    (path / CHECKPOINT_COMPLETE).write_text(json.dumps(packed | {"of_tomorrow": 1}))
    assert find_fault(path) is None


def test_a_folder_without_its_mark_is_no_checkpoint(tmp_path):
    make(tmp_path, 100)
    make(tmp_path, 200, is_complete=False)
    found = find_resume_point(tmp_path, None, TWO_RANKS)
    assert (found.path, found.skipped, found.step) == (tmp_path / "checkpoint-100", (), 100)


def test_a_new_run_starts_anew(tmp_path):
    found = find_resume_point(tmp_path / "none", None, TWO_RANKS)
    assert (found.path, found.step) == (None, 0)


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size * 2 // 3)


def forget_sizes(path: Path) -> None:
    """Leave the looks into files alone to find the fault, as of a checkpoint of an earlier version."""
    (path / CHECKPOINT_COMPLETE).write_text('{"step": 200, "ranks": 2}')


def without_tensor_data(path: Path) -> None:
    save_file({"a": torch.ones(8, 8), "head": torch.empty(0)}, path / "model.safetensors")


SHARD = "global_step200/zero_pp_rank_1_mp_rank_00_optim_states.pt"
#: Corruption -> what is done to a sound checkpoint-200, and the fault that is named, with sizes and without.
CORRUPTIONS = {
    "a shard is gone": (lambda path: (path / SHARD).unlink(), "file_missing", "shard_missing"),
    "a shard is truncated": (lambda path: truncate(path / SHARD), "wrong_size", "shard_truncated"),
    "a shard is empty": (lambda path: (path / SHARD).write_bytes(b""), "wrong_size", "shard_truncated"),
    "latest is gone": (lambda path: (path / "latest").unlink(), "file_missing", "latest_names_nothing"),
    "latest names a missing folder": (
        lambda path: (path / "latest").write_text("global_step300"),
        "latest_names_nothing",
        "latest_names_nothing",
    ),
    "latest names the folder itself": (
        lambda path: (path / "latest").write_text(""),
        "wrong_size",
        "latest_names_nothing",
    ),
    "the state is gone": (
        lambda path: (path / "trainer_state.json").unlink(),
        "file_missing",
        "trainer_state_unreadable",
    ),
    "the state is cut": (lambda path: truncate(path / "trainer_state.json"), "wrong_size", "trainer_state_unreadable"),
    "the state is of another step": (
        lambda path: (path / "trainer_state.json").write_text('{"global_step": 100}'),
        "wrong_size",
        "trainer_state_unreadable",
    ),
    "the weights are cut": (lambda path: truncate(path / "model.safetensors"), "wrong_size", "weights_truncated"),
    "the weights are zeros": (
        lambda path: (path / "model.safetensors").write_bytes(bytes(400)),
        "wrong_size",
        "weights_unreadable",
    ),
    "a tensor is empty": (without_tensor_data, "wrong_size", "empty_tensor"),
    "a random state is cut": (lambda path: truncate(path / "rng_state_0.pth"), "wrong_size", "shard_truncated"),
    "the mark is cut": (lambda path: truncate(path / CHECKPOINT_COMPLETE), "mark_unreadable", None),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corrupt_newest_gives_way_to_the_one_before(tmp_path, name):
    corrupt, fault, _ = CORRUPTIONS[name]
    make(tmp_path, 100)
    newest = make(tmp_path, 200)
    assert find_fault(newest) is None
    corrupt(newest)
    found = find_resume_point(tmp_path, None, TWO_RANKS)
    assert found.path == tmp_path / "checkpoint-100"
    assert [(path.name, fault.kind) for path, fault in found.skipped] == [("checkpoint-200", fault)]


@pytest.mark.parametrize("name", [name for name, (_, _, by_content) in CORRUPTIONS.items() if by_content])
def test_the_fault_is_found_in_the_files_themselves_too(tmp_path, name):
    corrupt, _, fault = CORRUPTIONS[name]
    newest = make(tmp_path, 200)
    forget_sizes(newest)
    assert find_fault(newest) is None
    corrupt(newest)
    found = find_fault(newest)
    assert found is not None
    assert found.kind == fault


def test_a_tensor_that_was_empty_when_it_was_saved_is_found_although_its_size_is_right(tmp_path):
    path = make(tmp_path, 200, is_complete=False)
    without_tensor_data(path)
    mark_complete(path, Mark(step=200, ranks=2))
    assert str(find_fault(path)) == "empty_tensor model.safetensors"


def test_a_shard_whose_middle_was_lost_is_found(tmp_path):
    """A torn copy: the ZIP's directory is there, and points behind itself."""
    path = make(tmp_path, 200)
    data = (path / SHARD).read_bytes()
    (path / SHARD).write_bytes(data[:64] + data[600:])
    forget_sizes(path)
    assert str(find_fault(path)) == f"shard_truncated {SHARD}"


def test_every_checkpoint_corrupt_is_refused_with_the_newest_fault(tmp_path):
    for step in (100, 200):
        (make(tmp_path, step) / "latest").unlink()
    with pytest.raises(ProjectError) as caught:
        find_resume_point(tmp_path, None, TWO_RANKS)
    assert caught.value.code == "checkpoint_corrupt"
    assert caught.value.values == {"fault": "file_missing latest", "path": str(tmp_path / "checkpoint-200")}


def test_a_named_checkpoint_that_is_corrupt_is_refused_and_no_other_is_taken(tmp_path):
    make(tmp_path, 100)
    newest = make(tmp_path, 200)
    (newest / "latest").unlink()
    with pytest.raises(ProjectError, match="checkpoint_corrupt"):
        find_resume_point(tmp_path / "own", str(newest), TWO_RANKS)
    assert find_resume_point(tmp_path / "own", str(tmp_path), TWO_RANKS).path == tmp_path / "checkpoint-100"


def test_a_checkpoint_may_have_been_moved_by_a_person(tmp_path):
    make(tmp_path, 100).rename(tmp_path / "the-good-one")
    assert find_resume_point(tmp_path / "own", str(tmp_path / "the-good-one"), TWO_RANKS).path is not None


def test_own_checkpoints_win_over_another_runs(tmp_path):
    make(tmp_path / "other", 500)
    other = str(tmp_path / "other")
    assert find_resume_point(tmp_path / "own", other, TWO_RANKS).path == tmp_path / "other/checkpoint-500"
    make(tmp_path / "own", 20)
    assert find_resume_point(tmp_path / "own", other, TWO_RANKS).path == tmp_path / "own/checkpoint-20"


def test_a_checkpoint_can_be_named_itself(tmp_path):
    make(tmp_path, 500)
    older = make(tmp_path, 400)
    assert find_resume_point(tmp_path / "own", str(older), TWO_RANKS).path == older


def test_nothing_to_go_on_from_is_refused(tmp_path):
    make(tmp_path / "other", 5, is_complete=False)
    with pytest.raises(ProjectError, match="checkpoint_missing"):
        find_resume_point(tmp_path / "own", str(tmp_path / "other"), TWO_RANKS)


def test_another_number_of_ranks_is_refused_with_both_numbers(tmp_path):
    path = make(tmp_path, 5)
    with pytest.raises(ProjectError) as caught:
        find_resume_point(tmp_path, None, ONE_RANK)
    assert caught.value.code == "ranks_changed"
    assert caught.value.values == {"had": 2, "now": 1, "path": str(path)}


def test_one_plain_process_goes_on_from_its_own_and_not_from_deepspeeds(tmp_path):
    make_plain(tmp_path, 5)
    assert find_resume_point(tmp_path, None, ALONE).step == 5
    with pytest.raises(ProjectError) as caught:
        find_resume_point(tmp_path, None, ONE_RANK)
    assert (caught.value.values["had"], caught.value.values["now"]) == ("1 (plain)", "1 (DeepSpeed)")


def test_a_checkpoint_without_its_optimizer_is_refused(tmp_path):
    path = make(tmp_path, 5, is_complete=False)
    shutil.rmtree(path / "global_step5")
    (path / "latest").unlink()
    mark_complete(path, Mark(step=5, ranks=2, is_model_only=True))
    with pytest.raises(ProjectError, match="checkpoint_model_only"):
        find_resume_point(tmp_path, None, TWO_RANKS)


def test_retention_keeps_the_newest(tmp_path):
    for step in (5, 10, 100):
        make(tmp_path, step)
    half = make(tmp_path, 200, is_complete=False)
    (tmp_path / "notes").mkdir()
    assert delete_old(tmp_path, keep=2) == ["checkpoint-5"]
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-100", half.name, "notes"]


def test_retention_keeps_the_best_beside_the_newest(tmp_path):
    for step, loss in ((5, 2.0), (10, 1.0), (15, 1.5), (20, 1.7), (25, None)):
        make(tmp_path, step, eval_loss=loss)
    assert best_checkpoint(tmp_path) == (tmp_path / "checkpoint-10", 1.0)
    assert delete_old(tmp_path, keep=2) == ["checkpoint-5", "checkpoint-15"]
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-20", "checkpoint-25"]


def test_nobody_looked_so_none_is_the_best(tmp_path):
    make(tmp_path, 5)
    assert best_checkpoint(tmp_path) is None


def test_retention_never_deletes_the_last_one(tmp_path):
    make(tmp_path, 5)
    assert delete_old(tmp_path, keep=1) == []
    assert delete_old(tmp_path / "none", keep=1) == []


def test_retention_touches_no_other_run(tmp_path):
    for step in (5, 10, 15):
        make(tmp_path / "other", step)
        make(tmp_path / "own", step)
    delete_old(tmp_path / "own", keep=1)
    delete_unusable(tmp_path / "own", 0)
    assert names(tmp_path / "own") == []
    assert len(names(tmp_path / "other")) == 3


def test_what_an_interrupted_save_left_goes(tmp_path):
    make(tmp_path, 5)
    make(tmp_path, 6, is_complete=False)
    assert delete_unusable(tmp_path, 5) == ["checkpoint-6"]
    assert names(tmp_path) == ["checkpoint-5"]


def test_what_lies_beyond_the_resume_point_goes_because_it_is_written_again(tmp_path):
    """Else a save that is killed would leave a mixture of two under an old mark."""
    for step in (5, 10, 15):
        make(tmp_path, step)
    assert delete_unusable(tmp_path, 5) == ["checkpoint-10", "checkpoint-15"]


def test_room_is_measured_by_the_newest_checkpoint(tmp_path):
    assert needed_bytes(tmp_path, 123) == 123 + checkpoints.SPARE_BYTES
    make(tmp_path, 5)
    newest = make(tmp_path, 10)
    (newest / "more").write_bytes(bytes(5000))
    assert needed_bytes(tmp_path, 123) == folder_bytes(newest) + checkpoints.SPARE_BYTES


def test_a_disk_that_is_short_gives_up_old_checkpoints_first_and_then_says_numbers(tmp_path):
    for step in (5, 10, 15):
        make(tmp_path, step)
    assert has_room(tmp_path, 1, keep=3)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-15", "checkpoint-5"]
    assert not has_room(tmp_path, 1 << 60, keep=3)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-15"]
    assert not has_room(tmp_path, 1 << 60, keep=1)
    assert names(tmp_path) == ["checkpoint-15"]
    error = disk_short(tmp_path, 1 << 60)
    assert (error.code, error.values["needed_gib"], error.values["path"]) == ("disk_short", 1 << 30, str(tmp_path))
    assert 0 < error.values["free_gib"] < 1 << 30


def test_a_result_that_does_not_fit_gives_up_all_checkpoints_but_the_newest_and_the_best_first(tmp_path):
    class Huge:
        requires_grad, ds_numel = True, 1 << 58

        def element_size(self) -> int:
            return 2

    class Model:
        def parameters(self) -> list[Huge]:
            return [Huge()]

    for step, loss in ((5, 2.0), (10, 1.0), (15, 1.5), (20, 1.7)):
        make(tmp_path, step, eval_loss=loss)
    check_room_for_result(tmp_path, torch.nn.Linear(4, 4), only_trained=False)
    assert len(names(tmp_path)) == 4
    with pytest.raises(ProjectError, match="disk_short") as caught:
        check_room_for_result(tmp_path, Model(), only_trained=False)
    assert caught.value.values["needed_gib"] == (1 << 29) + round(checkpoints.SPARE_BYTES / checkpoints.GIB, 2)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-20"]


def test_the_first_checkpoint_is_estimated_from_the_parameters():
    model = torch.nn.Linear(100, 10, bias=False)
    assert estimated_bytes(model, is_launched=False, is_model_only=False) == 1000 * (4 + 8)
    assert estimated_bytes(model, is_launched=True, is_model_only=False) == 1000 * (4 + 12)
    assert estimated_bytes(model.half(), is_launched=True, is_model_only=True) == 1000 * 2
    adapters = torch.nn.Sequential(torch.nn.Linear(100, 10, bias=False), torch.nn.Linear(5, 2, bias=False))
    adapters[0].requires_grad_(False)
    adapters.peft_config = {}
    assert estimated_bytes(adapters, is_launched=False, is_model_only=False) == 10 * (4 + 8)
