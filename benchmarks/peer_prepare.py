"""What peers do with the samples before the first step, as a process.

    python -m benchmarks.peer_prepare PEER MODEL SAMPLES     prints JSON: seconds without imports, tokens that are left

`trl`: SFTTrainer of a random model with the real vocabulary, packing, loss on answers alone. `llamafactory`: its
`get_dataset` with packing. `original`: the first pipeline's way, `datasets.map` over `apply_chat_template`, then a
filter. All end with a data set ready to train. The tokenizer is loaded before the clock starts.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

#: As the house's, with the mark that TRL needs to find the answers.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
)
MAX_TOKENS = 4096


def load_tokenizer(model_dir: str) -> Any:
    """Return the tokenizer as transformers has it."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=f"{model_dir}/tokenizer.json", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def load_messages(samples: str, scratch: str) -> Any:
    """Return the data set; nothing of an earlier run is found in `scratch`."""
    from datasets import load_dataset  # type: ignore[import-not-found,unused-ignore]

    return load_dataset("json", data_files=samples, split="train", cache_dir=scratch).select_columns(["messages"])


def trl(model_dir: str, samples: str, scratch: str) -> Callable[[], Any]:
    """Let SFTTrainer prepare the data set."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found,unused-ignore]

    tokenizer = load_tokenizer(model_dir)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    arguments = SFTConfig(
        output_dir=scratch, assistant_only_loss=True, packing=True, max_length=MAX_TOKENS, report_to="none",
        use_cpu=True, bf16=False,
    )  # fmt: skip

    def prepare() -> Any:
        data = load_messages(samples, scratch)
        return SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer).train_dataset

    return prepare


def llamafactory(model_dir: str, samples: str, scratch: str) -> Callable[[], Any]:
    """Let LLaMA-Factory prepare the data set."""
    os.environ["DISABLE_VERSION_CHECK"] = "1"  # it pins peft and more that preparation does not touch
    audio = types.ModuleType("torchaudio")  # it imports this whatever it reads
    audio.__spec__ = ModuleSpec("torchaudio", None)
    sys.modules["torchaudio"] = audio
    from llamafactory.data import (  # type: ignore[import-not-found,unused-ignore]
        get_dataset,
        get_template_and_fix_tokenizer,
    )
    from llamafactory.hparams import get_train_args  # type: ignore[import-not-found,unused-ignore]

    roles = {f"{role}_tag": role for role in ("user", "assistant", "system")}
    described = {
        "file_name": str(Path(samples).absolute()), "formatting": "sharegpt", "columns": {"messages": "messages"},
        "tags": {"role_tag": "role", "content_tag": "content", **roles},
    }  # fmt: skip
    Path(scratch, "dataset_info.json").write_text(json.dumps({"chats": described}))
    os.environ["HF_DATASETS_CACHE"] = scratch
    model, data, training, _, _ = get_train_args(
        {
            "stage": "sft", "do_train": True, "finetuning_type": "full", "model_name_or_path": model_dir,
            "dataset": "chats", "dataset_dir": scratch, "template": "qwen", "cutoff_len": MAX_TOKENS, "packing": True,
            "neat_packing": True, "output_dir": f"{scratch}/out", "use_cpu": True, "report_to": "none",
            "overwrite_cache": True, "cache_dir": scratch,
        }
    )  # fmt: skip
    tokenizer = load_tokenizer(model_dir)
    template = get_template_and_fix_tokenizer(tokenizer, data)

    def prepare() -> Any:
        return get_dataset(template, model, data, training, stage="sft", tokenizer=tokenizer)["train_dataset"]

    return prepare


def original(model_dir: str, samples: str, scratch: str) -> Callable[[], Any]:
    """Encode sample by sample, mark the answers by their header's ids, cut at the window, drop what teaches nothing."""
    tokenizer = load_tokenizer(model_dir)
    header = tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def encode(row: dict[str, Any]) -> dict[str, list[int]]:
        ids = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False)[:MAX_TOKENS]
        labels, at = [-100] * len(ids), 0
        while at < len(ids):
            if ids[at : at + len(header)] != header:
                at += 1
                continue
            at += len(header)
            while at < len(ids):
                labels[at] = ids[at]
                at += 1
                if ids[at - 1] == stop:
                    break
        return {"input_ids": ids, "labels": labels}

    def prepare() -> Any:
        data = load_messages(samples, scratch)
        encoded = data.map(encode, num_proc=1, remove_columns=data.column_names)
        return encoded.filter(lambda row: any(label != -100 for label in row["labels"]))

    return prepare


def main(peer: str, model_dir: str, samples: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        prepare = {"trl": trl, "llamafactory": llamafactory, "original": original}[peer](model_dir, samples, scratch)
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        rows = prepare()
        took = {"wall_s": time.perf_counter() - wall_s, "cpu_s": time.process_time() - cpu_s}
        tokens = sum(len(row) for row in rows["input_ids"])
        print(json.dumps({**took, "tokens": tokens}))


if __name__ == "__main__":
    main(*sys.argv[1:])
