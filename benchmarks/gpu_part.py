"""One part of `benchmarks.gpu` as a process of its own: its memory is its own, and what breaks it breaks nothing else.

    python -m benchmarks.gpu_part '{"what": "train", "size": "0.5b", "keys": {"precision": "bf16"}, …}'

Prints one JSON line: what was measured, or `{"not_run": reason}` where this machine or the product refuses. Models
have random weights and Qwen2.5's shapes; they are written once to `folder`, which the caller owns.

Side effects: writes the model to `folder`; under a launcher's variables joins a process group of one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from corpus_builder.errors import ProjectError
from corpus_builder.frame import IGNORE_INDEX
from trainer.arguments import Schedule, join_ranks, training_arguments
from trainer.build_locks import EXTENSIONS_DIR, extensions_dir
from trainer.dataset import Batch, Collator, DealtOrder, Row, Rows
from trainer.device import (
    Attention,
    Device,
    Place,
    Precision,
    choose_attention,
    choose_precision,
    find_device,
    find_place,
)
from trainer.encoded import EncodedSet
from trainer.machine import read_machine
from trainer.methods import check_methods
from trainer.packing import Packing, one_each, pack
from trainer.preflight import GIB, Memory, Wish, estimate, fits
from trainer.ranks import Ranks
from trainer.recipe import Recipe
from trainer.room import GPU_RESERVE_BYTES, make_wish

#: Source: config.json of Qwen2.5-0.5B and Qwen2.5-7B; `toy` has the same parts.
CONFIGS: dict[str, dict[str, Any]] = {
    "toy": {
        "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "0.5b": {
        "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "7b": {
        "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
}  # fmt: skip
TRAINED_SHARE = 0.6  # of a document's tokens; the answers of a chat
WARM_UP = 2  # optimizer steps that are not timed: kernels are chosen, memory is found


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What one part measures.

    Attributes:
        what: `write` (the model), `train` (the product's Trainer), `loss` (the head's loss beside whole logits).
        keys: Recipe keys that differ from the part's own.
        steps: Optimizer steps that are timed.
        tokens_per_step, max_seq_len: Of the recipe.
    """

    what: str
    size: str
    folder: str
    steps: int = 8
    tokens_per_step: int = 16_384
    max_seq_len: int = 4096
    keys: Mapping[str, Any] = field(default_factory=dict)

    def packed(self) -> str:
        """Return the words of a command line that say it."""
        return json.dumps(asdict(self))


class NotRun(Exception):
    """This machine can't: the reason is for the page."""


def write_model(size: str, folder: Path) -> None:
    """Write a random model in half precision, as published ones are; on a GPU where there is one."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(1)
    config = Qwen2Config(**CONFIGS[size], max_position_embeddings=32_768)
    dtype, device = torch.get_default_dtype(), "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(dtype)
    model.save_pretrained(folder)


def make_documents(spec: Spec, steps: int) -> EncodedSet:
    """Return random documents for `steps` optimizer steps: prompts, then answers; lengths as chats have them."""
    draw = np.random.default_rng(5)
    typical = min(350, spec.max_seq_len // 4)
    lengths: list[int] = []
    while sum(lengths) < steps * spec.tokens_per_step:
        lengths.append(int(np.clip(draw.lognormal(np.log(typical), 0.88), 10, spec.max_seq_len)))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    is_trained = np.zeros(starts[-1], dtype=bool)
    for start, length in zip(starts, lengths, strict=False):
        is_trained[start + round(length * (1 - TRAINED_SHARE)) : start + length] = True
    return EncodedSet(
        ids=draw.integers(10, CONFIGS[spec.size]["vocab_size"], starts[-1]).astype(np.int32),
        is_trained=is_trained,
        starts=starts.astype(np.int64),
        weights=np.ones(len(lengths), dtype=np.float32),
        class_indices=np.zeros(len(lengths), dtype=np.int8),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the product chose for a recipe on this machine."""

    recipe: Recipe
    place: Place
    device: Device
    precision: Precision
    attention: Attention


