"""One way to train a model on the CPU, as a process: the same documents, optimizer and model in each.

    python -m benchmarks.train_step WAY MODEL PASSES

A pass is one optimizer step over all documents. Prints one JSON line: `seconds` of each pass after the first, which
warms up; `losses`, one per pass; `base_mb` before the first, `peak_mb` at the end; `trained_tokens` per pass.

`whole`: packed rows, whole logits, a plain loop. `head`: the same with the loss in the head. `ours`: the project's
Trainer, packed. `huggingface`: the Trainer as most use it, one document per micro-batch. `trl`: SFTTrainer, packed,
without padding, with its own chunked loss.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.measure import ROOT
from trainer.encoded import EncodedSet
from trainer.packing import pack

LEARNING_RATE = 1e-4
TRAINED_SHARE = 0.6  # of a document's tokens; the answers of a chat


@dataclass(frozen=True, slots=True)
class Size:
    """A model and its documents. `capacity`: tokens of a packed row."""

    config: dict[str, Any]
    lengths: tuple[int, ...]
    capacity: int


SIZES = {
    "large_vocabulary": Size(  # Qwen2.5's vocabulary on a small body
        {"model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 256, "intermediate_size": 1024,
         "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
        (1100, 700, 520, 420, 360, 300, 240, 200, 140, 100),
        2048,
    ),
    "smollm2": Size(  # SmolLM2-135M's shape
        {"model_type": "llama", "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536,
         "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
        (620, 400, 380, 280, 200, 130),
        1024,
    ),
}  # fmt: skip


def make_documents(size: Size) -> EncodedSet:
    """Return random documents: a prompt that isn't learned, then an answer that is."""
    random = np.random.default_rng(5)
    starts = np.concatenate([[0], np.cumsum(size.lengths)])
    is_trained = np.zeros(starts[-1], dtype=bool)
    for start, length in zip(starts, size.lengths, strict=False):
        is_trained[start + round(length * (1 - TRAINED_SHARE)) : start + length] = True
    return EncodedSet(
        ids=random.integers(10, size.config["vocab_size"], starts[-1]).astype(np.int32),
        is_trained=is_trained,
        starts=starts.astype(np.int64),
        weights=np.ones(len(size.lengths), dtype=np.float32),
        class_indices=np.zeros(len(size.lengths), dtype=np.int8),
    )


def make_model(size: Size) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**size.config), attn_implementation="sdpa")


