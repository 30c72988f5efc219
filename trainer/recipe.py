"""The recipe: how to train (`configs/recipes/*.yaml`). A contract; pydantic at the file. Pure.

Keys carry Hugging Face's names where Hugging Face has one; our own are `max_seq_len`, `tokens_per_step`,
`report_every_steps`, `map_num_proc`, `precision`, `gpus` and the like. The box gets the resolved recipe as JSON
with the origin of each value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from corpus_builder.config import Resolved, Section, load_config
from corpus_builder.plan import Count, CountOrNone, Words
from corpus_builder.suite import Question

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


class Lora(Section):
    """Train low-rank adapters instead of all weights; leave the section out to train all. PEFT's names."""

    r: Count = 16
    lora_alpha: Count = 32
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    target_modules: Literal["all-linear"] | Words = Field("all-linear", description="names of modules, or all-linear")
    modules_to_save: Words = Field((), description="modules that are trained and saved whole, e.g. lm_head")
    load_in_4bit: bool = Field(False, description="QLoRA: the base in 4 bits (NF4); needs bitsandbytes and a GPU")
    merge: bool = Field(True, description="`final/` is the merged model, with the adapter in `final/adapter/`")


class Recipe(Section):
    """One complete way to train: no inheritance, no includes. Derived numbers are never keys."""

    name: str
    version: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="names the result; every run of it stays"
    )
    plan: str = Field(description="the corpus plan, `configs/corpus/<plan>.yaml`")
    suite: str | None = Field(None, description="what the model must answer, `configs/accept/<suite>.yaml`")

    base_model_dir: str = Field(description="a Hugging Face model folder on the box")
    base_must_not_hold: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], ...] = Field(
        (), description="sha256 of weight files that the base must not be made of: the stock model's, as its page shows"
    )
    base_must_answer: tuple[Question, ...] = Field(
        (), description="questions that the base must answer before it is trained further"
    )
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
    packing: bool = Field(True, description="several samples per row of max_seq_len, none of which sees another")
    lora: Lora | None = None

    precision: Literal["auto", "fp16", "bf16", "fp32"] = Field("auto", description="auto: by what the device can")
    gpus: Count | Annotated[tuple[CountOrNone, ...], Field(min_length=1)] = Field(
        4, description="how many, or which by number; busy ones are skipped; on a CPU the number of processes"
    )
    device: Literal["auto", "cuda", "cpu"] = "auto"
    deepspeed: str = Field("zero3_offload", description="a preset of `configs/deepspeed/`, or a JSON file on the box")
    attn_implementation: Literal["auto", "flash_attention_2", "sdpa", "eager"] = Field(
        "auto", description="auto: FlashAttention 2 where it is installed and the GPU has it, else sdpa"
    )
    use_liger_kernel: bool = Field(False, description="Liger's kernels for norms, rotary positions and SwiGLU")

    save_steps: Count = 100
    save_minutes: Count = Field(30, description="also after this many minutes without a checkpoint")
    save_total_limit: Count = Field(3, description="newest checkpoints to keep; the best one stays beside them")
    save_only_model: bool = Field(False, description="checkpoints without optimizer: small, and none can be resumed")
    eval_steps: Count | None = Field(None, description="steps between looks at held-out samples; default: save_steps")
    load_best_model_at_end: bool = Field(False, description="the result is the best checkpoint by held-out loss")
    early_stopping_patience: Count | None = Field(None, description="stop after so many looks without improvement")
    logging_steps: Count = 5
    report_every_steps: Count = Field(5, description="a ZY_PROGRESS line every this many steps")
    map_num_proc: Count = Field(1, description="threads that encode")
    report_to: tuple[Literal["tensorboard", "swanlab", "wandb"], ...] = Field((), description="trackers")

    @property
    def ranks(self) -> int:
        """How many processes train."""
        return self.gpus if isinstance(self.gpus, int) else len(self.gpus)

    @model_validator(mode="after")
    def _check_together(self) -> Recipe:
        if isinstance(self.gpus, tuple) and len(set(self.gpus)) != len(self.gpus):
            raise ValueError("gpus: a number stands twice")
        return self


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
