"""One way to begin a training, as a process that ends at the model's first forward pass.

    python -m benchmarks.first_forward WAY RECIPE.JSON

`ours`: `python -m trainer.train`. `datasets`: transformers' Trainer as its documentation has it, `load_dataset` and
`map` over the chat template. `lists`: the same Trainer on plain lists, with nothing between file and batch.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
from typing import Any

IGNORED = -100
COMMON = {
    "num_train_epochs": 1, "per_device_train_batch_size": 1, "save_strategy": "no", "report_to": [], "use_cpu": True,
    "bf16": False, "disable_tqdm": True, "gradient_accumulation_steps": 4,
}  # fmt: skip


def end_at_first_forward() -> None:
    """Have this process end where any module is first called."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    register_module_forward_pre_hook(lambda *_: os._exit(0))


def encode(tokenizer: Any, row: dict[str, Any]) -> dict[str, list[int]]:
    """Return ids and labels of one sample; all of it is learned, which costs the least."""
    ids = list(tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False))
    return {"input_ids": ids, "labels": ids}


def begin_huggingface(recipe_path: str, *, has_datasets: bool) -> None:
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainingArguments,
    )

    with open(recipe_path, encoding="utf-8") as file:
        recipe = json.load(file)["recipe"]
    base, samples = recipe["base_model_dir"], recipe["data_path"]
    tokenizer = AutoTokenizer.from_pretrained(base, pad_token="<|endoftext|>")
    with tempfile.TemporaryDirectory() as folder:
        rows: Any
        if has_datasets:
            from datasets import load_dataset  # type: ignore[import-not-found,unused-ignore]

            data = load_dataset("json", data_files=samples, split="train", cache_dir=folder)
            rows = data.map(lambda row: encode(tokenizer, row), remove_columns=data.column_names)
        else:
            with open(samples, encoding="utf-8") as file:
                rows = [encode(tokenizer, json.loads(line)) for line in file]
        Trainer(
            model=AutoModelForCausalLM.from_pretrained(base),
            args=TrainingArguments(output_dir=folder, **COMMON),  # type: ignore[arg-type,unused-ignore]
            train_dataset=rows,
            data_collator=DataCollatorForSeq2Seq(tokenizer),
        ).train()


def main(way: str, recipe_path: str) -> None:
    end_at_first_forward()
    if way == "ours":
        sys.argv = ["trainer.train", recipe_path]
        runpy.run_module("trainer.train", run_name="__main__", alter_sys=True)
    else:
        begin_huggingface(recipe_path, has_datasets=way == "datasets")
    raise RuntimeError("no model was ever called")


if __name__ == "__main__":
    main(*sys.argv[1:])
