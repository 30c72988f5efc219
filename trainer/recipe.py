"""The recipe: how to train (`configs/recipes/*.yaml`). A contract; pydantic at the file. Pure.

Keys carry Hugging Face's names where Hugging Face has one; our own are `max_seq_len`, `tokens_per_step`,
`report_every_steps`, `map_num_proc`, `precision`, `gpus` and the like. The box gets the resolved recipe as JSON
with the origin of each value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from corpus_builder.config import Resolved, Section, load_config
from corpus_builder.plan import Count, CountOrNone

#: Which variable sets which key of a recipe.
ENVIRONMENT_KEYS: Mapping[str, str] = {
    "ZY_BASE_MODEL_DIR": "base_model_dir",
    "ZY_DATA_PATH": "data_path",
    "ZY_OUTPUT_DIR": "output_dir",
    "ZY_DS_CONFIG": "deepspeed",
    "ZY_MAX_SEQ_LEN": "max_seq_len",
    "ZY_LR": "learning_rate",
    "ZY_NUM_EPOCHS": "num_train_epochs",
    "ZY_PER_DEVICE_BSZ": "per_device_train_batch_size",
    "ZY_GRAD_ACCUM": "gradient_accumulation_steps",
    "ZY_SAVE_STEPS": "save_steps",
    "ZY_LOGGING_STEPS": "logging_steps",
    "ZY_REPORT_EVERY_STEPS": "report_every_steps",
    "ZY_MAP_NUM_PROC": "map_num_proc",
    "ZY_SEED": "seed",
}

MIN_STEPS = 30  # fewer optimizer steps teach nothing: refused unless `allow_few_steps` (design 4.6)
FEW_STEPS = 100  # fewer are worth a warning


class Recipe(Section):
    """One complete way to train: no inheritance, no includes. Derived numbers are never keys."""

    name: str
    version: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="names the result; every run of it stays"
    )
    plan: str = Field(description="the corpus plan, `configs/corpus/<plan>.yaml`")
    suite: str | None = Field(None, description="what the model must answer, `configs/accept/<suite>.yaml`")

    base_model_dir: str = Field(description="a Hugging Face model folder on the box")
    data_path: str | None = Field(None, description="samples on the box; default: the built corpus")
    output_dir: str | None = Field(None, description="default: `checkpoints/<version>/<run>` in the data folder")

    max_seq_len: Count = Field(4096, description="tokens per sample; longer ones are split without loss")
    num_train_epochs: Count = 5
    learning_rate: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    lr_scheduler_type: Literal["cosine", "linear", "constant_with_warmup"] = "cosine"
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.03
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    seed: CountOrNone = 42

    tokens_per_step: Count = Field(16_384, description="tokens per optimizer step over all ranks; accumulation follows")
    per_device_train_batch_size: Count = 1
    gradient_accumulation_steps: Count | None = Field(None, description="overrides `tokens_per_step`")
    allow_few_steps: bool = Field(False, description=f"train although there are fewer than {MIN_STEPS} optimizer steps")
    gradient_checkpointing: bool = True

    precision: Literal["auto", "fp16", "bf16", "fp32"] = Field("auto", description="auto: by what the device can")
    gpus: Count = Field(4, description="ranks; on a CPU the number of processes")
    device: Literal["auto", "cuda", "cpu"] = "auto"
    deepspeed: str = Field("zero3_offload", description="a preset of `configs/deepspeed/`, or a JSON file on the box")

    save_steps: Count = 100
    save_minutes: Count = Field(30, description="also after this many minutes without a checkpoint")
    save_total_limit: Count = 3
    logging_steps: Count = 5
    report_every_steps: Count = Field(5, description="a ZY_PROGRESS line every this many steps")
    map_num_proc: Count = Field(1, description="processes that encode")


def load_recipe(
    path: Path, *, environment: Mapping[str, str], sets: Sequence[tuple[str, str]] = ()
) -> Resolved[Recipe]:
    """Return the recipe in `path` with overrides applied; raise `config_invalid` naming every wrong key."""
    return load_config(Recipe, path, environment_keys=ENVIRONMENT_KEYS, environment=environment, sets=sets)


def accumulation(recipe: Recipe, *, ranks: int, tokens_per_row: float) -> int:
    """Return the micro-batches per optimizer step and rank that come nearest to `tokens_per_step`, at least 1.

    Args:
        ranks: Processes that train.
        tokens_per_row: Mean tokens of one row of a micro-batch.
    """
    if recipe.gradient_accumulation_steps is not None:
        return recipe.gradient_accumulation_steps
    return max(1, round(recipe.tokens_per_step / (ranks * recipe.per_device_train_batch_size * tokens_per_row)))


def optimizer_steps(rows: int, *, ranks: int, batch_size: int, accumulation_steps: int, epochs: int) -> int:
    """Return the optimizer steps of a run: per epoch, the last step may be smaller than the others."""
    micro_batches = -(-rows // (ranks * batch_size))
    return -(-micro_batches // accumulation_steps) * epochs
