"""How long a run will take, where there is a basis for it; else that is not known. Side effects: reads earlier runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.preflight import ASSUMED_SHARE, Wish, peak_tflops, training_flops
from trainer.recipe import Recipe
from trainer.request import Request
from trainer.run_paths import run_paths

#: Keys of a recipe on which the time of a step depends.
PACE_KEYS = (
    "base_model_dir", "max_seq_len", "tokens_per_step", "per_device_train_batch_size", "gradient_accumulation_steps",
    "gradient_checkpointing", "packing", "lora", "precision", "gpus", "device", "deepspeed", "attn_implementation",
    "use_liger_kernel",
)  # fmt: skip
UNKNOWN, MEASURED, ASSUMED = "unknown", "measured", "assumed"


@dataclass(frozen=True, slots=True)
class Pace:
    """Expected minutes of training, None if unknown; `basis` in one word, `said` in a few."""

    minutes: float | None
    basis: str
    said: str


def find_pace(request: Request, gpu: Mapping[str, Any] | None, wish: Wish | None, *, tokens: int, steps: int) -> Pace:
    """Return the pace by an earlier run of the same recipe here, else by the GPU's peak; nothing is guessed.

    Args:
        gpu: nvidia-smi's row of a GPU that trains, None on a CPU.
        tokens: Of one epoch.
    """
    earlier = _find_step_time(request)
    if earlier is not None:
        run, step_s = earlier
        return Pace(steps * step_s / 60, MEASURED, f"{step_s:.3g} s a step, as run {run} measured")
    peak = None if gpu is None else peak_tflops(str(gpu["name"]))
    if peak is None or wish is None:
        return Pace(None, UNKNOWN, "no earlier run of this recipe here")
    flops = training_flops(wish, tokens * request.recipe.num_train_epochs)
    seconds = flops / (wish.ranks * peak * 1e12 * ASSUMED_SHARE)
    return Pace(seconds / 60, ASSUMED, f"if the GPUs reach {ASSUMED_SHARE:.0%} of {peak:g} TFLOPS")


def _find_step_time(request: Request) -> tuple[str, float] | None:
    """Return the newest run of a recipe whose steps are the same work, and its seconds per step."""
    runs = Path(request.data.runs)
    wanted = _work_of(request.recipe.model_dump(mode="json"))
    for folder in sorted(runs.iterdir(), reverse=True) if runs.is_dir() else ():
        if folder.name == request.paths.run_id:
            continue
        paths = run_paths(request.data.data, request.version, folder.name)
        recipe, state = _read(Path(paths.recipe)), _read(Path(paths.state))
        step_s = state.get("step_s")
        if step_s and _work_of(recipe.get("recipe") or {}) == wanted:
            return folder.name, float(step_s)
    return None


def _work_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {key: recipe.get(key) for key in PACE_KEYS if key in Recipe.model_fields}


def _read(path: Path) -> dict[str, Any]:
    try:
        packed = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return packed if isinstance(packed, dict) else {}
