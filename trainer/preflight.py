"""What a run will need, in numbers, before anything is loaded: memory, disk, steps, minutes. Pure.

Memory is counted at the moments at which a run holds most: `forward` (activations and the head's loss), `backward`
(whole gradients of the largest tensors), `step` (what the optimizer makes beside its states), `save` (the gather of
the weights), `merge` (what the process that merges adapters loads, while the ranks still hold theirs). The greatest
of them is the need. Bytes per parameter are those of the code that allocates them:

- DeepSpeed 0.19, runtime/zero/stage3.py: `_create_fp16_partitions_with_defragmentation` (the share of the weights),
  `_create_fp32_partitions` (32-bit masters), `initialize_optimizer_states` (32-bit gradients, if the optimizer is
  offloaded), `grad_partitions_flat_buffer` (gradients in the weights' type), ops/adam/cpu_adam.py (two moments).
- trainer/head_loss.py: a 32-bit gradient of the head, and one chunk of logits.
- transformers, models/llama/modeling_llama.py: what a layer keeps for its backward pass.

    >>> estimate(wish).host_bytes / 2**30
    6.3
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from trainer.head_types import CHUNK_TOKENS
from trainer.sizes import EMBEDDINGS, HEAD, ModelSize

GIB = 1 << 30
#: What one process's libraries take before a model is loaded: 438 MiB with torch 2.13, transformers 5.24 and DeepSpeed
#: 0.19 on a CPU (benchmarks/preflight.py measures it); CUDA's libraries take more.
LIBRARIES_BYTES = 450 << 20
#: Defaults of DeepSpeed's runtime/zero/config.py, in elements.
MAX_LIVE = 1_000_000_000
REDUCE_BUCKET = 500_000_000
SUB_GROUP = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero:
    """How DeepSpeed cuts a run among its ranks: the `zero_optimization` part of a preset."""

    stage: int
    offloads_optimizer: bool
    offloads_parameters: bool
    max_live: int
    reduce_bucket: int


def read_zero(preset: Mapping[str, Any], *, hidden: int) -> Zero:
    """Return the cut of a preset; `auto` is what transformers/integrations/deepspeed.py makes of it."""
    part = preset.get("zero_optimization") or {}
    return Zero(
        stage=int(part.get("stage", 0)),
        offloads_optimizer=_is_offloaded(part.get("offload_optimizer")),
        offloads_parameters=_is_offloaded(part.get("offload_param")),
        max_live=_count(part.get("stage3_max_live_parameters"), MAX_LIVE, auto=MAX_LIVE),
        reduce_bucket=_count(part.get("reduce_bucket_size"), REDUCE_BUCKET, auto=hidden * hidden),
    )


def _is_offloaded(part: Any) -> bool:
    return bool(part) and part.get("device") not in (None, "none")


def _count(value: Any, default: int, *, auto: int) -> int:
    return default if value is None else auto if value == "auto" else int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What decides a run's needs.

    Attributes:
        trained: Parameters that are trained; all others are frozen.
        zero: None where one process trains without DeepSpeed.
        weight_bytes: Of one weight: 2 in half precision, 4 in 32 bits.
        row_tokens: Tokens of the longest micro-batch of one rank, padding included.
        head_tokens: Trained tokens of that micro-batch.
        has_head_loss: Whether the loss is made in the head, in chunks.
        has_head_trained: Whether the head's weight gets a gradient.
        is_4bit: QLoRA: the linear maps of the frozen base in 4 bits.
        is_merged: Adapters are merged into the base at the end, by a process of its own on the host.
    """

    size: ModelSize
    trained: int
    ranks: int
    zero: Zero | None
    is_on_gpu: bool
    weight_bytes: int
    row_tokens: int
    head_tokens: int
    accumulation: int
    checkpointing: bool
    has_head_loss: bool = True
    has_head_trained: bool = True
    is_4bit: bool = False
    is_merged: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that takes memory: per rank on its device, on the host for all ranks together."""

    what: str
    device_bytes: float = 0.0
    host_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The need of a run. On a CPU the device is the host: then `gpu_bytes` is 0."""

    gpu_bytes: int
    host_bytes: int
    moments: Mapping[str, tuple[Part, ...]]


def estimate(wish: Wish) -> Memory:
    """Return what a run holds at its fullest moments."""
    moments = {name: tuple(parts) for name, parts in _moments(wish).items()}
    device = {name: sum(part.device_bytes for part in parts) for name, parts in moments.items()}
    host = {name: sum(part.host_bytes for part in parts) for name, parts in moments.items()}
    if wish.is_on_gpu:
        return Memory(gpu_bytes=round(max(device.values())), host_bytes=round(max(host.values())), moments=moments)
    all_bytes = max(wish.ranks * device[name] + host[name] for name in moments)
    return Memory(gpu_bytes=0, host_bytes=round(all_bytes), moments=moments)


