"""The learning rate has one owner, and what the recipe says reaches the Trainer."""

import json
from pathlib import Path

import pytest

from corpus_builder.errors import ProjectError
from trainer.arguments import PRESETS_DIR, Schedule, learning_rate_at, load_deepspeed, training_arguments
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


def test_there_is_a_preset():
    assert [path.stem for path in PRESETS_DIR.glob("*.json")]


def test_zero3_offload_keeps_the_optimizer_on_the_host():
    zero = load_deepspeed("zero3_offload")["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["offload_optimizer"]["device"] == "cpu"
    assert zero["stage3_gather_16bit_weights_on_model_save"] is True


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


def test_arguments_say_what_the_recipe_says(tmp_path):
    recipe = make_recipe(
        learning_rate=3e-4, num_train_epochs=7, per_device_train_batch_size=2, seed=5, weight_decay=0.1
    )
    schedule = Schedule(recipe, rows=100, tokens=100 * 300, ranks=1)
    got = training_arguments(
        recipe, schedule, output_dir=Path(tmp_path), device=CPU, precision=Precision("fp32", "cpu"), place=ALONE
    )
    assert (got.learning_rate, got.num_train_epochs, got.per_device_train_batch_size) == (3e-4, 7, 2)
    assert (got.seed, got.weight_decay, got.max_grad_norm) == (5, 0.1, 1.0)
    assert got.gradient_accumulation_steps == schedule.accumulation
    assert got.get_warmup_steps(schedule.steps) == schedule.warmup_steps
    assert got.lr_scheduler_type == "cosine"
    assert (got.fp16, got.bf16, got.use_cpu) == (False, False, True)
    assert got.logging_nan_inf_filter is False
    assert got.report_to == []
    assert got.gradient_checkpointing is True
