"""The recipe's sections -> how weights are trained: all of them, LoRA, or QLoRA. Side effects: `add_adapters` draws
random numbers and changes the model.

No `lora:` trains all weights. `lora:` freezes the base and trains low-rank adapters (and `modules_to_save`, whole).
`lora.load_in_4bit` holds the frozen base in 4 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from corpus_builder.errors import ProjectError
from trainer.device import Device, Place, Precision, is_installed
from trainer.recipe import Lora, Recipe

ALL_LINEAR = "all-linear"


def check_methods(
    recipe: Recipe, device: Device, precision: Precision, *, has: Callable[[str], bool] = is_installed
) -> None:
    """Raise `method_unsupported` for what the recipe asks of a device or an environment that lacks it.

    Args:
        has: Whether a package is installed.
    """
    if recipe.lora is not None and recipe.lora.load_in_4bit:
        _check("lora.load_in_4bit", device, has, ["bitsandbytes"])
        if precision.name == "fp32":  # NF4 is a way to store; it computes in the run's precision, slowly in 32 bits
            raise ProjectError("method_unsupported", method="lora.load_in_4bit", reason="precision is fp32")
    if recipe.use_liger_kernel:
        _check("use_liger_kernel", device, has, ["triton", "liger_kernel"])


def _check(method: str, device: Device, has: Callable[[str], bool], packages: list[str]) -> None:
    missing = [name for name in packages if not has(name)]
    if device.kind != "cuda":
        raise ProjectError("method_unsupported", method=method, reason="no CUDA GPU")
    if missing:
        reason = f"not installed: {', '.join(missing)}"
        raise ProjectError("method_unsupported", method=method, reason=reason)


def check_targets(base_model_dir: Path, lora: Lora) -> None:
    """Raise `lora_no_targets` unless the model has every module that the recipe names; no weights are loaded.

    PEFT itself refuses only if it finds none of them, and leaves the others out in silence.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(base_model_dir), trust_remote_code=False, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    missing = missing_modules(model, lora)
    if missing:
        raise ProjectError("lora_no_targets", names=", ".join(missing))


def missing_modules(model: Any, lora: Lora) -> list[str]:
    """Return the names in `target_modules` that no linear or embedding layer bears, and those in `modules_to_save`
    that no module bears.

    A name means the modules whose path is it or ends with it: PEFT's rule (tuners_utils.check_target_module_exists).
    """
    from torch import nn

    modules = dict(model.named_modules())
    layers = [path for path, module in modules.items() if isinstance(module, nn.Linear | nn.Embedding)]
    targets = () if lora.target_modules == ALL_LINEAR else lora.target_modules
    return [*_unmatched(targets, layers), *_unmatched(lora.modules_to_save, modules)]


def _unmatched(names: Iterable[str], paths: Iterable[str]) -> list[str]:
    dotted = [f".{path}" for path in paths]
    return [name for name in names if not any(path.endswith(f".{name}") for path in dotted)]


def quantization(lora: Lora | None, precision: Precision, place: Place) -> dict[str, Any]:
    """Return the argument of `from_pretrained` that holds the base in 4 bits (QLoRA), else none.

    NF4 with double quantisation: Dettmers et al. 2023, "QLoRA", section 3. ZeRO-3 cuts parameters by their storage
    type, which therefore must be a float of the run's precision (PEFT's guide "DeepSpeed", QLoRA with ZeRO-3).
    """
    if lora is None or not lora.load_in_4bit:
        return {}
    import torch
    from transformers import BitsAndBytesConfig

    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision.name]
    storage = {"bnb_4bit_quant_storage": dtype} if place.is_launched else {}
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            **storage,
        )
    }


def add_adapters(model: Any, lora: Lora, *, seed: int, place: Place) -> Any:
    """Return the model with its weights frozen and fresh adapters, which are all that is trained.

    Every rank draws the same adapters from `seed`: ZeRO-3 takes each rank's share from what that rank drew.
    """
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers import set_seed

    set_seed(seed)
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=ALL_LINEAR if lora.target_modules == ALL_LINEAR else list(lora.target_modules),
        modules_to_save=list(lora.modules_to_save) or None,
        bias="none",
    )
    model = get_peft_model(model, config, autocast_adapter_dtype=False)
    if not place.is_launched:
        _hold_in_32_bits(model)
    # The first layer's input must ask for a gradient, else a recomputed (checkpointed) layer has none to hand back:
    # the embedding before it is frozen. PEFT does so where checkpointing is on already; the Trainer turns it on later.
    model.enable_input_require_grads()
    return model


def _hold_in_32_bits(model: Any) -> None:
    """Hold trained weights in 32 bits beside a frozen base in 16, where autocast halves the computation.

    Without DeepSpeed nobody keeps 32-bit masters of them, and torch's GradScaler refuses 16-bit gradients ("Attempting
    to unscale FP16 gradients.", torch/amp/grad_scaler.py). PEFT's own `autocast_adapter_dtype` leaves
    `modules_to_save` out. Under DeepSpeed all weights have the run's precision: the engine keeps the masters, and
    doesn't cast what was added after `zero.Init` (runtime/engine.py, `_cast_module_mixed_precision`).
    """
    import torch

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)


def count_parameters(model: Any) -> tuple[int, int]:
    """Return how many parameters are trained, and of how many; ZeRO-3's shares and 4-bit weights count whole."""
    counts = [(_whole_size(one), one.requires_grad) for one in model.parameters()]
    return sum(count for count, is_trained in counts if is_trained), sum(count for count, _ in counts)


def _whole_size(parameter: Any) -> int:
    quantised = getattr(parameter, "quant_state", None)
    return int(parameter.numel() if quantised is None else quantised.shape.numel()) or int(parameter.ds_numel)