def _moments(wish: Wish) -> dict[str, list[Part]]:
    states = _plain_states(wish) if wish.zero is None else _zero_states(wish, wish.zero)
    gathered = _gathered(wish)
    gradients = [] if wish.zero is not None else [Part("gradients", 4 * wish.trained)]
    held = gradients if wish.accumulation > 1 else []  # of the micro-batches before
    activations = [Part("activations", activation_bytes(wish))]
    # On a CPU what small blocks held stays with the process: glibc gives back only what lies at the end of its heap or
    # is larger than a threshold that grows to 32 MiB (mallopt(3), M_MMAP_THRESHOLD).
    kept = [] if wish.is_on_gpu else [*activations, *gathered]
    while_backward = gathered if wish.is_on_gpu else kept
    merge = {"merge": [*states, *kept, *_merge_extra(wish)]} if wish.is_merged else {}
    return {
        **merge,
        "forward": [*states, *gathered, *held, *activations, *_head_forward(wish)],
        "backward": [*states, *while_backward, *gradients, *_whole_gradients(wish)],
        "step": [*states, *kept, *gradients, *_step_extra(wish)],
        "save": [*states, *kept, *_save_extra(wish)],
    }


def _plain_states(wish: Wish) -> list[Part]:
    """One process: weights, of the trained ones in 32 bits, and torch's Adam (torch/optim/adam.py: two moments)."""
    trained = 4 * wish.trained
    weights = trained if wish.trained >= wish.size.parameters else base_bytes(wish) + trained
    return [Part("weights", weights), Part("optimizer", 8 * wish.trained)]


def _zero_states(wish: Wish, zero: Zero) -> list[Part]:
    """What a rank holds all the time, in its own memory or, offloaded, on the host (all ranks together there)."""
    all_weights = base_bytes(wish) + wish.weight_bytes * _added(wish)
    weights = all_weights / wish.ranks if zero.stage == 3 else all_weights
    share = wish.trained / wish.ranks
    parts = [
        _offloaded("weights", weights, wish, zero.offloads_parameters),
        # Stage 2 keeps whole gradients of a micro-batch no longer than its bucket; the share stays.
        _offloaded("gradients", wish.weight_bytes * share, wish, zero.offloads_optimizer, is_pinned=True),
        _offloaded("masters", 4 * share, wish, zero.offloads_optimizer),
        _offloaded("optimizer", 8 * share, wish, zero.offloads_optimizer),
        Part("gradient bucket", wish.weight_bytes * min(zero.reduce_bucket, wish.trained)),
    ]
    if zero.offloads_optimizer:
        groups = _sub_groups(share)
        parts.append(_offloaded("32-bit gradients", [4 * group for group in groups], wish, True, is_pinned=True))
    else:
        parts.append(Part("32-bit gradients", 4 * min(share, SUB_GROUP)))
    return parts


#: NF4 with double quantisation: 4 bits and 0.127 of constants (Dettmers et al. 2023, "QLoRA", section 3).
QUANTIZED_BYTES = (4 + 0.127) / 8


def base_bytes(wish: Wish) -> float:
    """Return what the model's own weights take, once; in 4 bits only its linear maps but the head."""
    shapes = wish.size.shapes
    linear = [name for name in shapes if len(shapes[name]) == 2 and not name.endswith((HEAD, EMBEDDINGS))]
    quantized = sum(prod(shapes[name]) for name in linear) if wish.is_4bit else 0
    return wish.weight_bytes * (wish.size.parameters - quantized) + QUANTIZED_BYTES * quantized


def _added(wish: Wish) -> int:
    """Adapters are weights beside the model's own."""
    return wish.trained if wish.trained < wish.size.parameters else 0


def _sub_groups(share: float) -> list[float]:
    whole, rest = divmod(share, SUB_GROUP)
    return [SUB_GROUP] * int(whole) + [rest]


def _offloaded(
    what: str, amount: float | Sequence[float], wish: Wish, is_offloaded: bool, *, is_pinned: bool = False
) -> Part:
    """Return a part of `amount` bytes per rank where it lies.

    torch's allocator of pinned memory rounds each block up to a power of two (ATen/core/CachingHostAllocator.h);
    on a CPU nothing is pinned.
    """
    blocks = [amount] if isinstance(amount, int | float) else list(amount)
    if not is_offloaded:
        return Part(what, device_bytes=sum(blocks))
    if is_pinned and wish.is_on_gpu:
        blocks = [2 ** math.ceil(math.log2(block)) for block in blocks if block >= 1]
    return Part(what, host_bytes=wish.ranks * sum(blocks))


