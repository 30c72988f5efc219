"""From the launch of a process to the model's first forward pass: ours against Hugging Face's Trainer.

471 samples, a tokenizer of Qwen's size, a random model of two layers: what is measured is imports, reading, encoding
and setting up, one process, warm page cache. Hugging Face's Trainer as its documentation has it, with `datasets`; and
without, on plain lists, which nobody's guide shows. Ours checks the base, the corpus and every label besides.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from benchmarks.generated import Writer
from benchmarks.measure import Claim, report, run_child
from benchmarks.peers import trl_python
from corpus_builder.frame import CHAT_TEMPLATE
from corpus_builder.sample import Message, Sample, format_sample
from tests.tokenizers_real import qwen_tokenizer_json, write_tokenizer_folder

SAMPLES = 471
ROUNDS = 5


def write_recipe(folder: Path) -> Path:
    """Write base model, samples and recipe; return the recipe's path."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    base = folder / "base"
    config = Qwen2Config(
        vocab_size=151_936, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(base)
    write_tokenizer_folder(base, qwen_tokenizer_json(), CHAT_TEMPLATE)
    writer = Writer(4)
    samples = (
        Sample(
            messages=(Message("user", writer.paragraph(1, 3)), Message("assistant", writer.answer())),
            source=f"chat:{number}",
            sample_class="soul",
            weight=1.0,
        )
        for number in range(SAMPLES)
    )
    (folder / "samples.jsonl").write_text("".join(format_sample(sample) + "\n" for sample in samples), "utf-8")
    recipe = {
        "name": "start", "version": "start_v1", "plan": "start", "base_model_dir": str(base), "gpus": 1,
        "data_path": str(folder / "samples.jsonl"), "device": "cpu", "allow_few_steps": True,
    }  # fmt: skip
    path = folder / "recipe.json"
    whole = {"recipe": recipe, "data": str(folder), "version": "start_v1", "run_id": "20260101-000000-abcd"}
    path.write_text(json.dumps(whole), "utf-8")
    return path


def main() -> int:
    pythons = {"ours": sys.executable, "datasets": trl_python(), "lists": sys.executable}
    best = dict.fromkeys(pythons, float("inf"))
    with tempfile.TemporaryDirectory() as scratch:
        recipe = write_recipe(Path(scratch))
        for _ in range(ROUNDS):
            for way, python in pythons.items():
                took = run_child([python, "-m", "benchmarks.first_forward", way, str(recipe)])
                best[way] = min(best[way], took.wall_s)
    return report(
        "start_up",
        about=(__doc__ or "").strip(),
        packages=("torch", "transformers", "accelerate", "peft"),
        claims=[
            Claim("time to the first forward, of Hugging Face's", best["ours"] / best["datasets"], 0.8, at_most=True)
        ],
        numbers=[
            ("ours", f"{best['ours']:.2f} s"),
            ("Trainer with datasets", f"{best['datasets']:.2f} s"),
            ("Trainer on plain lists", f"{best['lists']:.2f} s"),
            ("ours, of the Trainer on plain lists", f"{best['ours'] / best['lists']:.2f}"),
        ],
    )


if __name__ == "__main__":
    raise SystemExit(main())