def choose(spec: Spec) -> Setting:
    """Let the product choose device, precision and attention; raise its refusals."""
    recipe = Recipe.model_validate(
        {"name": "gpu", "version": "gpu", "plan": "gpu", "base_model_dir": spec.folder, "num_train_epochs": 1,
         "max_seq_len": spec.max_seq_len, "tokens_per_step": spec.tokens_per_step, "allow_few_steps": True,
         "learning_rate": 1e-5, "gpus": 1} | dict(spec.keys)
    )  # fmt: skip
    place = find_place()
    device = find_device(recipe.device, place)
    precision = choose_precision(recipe.precision, device)
    check_methods(recipe, device, precision)
    attention = choose_attention(recipe.attn_implementation, device, precision)
    return Setting(recipe=recipe, place=place, device=device, precision=precision, attention=attention)


def foresee(setting: Setting, documents: EncodedSet, packing: Packing, schedule: Schedule) -> tuple[Wish, Memory]:
    """Return what the preflight expects; raise `NotRun` where the run would not fit."""
    import torch

    is_on_gpu = setting.device.kind == "cuda"
    ranks = Ranks(count=1, gpus=(0,) if is_on_gpu else None)
    wish = make_wish(setting.recipe, ranks, setting.precision, documents, packing, schedule)
    assert wish is not None, "the preflight does not know Qwen2"
    if not setting.place.is_launched:
        wish = replace(wish, zero=None)
    memory = estimate(wish)
    free = torch.cuda.mem_get_info()[0] - GPU_RESERVE_BYTES if is_on_gpu else None
    host_free = read_machine(Path(setting.recipe.base_model_dir)).host_free_bytes
    short = fits(memory, gpu_free_bytes=free, host_free_bytes=host_free)
    if short is not None:
        needed = memory.gpu_bytes if short == "gpu" else memory.host_bytes
        raise NotRun(f"the preflight expects {needed / GIB:.0f} GiB on the {short}, and there is less")
    return wish, memory


class Clock(Collator):
    """Takes the time of each optimizer step, and counts the tokens that its rows hold.

    Attributes:
        base_bytes: Memory before the model.
        steps: Seconds, tokens, trained tokens, and tokens with the padding, of each optimizer step.
    """

    def __init__(self, *, is_packed: bool, is_flat: bool, is_on_gpu: bool) -> None:
        super().__init__(0, is_packed=is_packed, is_flat=is_flat)
        self._is_on_gpu = is_on_gpu
        self.base_bytes = _now_bytes(is_on_gpu)
        self._tokens = self._trained = self._padded = 0
        self.steps: list[tuple[float, int, int, int]] = []

    def __call__(self, rows: Sequence[Row]) -> Batch:
        batch = super().__call__(rows)
        self._tokens += sum(len(row.ids) for row in rows)
        self._trained += int(sum((row.labels[1:] != IGNORE_INDEX).sum() for row in rows))
        self._padded += batch["input_ids"].numel()
        return batch

    def begin(self) -> None:
        _wait_for(self._is_on_gpu)
        self._began_s = time.perf_counter()

    def end(self) -> None:
        _wait_for(self._is_on_gpu)
        self.steps.append((time.perf_counter() - self._began_s, self._tokens, self._trained, self._padded))
        self._tokens = self._trained = self._padded = 0


def train(spec: Spec) -> dict[str, Any]:
    """Train a few steps with the product's Trainer; return speed and peak beside what the preflight expected."""
    setting = choose(spec)
    recipe, is_on_gpu = setting.recipe, setting.device.kind == "cuda"
    documents = make_documents(spec, spec.steps + WARM_UP)
    packing = pack(documents.lengths, recipe.max_seq_len) if recipe.packing else one_each(len(documents))
    schedule = Schedule(recipe, rows=len(packing), tokens=documents.tokens, ranks=1)
    wish, expected = foresee(setting, documents, packing, schedule)
    join_ranks(setting.device, setting.place)
    with tempfile.TemporaryDirectory() as output:
        arguments = training_arguments(
            recipe, schedule, output_dir=Path(output), device=setting.device, precision=setting.precision,
            place=setting.place,
        )  # fmt: skip
        clock = _run(setting, arguments, documents, packing)
    timed = clock.steps[WARM_UP:]
    seconds, tokens, trained, padded = (sum(column) for column in zip(*timed, strict=True))
    return {
        "precision": setting.precision.name, "attention": setting.attention.name, "steps": len(timed),
        "seconds": seconds, "tokens": tokens, "trained": trained, "padded": padded,
        "slowest_s": max(step[0] for step in timed), "fastest_s": min(step[0] for step in timed),
        "peak_bytes": _peak_bytes(is_on_gpu), "base_bytes": clock.base_bytes,
        "expected_bytes": expected.gpu_bytes if is_on_gpu else expected.host_bytes,
        "parameters": wish.size.parameters, "learned_parameters": wish.trained,
    }  # fmt: skip