def _gathered(wish: Wish) -> list[Part]:
    """Under ZeRO-3 a rank brings weights together to use them, and keeps at most `max_live` of them."""
    if wish.zero is None or wish.zero.stage < 3:
        return []
    share = min(1.0, wish.zero.max_live / wish.size.parameters)
    return [Part("gathered weights", share * base_bytes(wish))]


def activation_bytes(wish: Wish) -> float:
    """Return what one rank's layers keep for the backward pass of one micro-batch.

    With checkpointing each layer keeps its input, and one layer at a time all of it (Chen et al. 2016).
    """
    layer = wish.row_tokens * layer_bytes_per_token(wish.size, wish.weight_bytes)
    if not wish.checkpointing:
        return wish.size.layers * layer
    return wish.size.layers * wish.row_tokens * wish.size.hidden * wish.weight_bytes + layer


def layer_bytes_per_token(size: ModelSize, weight_bytes: int) -> int:
    """Return what one layer keeps of one token, attention by a fused kernel (its scores are never kept).

    Two norms: the input in 32 bits, the normalised input and the output. Attention: query, key and value (repeated
    for all heads) and the output. MLP: gate, its activation, up, and their product.
    """
    hidden, inner = size.hidden, size.intermediate
    norms = 2 * hidden * (4 + 2 * weight_bytes)
    attention = 4 * hidden * weight_bytes
    return norms + attention + 4 * inner * weight_bytes


def _head_numel(size: ModelSize) -> int:
    return next((prod(size.shapes[name]) for name in size.shapes if name.endswith((HEAD, EMBEDDINGS))), 0)


def _head_forward(wish: Wish) -> list[Part]:
    """The loss: a chunk of logits and their slopes, and the head's gradient, made on the way forward in 32 bits."""
    if not wish.has_head_loss:  # logits, the same in 32 bits, log-probabilities, and their gradient
        return [Part("logits", wish.head_tokens * wish.size.vocabulary * (wish.weight_bytes + 12))]
    tokens = min(wish.head_tokens, CHUNK_TOKENS)
    gradient = [Part("gradient of the head", 4 * _head_numel(wish.size))] if wish.has_head_trained else []
    return [*gradient, Part("chunk of logits", tokens * wish.size.vocabulary * (4 + 2 * wish.weight_bytes))]


def _whole_gradients(wish: Wish) -> list[Part]:
    """Gradients of the embeddings and of the head in full, and DeepSpeed's flat copy that is reduced
    (runtime/comm/coalesced_collectives.py); gloo reduces a clone of that (torch's ProcessGroupGloo.cpp,
    `reduce_scatter_tensor_coalesced`)."""
    if not wish.has_head_trained:
        return []
    table = _head_numel(wish.size)
    parts = [Part("gradient of the head", 4 * table), Part("gradient of the embeddings", wish.weight_bytes * table)]
    if wish.zero is not None:
        copies = 1 if wish.is_on_gpu else 2
        parts.append(Part("gradient while it is reduced", copies * wish.weight_bytes * table))
    return parts


def _step_extra(wish: Wish) -> list[Part]:
    """torch's Adam makes two tensors of a parameter's size (torch/optim/adam.py, `_single_tensor_adam`: the root of
    the second moment, and that over the bias correction); DeepSpeed's makes none."""
    return [Part("root of the second moment", 2 * 4 * wish.size.largest)] if wish.zero is None else []


def _merge_extra(wish: Wish) -> list[Part]:
    """One copy of the base in the type that it is stored in, and a module at a time in 32 bits (trainer/merge.py)."""
    return [
        Part("model that is merged", host_bytes=wish.size.stored_bytes),
        Part("largest module in 32 bits", host_bytes=4 * wish.size.largest),
        Part("libraries of the merge", host_bytes=LIBRARIES_BYTES),
    ]


def _save_extra(wish: Wish) -> list[Part]:
    """Under ZeRO-3 rank 0 gathers the trained weights on the host; they are written from there without a copy."""
    if wish.zero is None or wish.zero.stage < 3:
        return []
    saved = wish.size.parameters if wish.trained >= wish.size.parameters else wish.trained
    return [Part("weights gathered to be saved", host_bytes=wish.weight_bytes * saved)]


