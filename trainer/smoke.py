"""Two optimizer steps of a tiny random model, the whole way of a real run: does this environment train?

    python -m trainer.smoke FOLDER < REQUEST
    REQUEST = {"ranks": 2, "gpus": null | [numbers], "recipe": {"deepspeed", "device", …}}     keys of a recipe

Needs no network. Side effects: writes model, samples, recipe and run into FOLDER, then becomes `trainer.launch`
(`os.execve`), whose exit code and lines are a run's; the caller deletes the folder.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from corpus_builder.sample import Message, Sample, format_sample
from trainer.launch import main as launch
from trainer.recipe import Recipe
from trainer.run_paths import run_paths
from trainer.tiny_model import BYTE_VOCABULARY, write_byte_tokenizer, write_weights

STEPS = 2
VERSION, RUN_ID = "smoke", "20000101-000000-0000"
WINDOW = 128


def write_run(folder: Path, request: Mapping[str, Any]) -> Path:
    """Write everything that a run of STEPS steps reads, and return its `recipe.json`."""
    model_dir, samples = folder / "model", folder / "samples.jsonl"
    write_weights(model_dir, vocab_size=BYTE_VOCABULARY, positions=WINDOW)
    write_byte_tokenizer(model_dir)
    count = STEPS * int(request["ranks"])
    samples.write_text("".join(format_sample(_sample(number)) + "\n" for number in range(count)), "utf-8")
    recipe = Recipe(
        name=VERSION,
        version=VERSION,
        plan=VERSION,
        base_model_dir=str(model_dir),
        data_path=str(samples),
        max_seq_len=WINDOW,
        num_train_epochs=1,
        gradient_accumulation_steps=1,
        warmup_ratio=0.0,
        allow_few_steps=True,
        packing=False,
        gpus=request["gpus"] or request["ranks"],
        report_every_steps=1,
        save_steps=1000,
        **request["recipe"],
    )
    data = folder / "data"
    paths = run_paths(str(data), VERSION, RUN_ID)
    Path(paths.folder).mkdir(parents=True)
    packed = {"recipe": recipe.model_dump(mode="json"), "origins": {}, "data": str(data), "version": VERSION,
              "run_id": RUN_ID, "resume_from": None}  # fmt: skip
    Path(paths.recipe).write_text(json.dumps(packed), "utf-8")
    return Path(paths.recipe)


def _sample(number: int) -> Sample:
    """Return one of the samples; all as long as each other, near enough, and no two alike."""
    messages = (Message("user", f"Is lamp {number} lit?"), Message("assistant", f"Lamp {number} is lit. 灯亮着"))
    return Sample(messages=messages, source=f"smoke:{number}", sample_class="data")


def main(argv: Sequence[str]) -> int:
    """Write the run and start it."""
    os.umask(0o077)
    (folder,) = argv
    return launch([str(write_run(Path(folder), json.load(sys.stdin)))])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
