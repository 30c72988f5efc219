"""The learning rate has one owner, and what the recipe says reaches the Trainer."""

import json
import os
from pathlib import Path

import pytest

from corpus_builder.errors import ProjectError
from trainer.arguments import (
    PRESETS_DIR,
    TRACKERS,
    Schedule,
    check_trackers,
    learning_rate_at,
    load_deepspeed,
    training_arguments,
)
from trainer.device import Device, Place, Precision
from trainer.recipe import Recipe

pytestmark = pytest.mark.filterwarnings("default")  # transformers' own
ALONE = Place(rank=0, local_rank=0, ranks=1, is_launched=False)
CPU = Device("cpu", "cpu")


def make_recipe(**keys) -> Recipe:
    return Recipe.model_validate({"name": "t", "version": "t", "plan": "t", "base_model_dir": "/b"} | keys)


@pytest.mark.parametrize("path", sorted(PRESETS_DIR.glob("*.json")), ids=lambda path: path.stem)
def test_presets_leave_the_schedule_and_the_precision_to_the_recipe(path):
    preset = load_deepspeed(path.stem)
    assert "scheduler" not in preset
    assert preset["fp16"]["enabled"] == preset["bf16"]["enabled"] == "auto"


@pytest.mark.parametrize(
    ("name", "stage", "optimizer", "parameters"),
    [
        ("zero2_offload", 2, "cpu", None),
        ("zero3", 3, None, None),
        ("zero3_offload", 3, "cpu", None),
        ("zero3_offload_params", 3, "cpu", "cpu"),
    ],
)
def test_a_preset_is_what_its_name_says(name, stage, optimizer, parameters):
    zero = load_deepspeed(name)["zero_optimization"]
    held = [zero.get(key, {}).get("device") for key in ("offload_optimizer", "offload_param")]
    assert (zero["stage"], *held) == (stage, optimizer, parameters)


def test_every_preset_is_listed():
    names = {"zero2_offload", "zero3", "zero3_offload", "zero3_offload_params"}
    assert {path.stem for path in PRESETS_DIR.glob("*.json")} == names


@pytest.mark.parametrize("name", ["zero3", "zero3_offload", "zero3_offload_params"])
def test_zero3_gathers_the_weights_that_it_saves(name):
    """Else the result would be one rank's shards under the name of a model."""
    assert load_deepspeed(name)["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True


def test_a_scheduler_of_deepspeeds_own_is_refused(tmp_path):
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"scheduler": {"type": "WarmupDecayLR"}}))
    with pytest.raises(ProjectError, match="config_invalid"):
        load_deepspeed(str(path))


def test_an_unknown_preset():
    with pytest.raises(ProjectError, match="config_unreadable"):
        load_deepspeed("no_such_preset")


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant_with_warmup"])
def test_the_promised_rate_is_transformers_schedule(kind):
    import torch
    from transformers import get_scheduler

    recipe = make_recipe(lr_scheduler_type=kind, warmup_ratio=0.1, num_train_epochs=2)
    schedule = Schedule(recipe, rows=100, tokens=100 * 4096, ranks=4)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=recipe.learning_rate)
    theirs = get_scheduler(kind, optimizer, num_warmup_steps=schedule.warmup_steps, num_training_steps=schedule.steps)
    for step in range(1, schedule.steps + 1):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(learning_rate_at(step, recipe, schedule), abs=1e-12)
        optimizer.step()
        theirs.step()


def test_the_schedule_of_the_seeds_size():
    schedule = Schedule(make_recipe(), rows=471, tokens=431_000, ranks=4)
    assert (schedule.accumulation, schedule.steps, schedule.warmup_steps) == (4, 150, 5)


def arguments_of(recipe: Recipe, folder: Path):
    schedule = Schedule(recipe, rows=100, tokens=100 * 300, ranks=1)
    got = training_arguments(
        recipe, schedule, output_dir=folder, device=CPU, precision=Precision("fp32", "cpu"), place=ALONE
    )
    return got, schedule


def test_arguments_say_what_the_recipe_says(tmp_path):
    recipe = make_recipe(
        learning_rate=3e-4, num_train_epochs=7, per_device_train_batch_size=2, seed=5, weight_decay=0.1
    )
    got, schedule = arguments_of(recipe, tmp_path)
    assert (got.learning_rate, got.num_train_epochs, got.per_device_train_batch_size) == (3e-4, 7, 2)
    assert (got.seed, got.weight_decay, got.max_grad_norm) == (5, 0.1, 1.0)
    assert got.gradient_accumulation_steps == schedule.accumulation
    assert got.get_warmup_steps(schedule.steps) == schedule.warmup_steps
    assert got.lr_scheduler_type == "cosine"
    assert (got.fp16, got.bf16, got.use_cpu) == (False, False, True)
    assert got.logging_nan_inf_filter is False
    assert got.report_to == []
    assert got.gradient_checkpointing is True
    assert (got.save_only_model, got.use_liger_kernel, got.torch_compile) == (False, False, False)


def test_checkpoints_without_an_optimizer(tmp_path):
    got, _ = arguments_of(make_recipe(save_only_model=True), tmp_path)
    assert got.save_only_model is True


def test_ligers_kernels_leave_the_loss_to_us(tmp_path):
    """Its fused loss would replace the model's forward, and with it the loss in the head."""
    got, _ = arguments_of(make_recipe(use_liger_kernel=True), tmp_path)
    assert got.use_liger_kernel is True
    off = {name for name, is_on in got.liger_kernel_config.items() if not is_on}
    assert off == {"cross_entropy", "fused_linear_cross_entropy"}


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_a_tracker_that_is_not_installed(name):
    with pytest.raises(ProjectError, match="tracker_missing") as caught:
        check_trackers([name], has=lambda _: False)
    assert caught.value.values == {"name": name}
    check_trackers([name], has=TRACKERS[name][-1].__eq__)  # one of its packages will do


def test_no_tracker_needs_nothing():
    check_trackers([], has=lambda _: False)


def test_trackers_write_beside_the_checkpoints_under_the_runs_name(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "")
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR")
    got, _ = arguments_of(make_recipe(report_to=["tensorboard"], version="v1"), tmp_path / "20260101-000000-abcd")
    assert got.report_to == ["tensorboard"]
    assert got.run_name == "v1-20260101-000000-abcd"
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == str(tmp_path / "20260101-000000-abcd/tensorboard")
