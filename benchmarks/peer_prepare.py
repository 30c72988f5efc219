"""What peers do with the samples before the first step, as a process.

    python -m benchmarks.peer_prepare PEER MODEL SAMPLES

`trl`: SFTTrainer of a random model with the real vocabulary, packing, loss on answers alone. `original`: the first
pipeline's way, `datasets.map` over `apply_chat_template`, then a filter. Both end with a data set ready to train.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

#: As the house's, with the mark that TRL needs to find the answers.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
)
MAX_TOKENS = 4096


def load(model_dir: str, samples: str, scratch: str) -> tuple[Any, Any]:
    """Return tokenizer and data set; nothing of an earlier run is found in `scratch`."""
    from datasets import load_dataset
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=f"{model_dir}/tokenizer.json", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    data = load_dataset("json", data_files=samples, split="train", cache_dir=scratch)
    return tokenizer, data.select_columns(["messages"])


def trl(tokenizer: Any, data: Any, scratch: str) -> None:
    """Let SFTTrainer prepare the data set."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found,unused-ignore]

    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1,
    )  # fmt: skip
    arguments = SFTConfig(
        output_dir=scratch, assistant_only_loss=True, packing=True, max_length=MAX_TOKENS, report_to="none",
        use_cpu=True, bf16=False,
    )  # fmt: skip
    SFTTrainer(model=Qwen2ForCausalLM(config), args=arguments, train_dataset=data, processing_class=tokenizer)


def original(tokenizer: Any, data: Any, scratch: str) -> None:
    """Encode sample by sample, mark the answers by their header's ids, cut at the window, drop what teaches nothing."""
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

    encoded = data.map(encode, num_proc=1, remove_columns=data.column_names)
    encoded.filter(lambda row: any(label != -100 for label in row["labels"]))


if __name__ == "__main__":
    peer, model_dir, samples = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        {"trl": trl, "original": original}[peer](*load(model_dir, samples, scratch), scratch)
