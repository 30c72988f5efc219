"""The base model, loaded for training. Side effects: reads the model folder; takes memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.device import Place, Precision


def load_model(base_model_dir: Path, *, precision: Precision, place: Place) -> Any:
    """Return the causal language model of a folder that `base_model.check_base_model` found whole.

    Under a ZeRO-3 preset each rank holds its share only (`zero.Init`), if TrainingArguments exist already.
    DeepSpeed keeps 32-bit masters beside half-precision weights; without it the weights themselves are 32 bits
    and autocast halves the computation.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}
    dtype = half.get(precision.name, torch.float32) if place.is_launched else torch.float32
    return AutoModelForCausalLM.from_pretrained(
        str(base_model_dir), trust_remote_code=False, local_files_only=True, **dtype_argument(dtype)
    )


def dtype_argument(dtype: Any) -> dict[str, Any]:
    """Return the argument that sets the weights' type: `torch_dtype` became `dtype` in transformers 4.56."""
    import transformers

    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    return {"dtype" if (major, minor) >= (4, 56) else "torch_dtype": dtype}


def pad_id(tokenizer_controls: dict[str, int], im_end: int) -> int:
    """Return an id to pad with; attention and labels never see it, so any id of the vocabulary will do."""
    return tokenizer_controls.get("<|endoftext|>", im_end)
