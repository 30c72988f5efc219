"""The base model, loaded for training. Side effects: reads the model folder; takes memory; may draw random numbers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from corpus_builder.errors import ProjectError
from trainer.device import Attention, Place, Precision
from trainer.methods import add_adapters, quantization
from trainer.recipe import Lora


def load_model(
    base_model_dir: Path,
    *,
    precision: Precision,
    place: Place,
    attention: Attention,
    lora: Lora | None = None,
    seed: int = 0,
) -> Any:
    """Return the causal language model of a folder that `base_model.check_base_model` found whole, ready to train.

    Under a ZeRO-3 preset each rank holds its share only (`zero.Init`), if TrainingArguments exist already.

    Args:
        lora: Adapters to add, drawn from `seed`; None trains all weights.

    Raises:
        ProjectError: `base_model_unsafe`: its weights are a pickle that holds more than weights.
    """
    model = load_weights(
        base_model_dir,
        dtype=weights_dtype(precision, place, is_frozen=lora is not None),
        attn_implementation=attention.name,
        **quantization(lora, precision, place),
    )
    return model if lora is None else add_adapters(model, lora, seed=seed, place=place)


def load_weights(model_dir: Path, *, dtype: Any, **arguments: Any) -> Any:
    """Return the model of a folder, without running code of it.

    Args:
        dtype: torch's type of the weights, or `auto`: as they are stored.

    Raises:
        ProjectError: `base_model_unsafe`.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(
            str(model_dir),
            trust_remote_code=False,
            local_files_only=True,
            weights_only=True,  # of a `.bin`: torch then unpickles tensors and nothing else
            **dtype_argument(dtype),
            **arguments,
        )
    except pickle.UnpicklingError as error:
        raise ProjectError("base_model_unsafe", path=str(model_dir)) from error


def weights_dtype(precision: Precision, place: Place, *, is_frozen: bool) -> Any:
    """Return the type in which the base's weights are loaded.

    - DeepSpeed keeps 32-bit masters of trained weights in its optimizer (runtime/zero/stage3.py,
      `_create_fp32_partitions`; stage_1_and_2.py, `single_partition_of_fp32_groups`): 16 bits.
    - Without it trained weights are 32 bits and autocast halves the computation: GradScaler refuses to unscale 16-bit
      gradients (torch/amp/grad_scaler.py, "Attempting to unscale FP16 gradients.").
    - Frozen weights have no gradient: 16 bits in either case; `methods.add_adapters` sees to those beside them.
    """
    import torch

    half = {"fp16": torch.float16, "bf16": torch.bfloat16}
    return half.get(precision.name, torch.float32) if place.is_launched or is_frozen else torch.float32


def dtype_argument(dtype: Any) -> dict[str, Any]:
    """Return the argument that sets the weights' type: `torch_dtype` became `dtype` in transformers 4.56."""
    import transformers

    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    return {"dtype" if (major, minor) >= (4, 56) else "torch_dtype": dtype}


def pad_id(tokenizer_controls: dict[str, int], im_end: int) -> int:
    """Return an id to pad with; attention and labels never see it, so any id of the vocabulary will do."""
    return tokenizer_controls.get("<|endoftext|>", im_end)
