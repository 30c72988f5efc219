"""Which device trains, in which precision and with which attention. Side effects: `find_device` asks torch.

>>> choose_precision("auto", Device("cuda", "Tesla V100-SXM2-32GB", (7, 0)))
Precision(name='fp16', reason='compute_capability_7.0_has_no_bf16')
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass

from corpus_builder.errors import ProjectError

BF16_FROM = (8, 0)  # Ampere; NVIDIA CUDA C++ programming guide, compute capabilities
FLASH_FROM = (8, 0)  # FlashAttention 2's README: Ampere, Ada, Hopper; no Volta, no Turing
_CAN = {"cpu": ("fp32",), "cuda": ("fp16", "fp32")}  # and bf16 from BF16_FROM on


@dataclass(frozen=True, slots=True)
class Device:
    """`kind` is `cuda` or `cpu`; `capability` the compute capability, None on a CPU."""

    kind: str
    name: str
    capability: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Precision:
    """`fp32`, `fp16` or `bf16`, and why; the reason is one word, for an event."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Attention:
    """transformers' `attn_implementation`, and why; the reason is one word, for an event."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Place:
    """This process among those that train. `is_launched`: a launcher started it, so DeepSpeed drives it."""

    rank: int
    local_rank: int
    ranks: int
    is_launched: bool

    @property
    def is_first(self) -> bool:
        """Rank 0 speaks; the others only fail."""
        return self.rank == 0


def find_place() -> Place:
    """Return this process's place, from the variables that every launcher sets."""
    read = {name: int(os.environ.get(name, default)) for name, default in _PLACE_DEFAULTS.items()}
    return Place(read["RANK"], read["LOCAL_RANK"], read["WORLD_SIZE"], "LOCAL_RANK" in os.environ)


_PLACE_DEFAULTS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def find_device(wanted: str, place: Place) -> Device:
    """Return the device of this process.

    Args:
        wanted: The recipe's `device`: `auto`, `cuda` or `cpu`.

    Raises:
        ProjectError: `gpus_missing`: the recipe wants GPUs and there are fewer than ranks.
    """
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not found):
        return Device("cpu", "cpu")
    if found <= place.local_rank:
        raise ProjectError("gpus_missing", wanted=max(place.ranks, 1), found=found)
    return Device(
        "cuda", torch.cuda.get_device_name(place.local_rank), torch.cuda.get_device_capability(place.local_rank)
    )


def choose_precision(wanted: str, device: Device) -> Precision:
    """Return the precision of a run.

    Args:
        wanted: The recipe's `precision`; `auto` takes the best that the device has.

    Raises:
        ProjectError: `precision_unsupported`: the recipe asks for what the device can't.
    """
    can = _CAN[device.kind] + (("bf16",) if device.capability is not None and device.capability >= BF16_FROM else ())
    if wanted != "auto":
        if wanted not in can:
            raise ProjectError("precision_unsupported", precision=wanted, device=device.name)
        return Precision(wanted, "recipe")
    if device.capability is None:
        return Precision("fp32", "cpu")
    version = "{}.{}".format(*device.capability)
    if "bf16" in can:
        return Precision("bf16", f"compute_capability_{version}")
    return Precision("fp16", f"compute_capability_{version}_has_no_bf16")


def is_installed(package: str) -> bool:
    """Whether a package of the first level can be imported; it isn't."""
    return importlib.util.find_spec(package) is not None


def choose_attention(
    wanted: str, device: Device, precision: Precision, *, has: Callable[[str], bool] = is_installed
) -> Attention:
    """Return how attention is computed.

    Args:
        wanted: The recipe's `attn_implementation`; `auto` takes FlashAttention 2 where it works, else sdpa.
        has: Whether a package is installed.

    Raises:
        ProjectError: `method_unsupported`: the recipe asks for FlashAttention 2 where it cannot work.
    """
    obstacle = _flash_obstacle(device, precision, has)
    if wanted == "flash_attention_2" and obstacle is not None:
        raise ProjectError("method_unsupported", method="attn_implementation: flash_attention_2", reason=obstacle)
    if wanted != "auto":
        return Attention(wanted, "recipe")
    if obstacle is None:
        return Attention("flash_attention_2", "installed")
    return Attention("sdpa", obstacle.replace(" ", "_"))


def _flash_obstacle(device: Device, precision: Precision, has: Callable[[str], bool]) -> str | None:
    """Return why FlashAttention 2 cannot work, None where it can. It computes in 16 bits only."""
    if device.capability is None:
        return "no CUDA GPU"
    if device.capability < FLASH_FROM:
        return "compute capability {}.{} is below {}.{}".format(*device.capability, *FLASH_FROM)
    if precision.name == "fp32":
        return "precision is fp32"
    return None if has("flash_attn") else "the package flash_attn is not installed"