def with_preset(wish: Wish, preset: Mapping[str, Any]) -> Wish:
    """Return the same wish under another preset of DeepSpeed."""
    return replace(wish, zero=read_zero(preset, hidden=wish.size.hidden))


def checkpoint_bytes(wish: Wish) -> int:
    """Return what one resumable checkpoint takes on the disk: weights, and 12 bytes per trained parameter of
    DeepSpeed's optimizer (masters and two moments), 8 of torch's (two moments; its weights are the masters)."""
    return final_bytes(wish) + (8 if wish.zero is None else 12) * wish.trained


def final_bytes(wish: Wish) -> int:
    """Return what the weights of a checkpoint or of the result take; of adapters only themselves."""
    is_lora = wish.trained < wish.size.parameters
    return wish.weight_bytes * (wish.trained if is_lora else wish.size.parameters)


def disk_bytes(wish: Wish, *, kept: int, is_model_only: bool, has_best: bool, is_merged: bool) -> int:
    """Return what a run's folder takes at most.

    Args:
        kept: Newest checkpoints that stay; one more is there while it is written.
        is_model_only: Checkpoints without optimizer.
        has_best: The best one may stay beside them.
        is_merged: The result of adapters is a whole model too.
    """
    one = final_bytes(wish) if is_model_only else checkpoint_bytes(wish)
    result = final_bytes(wish) + (wish.weight_bytes * wish.size.parameters if is_merged else 0)
    return (kept + 1 + has_best) * one + result


#: Dense 16-bit floating-point peak in TFLOPS, by a word of the name that nvidia-smi gives; the makers' data sheets.
PEAK_TFLOPS = {
    "V100": 125.0, "T4": 65.0, "A100": 312.0, "A800": 312.0, "A10": 125.0, "A30": 165.0, "A40": 149.7, "L4": 121.0,
    "L40S": 362.0, "H100": 989.0, "H800": 989.0, "H200": 989.0, "H20": 148.0, "3090": 71.0, "4090": 165.2,
}  # fmt: skip
#: The share of the peak that the estimate assumes, and says: what well-fed GPUs reach with a 7B model; a run whose
#: optimizer is offloaded is slower. The measured step time of an earlier run takes its place as soon as there is one.
ASSUMED_SHARE = 0.3


def peak_tflops(gpu_name: str) -> float | None:
    """Return the peak of a GPU by its name; None of one that is not in the table."""
    words = gpu_name.replace("-", " ").split()
    return next((PEAK_TFLOPS[word] for word in words if word in PEAK_TFLOPS), None)


def training_flops(wish: Wish, tokens: int) -> float:
    """Return the floating-point operations of training on `tokens` tokens.

    6 per parameter and token: 2 forward, 4 backward (Kaplan et al. 2020, table 1); frozen weights need no gradient of
    their own: 4. Recomputed layers add a forward pass.
    """
    per_token = 4 * wish.size.parameters + 2 * min(wish.trained, wish.size.parameters)
    return float(tokens) * (per_token + (2 * wish.size.parameters if wish.checkpointing else 0))


def fits(memory: Memory, *, gpu_free_bytes: int | None, host_free_bytes: int) -> str | None:
    """Return which memory is too small, `gpu` or `host`; None where both are enough, as far as is known."""
    if gpu_free_bytes is not None and memory.gpu_bytes > gpu_free_bytes:
        return "gpu"
    return "host" if memory.host_bytes > host_free_bytes else None


def advise(
    wish: Wish,
    presets: Mapping[str, Mapping[str, Any]],
    *,
    gpu_free_bytes: int | None,
    host_free_bytes: int,
) -> str:
    """Return recipe keys that would make the run fit, the least change first; words of a recipe, the same in any
    language.

    Args:
        presets: DeepSpeed presets by name, in the order in which they are proposed.
    """
    others: list[tuple[str, Wish]] = []
    if wish.is_merged:
        others.append(("lora.merge: false", replace(wish, is_merged=False)))
    if not wish.checkpointing:
        others.append(("gradient_checkpointing: true", replace(wish, checkpointing=True)))
    if wish.zero is not None:
        others += [(f"deepspeed: {name}", with_preset(wish, preset)) for name, preset in presets.items()]
    half = max(1, wish.row_tokens // 2)
    others.append(("max_seq_len / 2", replace(wish, row_tokens=half, head_tokens=min(half, wish.head_tokens))))
    for words, other in others:
        if fits(estimate(other), gpu_free_bytes=gpu_free_bytes, host_free_bytes=host_free_bytes) is None:
            return words
    return "lora:" if wish.trained >= wish.size.parameters else "max_seq_len"