class Clock:
    """Takes the seconds and the loss of each pass, and the memory before the first."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.base_mb = 0.0

    @contextlib.contextmanager
    def one_pass(self) -> Iterator[None]:
        self.begin()
        yield
        self.end()

    def begin(self) -> None:
        self.base_mb = self.base_mb or _memory_mb("VmRSS")
        self._began_s = time.perf_counter()

    def end(self) -> None:
        self.seconds.append(time.perf_counter() - self._began_s)


def _memory_mb(field: str) -> float:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(field + ":"))


def train_plainly(size: Size, passes: int, clock: Clock, *, is_in_head: bool) -> None:
    """Train packed rows, one per micro-batch, in a loop of a few lines."""
    import torch
    from torch.nn import functional

    from trainer.dataset import Collator, Rows
    from trainer.loss import score_tokens

    documents, model = make_documents(size), make_model(size).train()
    packing = pack(documents.lengths, size.capacity)
    rows, collate = Rows(documents, packing), Collator(0, is_packed=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for _ in range(passes):
        with clock.one_pass():
            loss_of_pass = 0.0
            for index in range(len(packing)):
                batch = collate([rows[index]])
                if is_in_head:
                    total = score_tokens(model, batch).total
                else:
                    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
                    total = functional.cross_entropy(
                        logits.logits[0, :-1].float(), batch["labels"][0, 1:], reduction="sum"
                    )
                loss = total / documents.trained_tokens
                torch.autograd.backward(loss)
                loss_of_pass += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        clock.losses.append(loss_of_pass)


def trainer_arguments(folder: str, *, accumulation: int, passes: int) -> dict[str, Any]:
    return {
        "output_dir": folder, "per_device_train_batch_size": 1, "gradient_accumulation_steps": accumulation,
        "max_steps": passes, "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant", "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True,
        "gradient_checkpointing": False, "optim": "adamw_torch",
    }  # fmt: skip


def timing(clock: Clock) -> Any:
    """Return the callback that lets the clock see each optimizer step."""
    from transformers import TrainerCallback

    class Timing(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.end()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            if logs and "loss" in logs:
                clock.losses.append(logs["loss"])

    return Timing()


def train_ours(size: Size, passes: int, clock: Clock, folder: str) -> None:
    from transformers import TrainingArguments

    from trainer.dataset import Collator, DealtOrder, Rows
    from trainer.loss import WeightedTrainer

    documents = make_documents(size)
    packing = pack(documents.lengths, size.capacity)
    arguments = trainer_arguments(folder, accumulation=len(packing), passes=passes)
    WeightedTrainer(
        model=make_model(size),
        args=TrainingArguments(**arguments, remove_unused_columns=False),
        rows=Rows(documents, packing),
        order=DealtOrder(len(packing), ranks=1, rank=0, batch_size=1, seed=1),
        collate=Collator(0, is_packed=True),
        callbacks=[timing(clock)],
    ).train()


def train_huggingface(size: Size, passes: int, clock: Clock, folder: str) -> None:
    from transformers import Trainer, TrainingArguments, default_data_collator

    documents = make_documents(size)
    rows = [
        {"input_ids": documents.ids_of(at).tolist(), "labels": documents.labels_of(at).tolist()}
        for at in range(len(documents))
    ]
    arguments = trainer_arguments(folder, accumulation=len(rows), passes=passes)
    Trainer(
        model=make_model(size),
        args=TrainingArguments(**arguments),
        train_dataset=rows,
        data_collator=default_data_collator,  # one document per micro-batch: nothing to pad
        callbacks=[timing(clock)],
    ).train()


def train_trl(size: Size, passes: int, clock: Clock, folder: str) -> None:
    from datasets import Dataset  # type: ignore[import-not-found,unused-ignore]
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found,unused-ignore]

    documents = make_documents(size)
    data = Dataset.from_dict(
        {
            "input_ids": [documents.ids_of(at).tolist() for at in range(len(documents))],
            "completion_mask": [
                documents.is_trained[documents.span(at)].astype(int).tolist() for at in range(len(documents))
            ],
        }
    )
    rows = len(pack(documents.lengths, size.capacity))
    arguments = SFTConfig(
        **trainer_arguments(folder, accumulation=rows, passes=passes),
        packing=True, max_length=size.capacity, completion_only_loss=True, padding_free=True,
    )  # fmt: skip
    SFTTrainer(
        model=make_model(size),
        args=arguments,
        train_dataset=data,
        processing_class=any_tokenizer(PreTrainedTokenizerFast),
        callbacks=[timing(clock)],
    ).train()


def any_tokenizer(fast: Any) -> Any:
    """Return a tokenizer of two words: TRL asks for one, the documents are ids already."""
    from tokenizers import Tokenizer, models

    words = models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")
    return fast(tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<eos>")


@dataclass(frozen=True, slots=True)
class Side:
    """What a way of training took."""

    seconds: float
    losses: tuple[float, ...]
    base_mb: float
    peak_mb: float
    trained_tokens: int

    @property
    def above_base_mb(self) -> float:
        return self.peak_mb - self.base_mb

    def row(self) -> str:
        speed = self.trained_tokens / self.seconds
        return (
            f"{self.seconds:.2f} s per pass, {speed:.0f} trained tokens/s, "
            f"{self.above_base_mb:.0f} MB above a base of {self.base_mb:.0f} MB"
        )


def run_side(way: str, size: str, *, passes: int, python: str = sys.executable) -> Side:
    """Run one way as a process and return what its fastest pass took."""
    command = [python, "-m", "benchmarks.train_step", way, size, str(passes)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return Side(min(found["seconds"]), tuple(found["losses"]), *(found[key] for key in
                ("base_mb", "peak_mb", "trained_tokens")))  # fmt: skip


def main(way: str, size_name: str, passes: int) -> None:
    size, clock = SIZES[size_name], Clock()
    with tempfile.TemporaryDirectory() as folder:
        if way in ("whole", "head"):
            train_plainly(size, passes, clock, is_in_head=way == "head")
        else:
            trains = {"ours": train_ours, "huggingface": train_huggingface, "trl": train_trl}
            trains[way](size, passes, clock, folder)
    found = {
        "seconds": clock.seconds[1:],
        "losses": clock.losses,
        "base_mb": clock.base_mb,
        "peak_mb": _memory_mb("VmHWM"),
        "trained_tokens": make_documents(size).trained_tokens,
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    way_name, size_name, passes_text = sys.argv[1:]
    main(way_name, size_name, int(passes_text))
