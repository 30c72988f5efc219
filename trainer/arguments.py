"""Recipe -> Hugging Face's TrainingArguments and DeepSpeed's configuration.

The one file that knows how versions differ. The LR schedule has one owner, transformers: a DeepSpeed preset with a
`scheduler` would replace it in silence. Side effects: `join_ranks` sets up torch's process group.
"""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from corpus_builder.errors import ProjectError
from trainer.device import Device, Place, Precision, is_installed
from trainer.recipe import Recipe, accumulation, optimizer_steps

#: What each preset holds where, from the fewest gathers to the least GPU memory:
#:   zero2_offload         each GPU all weights, its share of gradients; optimizer in host memory
#:   zero3                 each GPU its share of everything; nothing in host memory
#:   zero3_offload         the same, optimizer in host memory: 16 bytes per trained parameter (DeepSpeed's estimate)
#:   zero3_offload_params  weights in host memory, too: 18 bytes per parameter; where GPUs cannot hold their share.
#:                         For 7.6B parameters 137 GB before pinned buffers and the gather of a save: too much for a
#:                         host of 160 GB, which zero3_offload (122 GB) fits
PRESETS_DIR = Path(__file__).parents[1] / "configs" / "deepspeed"
#: The packages of which one must be installed for a tracker. Source: transformers' integration_utils.py.
TRACKERS = {"tensorboard": ("tensorboard", "tensorboardX"), "swanlab": ("swanlab",), "wandb": ("wandb",)}
#: Liger's kernels but those of the loss: ours lives in the head (head_loss.py) and needs weights and classes.
LIGER_KERNELS = {
    "rope": True,
    "rms_norm": True,
    "swiglu": True,
    "cross_entropy": False,
    "fused_linear_cross_entropy": False,
}


def check_trackers(report_to: Iterable[str], *, has: Callable[[str], bool] = is_installed) -> None:
    """Raise `tracker_missing` for the first tracker whose package is not installed."""
    for tracker in report_to:
        if not any(has(package) for package in TRACKERS[tracker]):
            raise ProjectError("tracker_missing", name=tracker)


def load_deepspeed(name: str) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a preset's name or of a JSON file.

    Raises:
        ProjectError: `config_unreadable`; `config_invalid`: it has a scheduler of its own.
    """
    path = Path(name) if name.endswith(".json") else PRESETS_DIR / f"{name}.json"
    try:
        packed = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ProjectError("config_unreadable", path=str(path), reason=type(error).__name__) from error
    if not isinstance(packed, dict) or "scheduler" in packed:
        problem = "  scheduler: the recipe's lr_scheduler_type is the only owner of the learning rate"
        raise ProjectError("config_invalid", path=str(path), count=1, problems=problem)
    return packed


class Schedule:
    """How the rows of a run become optimizer steps; derived from the recipe, never a key."""

    def __init__(self, recipe: Recipe, *, rows: int, tokens: int, ranks: int) -> None:
        self.accumulation = accumulation(recipe, ranks=ranks, tokens_per_row=tokens / rows)
        self.steps = optimizer_steps(
            rows,
            ranks=ranks,
            batch_size=recipe.per_device_train_batch_size,
            accumulation_steps=self.accumulation,
            epochs=recipe.num_train_epochs,
        )
        self.warmup_steps = math.ceil(recipe.warmup_ratio * self.steps)


def learning_rate_at(step: int, recipe: Recipe, schedule: Schedule) -> float:
    """Return the learning rate of optimizer step `step` (from 1) as the recipe promises it.

    Source: transformers/optimization.py, get_cosine_schedule_with_warmup and its siblings; the schedule is asked
    before the step is counted, so the first step of a warm-up has rate 0.
    """
    done, warmup, total = step - 1, schedule.warmup_steps, schedule.steps
    if done < warmup:
        return recipe.learning_rate * done / max(1, warmup)
    progress = (done - warmup) / max(1, total - warmup)
    share = {
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - progress,
        "constant_with_warmup": 1.0,
    }[recipe.lr_scheduler_type]
    return recipe.learning_rate * max(0.0, share)


def join_ranks(device: Device, place: Place) -> None:
    """Set up the process group where a launcher started several ranks or one under DeepSpeed.

    Must come before TrainingArguments: on CPUs `zero.Init` would else see a world of one (facts/versions).
    """
    if not place.is_launched:
        return
    import deepspeed
    import torch

    if device.kind == "cuda":
        torch.cuda.set_device(place.local_rank)
    deepspeed.init_distributed("gloo" if device.kind == "cpu" else "nccl", verbose=False)


def training_arguments(
    recipe: Recipe, schedule: Schedule, *, output_dir: Path, device: Device, precision: Precision, place: Place
) -> Any:
    """Return the TrainingArguments of a run. Build them before the model: they switch `zero.Init` on.

    TensorBoard writes to `tensorboard` in `output_dir`, unless its own variable names another folder.
    """
    from transformers import TrainingArguments

    logging_dir = str(output_dir / "tensorboard")
    if "tensorboard" in recipe.report_to:
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", logging_dir)  # from transformers 5 on
    known = inspect.signature(TrainingArguments.__init__).parameters
    values: dict[str, Any] = {
        "output_dir": str(output_dir),
        "num_train_epochs": recipe.num_train_epochs,
        "per_device_train_batch_size": recipe.per_device_train_batch_size,
        "gradient_accumulation_steps": schedule.accumulation,
        "learning_rate": recipe.learning_rate,
        "lr_scheduler_type": recipe.lr_scheduler_type,
        "warmup_steps": schedule.warmup_steps,  # `warmup_ratio` left transformers in 5
        "weight_decay": recipe.weight_decay,
        "max_grad_norm": recipe.max_grad_norm,
        "seed": recipe.seed,
        "fp16": precision.name == "fp16",
        "bf16": precision.name == "bf16",
        "use_cpu": device.kind == "cpu",
        "deepspeed": load_deepspeed(recipe.deepspeed) if place.is_launched else None,
        "logging_strategy": "steps",
        "logging_steps": recipe.logging_steps,
        "logging_nan_inf_filter": False,  # it prints an old mean for a NaN step
        "save_strategy": "no",  # callbacks.py decides when, checkpoints.py keeps how many
        "save_only_model": recipe.save_only_model,
        "report_to": list(recipe.report_to),
        "logging_dir": logging_dir,  # before transformers 5
        "run_name": f"{recipe.version}-{output_dir.name}",  # what trackers call the run
        "use_liger_kernel": recipe.use_liger_kernel,
        "liger_kernel_config": LIGER_KERNELS if recipe.use_liger_kernel else None,
        "torch_compile": False,  # rows differ in length: each new one would be compiled anew
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_num_workers": 0,
        "optim": "adamw_torch",
        "average_tokens_across_devices": False,  # loss.py counts weights over all ranks itself
    }
    # Reentrant under ZeRO-3: else recomputation meets parameters that are partitioned again.
    checkpointing = {"use_reentrant": place.is_launched}
    word = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    values |= {word: recipe.gradient_checkpointing, f"{word}_kwargs": checkpointing}
    if "save_safetensors" in known:  # before 5 it could be off
        values["save_safetensors"] = True
    return TrainingArguments(**{key: value for key, value in values.items() if key in known})