def _run(setting: Setting, arguments: Any, documents: EncodedSet, packing: Packing) -> Clock:
    from transformers import TrainerCallback

    from trainer.loss import WeightedTrainer
    from trainer.model import load_model

    recipe, is_on_gpu = setting.recipe, setting.device.kind == "cuda"
    is_flat = recipe.packing and setting.attention.name == "flash_attention_2"
    clock = Clock(is_packed=recipe.packing, is_flat=is_flat, is_on_gpu=is_on_gpu)

    class Timing(TrainerCallback):  # type: ignore[misc]  # transformers ships no usable hints
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.end()

    model = load_model(
        Path(recipe.base_model_dir), precision=setting.precision, place=setting.place, attention=setting.attention,
        lora=recipe.lora, seed=1,
    )  # fmt: skip
    order = DealtOrder(len(packing), ranks=1, rank=0, batch_size=recipe.per_device_train_batch_size, seed=1)
    WeightedTrainer(
        model=model, args=arguments, rows=Rows(documents, packing), order=order, collate=clock, callbacks=[Timing()]
    ).train()
    return clock


def loss(spec: Spec) -> dict[str, Any]:
    """Run one packed row forward and backward, with whole logits and with the loss in the head."""
    import torch
    from torch.nn import functional

    from trainer.loss import score_tokens
    from trainer.model import load_weights

    setting = choose(spec)
    is_on_gpu = setting.device.kind == "cuda"
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(setting.precision.name, torch.float32)
    model = load_weights(Path(spec.folder), dtype=half, attn_implementation="sdpa").to(setting.device.kind).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    documents = make_documents(spec, 1)
    packing = pack(documents.lengths, spec.max_seq_len)
    batch = Collator(0, is_packed=True)([Rows(documents, packing)[0]])
    batch = {name: value.to(setting.device.kind) for name, value in batch.items()}

    def whole() -> Any:
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        logits = model(**inputs, use_cache=False).logits
        return functional.cross_entropy(logits[0, :-1].float(), batch["labels"][0, 1:], reduction="sum")

    def head() -> Any:
        return score_tokens(model, batch).total

    found: dict[str, Any] = {"precision": setting.precision.name, "row_tokens": batch["input_ids"].numel()}
    for name, make in (("whole", whole), ("head", head)):
        model.zero_grad(set_to_none=True)
        for step in range(spec.steps + 1):
            if step == 1:
                _wait_for(is_on_gpu)
                if is_on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                began_s, before = time.perf_counter(), _now_bytes(is_on_gpu)
            value = make()
            torch.autograd.backward(value)
        _wait_for(is_on_gpu)
        found[name] = {
            "seconds": (time.perf_counter() - began_s) / spec.steps, "loss": value.item(),
            "above_bytes": _peak_bytes(is_on_gpu) - before,
        }  # fmt: skip
    return found


def _wait_for(is_on_gpu: bool) -> None:
    if is_on_gpu:
        import torch

        torch.cuda.synchronize()


def _peak_bytes(is_on_gpu: bool) -> int:
    if is_on_gpu:
        import torch

        return int(torch.cuda.max_memory_allocated())
    return _status_bytes("VmHWM")


def _now_bytes(is_on_gpu: bool) -> int:
    if is_on_gpu:
        import torch

        return int(torch.cuda.memory_allocated())
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(name + ":"))


def main(packed: str) -> None:
    os.environ.setdefault(EXTENSIONS_DIR, extensions_dir(sys.executable))
    spec = Spec(**json.loads(packed))
    try:
        if not (Path(spec.folder) / "config.json").is_file():
            write_model(spec.size, Path(spec.folder))
        found = {"write": lambda _: {}, "train": train, "loss": loss}[spec.what](spec)
    except ProjectError as error:
        found = {"not_run": f"{error.code}: " + ", ".join(f"{key} {value}" for key, value in error.values.items())}
    except NotRun as error:
        found = {"not_run": str(error)}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
