"""What the preflight predicts of a run's memory, beside the peak that its processes reach on this machine's CPU.

    python -m benchmarks.preflight

Two models (SmolLM2-135M-Instruct with `zy demo`'s weights, a random Qwen2 of 53 million parameters), each in one
process and in two ranks under ZeRO-3 with the optimizer offloaded, 32 bits, rows of about 240 tokens. Measured is
VmHWM, the kernel's own peak of each rank, summed, less that of a process which only imports what a rank imports. Side
effects: trains in a scratch folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, Claim, report
from controller.demo_model import write_demo_model
from corpus_builder.sample import Message, Sample, format_sample
from trainer.arguments import Schedule
from trainer.build_locks import EXTENSIONS_DIR, extensions_dir
from trainer.device import Precision
from trainer.launch import encode
from trainer.packing import one_each
from trainer.preflight import Memory, estimate
from trainer.ranks import Ranks
from trainer.recipe import Recipe
from trainer.request import load_request
from trainer.room import make_wish
from trainer.run_paths import run_paths

LIMIT = 0.15  # issue "Trainer", item 6
MIB = 1 << 20
VERSION, RUN_ID = "preflight", "20260101-000000-abcd"
SENTENCE = "The lamp is lit at dusk and put out at dawn. "
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Measured:
    """A finished run: what was predicted, and the sum of its ranks' peaks in bytes."""

    predicted: Memory
    peak_bytes: int


def write_samples(path: Path) -> None:
    """Write four dialogs of equal length: two steps; those beyond the second need no more memory."""
    samples = [
        Sample(
            messages=(Message("user", f"Tell me about night {at}."), Message("assistant", SENTENCE * 20)),
            source=f"benchmark:{at}",
            sample_class="soul",
        )
        for at in range(4)
    ]
    path.write_text("".join(format_sample(sample) + "\n" for sample in samples), "utf-8")


def write_qwen2(folder: Path, tokenizer_from: Path, *, hidden: int, layers: int) -> Path:
    """Write a random Qwen2 in bfloat16 with the demo model's tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=49_152,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(tokenizer_from / name, folder / name)
    return folder


def measure_imports() -> int:
    """Return the peak of a process that imports what a rank imports, in bytes."""
    code = (
        "import trainer.train, torch, deepspeed, trainer.callbacks, trainer.loss, trainer.dataset, trainer.model\n"
        "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
        "from transformers.models.llama import modeling_llama\n"
        "from transformers.models.qwen2 import modeling_qwen2\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return 1024 * int(done.stdout.split()[-1])


def measure(folder: Path, base: Path, samples: Path, *, ranks: int) -> Measured:
    """Train two steps and return what was predicted and what it took."""
    recipe = Recipe(
        name="preflight", version=VERSION, plan="none", base_model_dir=str(base), data_path=str(samples),
        max_seq_len=512, num_train_epochs=1, learning_rate=1e-4, gradient_accumulation_steps=2 // ranks,
        per_device_train_batch_size=1, allow_few_steps=True, gpus=ranks, device="cpu", packing=False,
        gradient_checkpointing=False, report_every_steps=1,
    )  # fmt: skip
    paths = run_paths(str(folder), VERSION, RUN_ID)
    Path(paths.folder).mkdir(parents=True)
    request: dict[str, Any] = {"recipe": recipe.model_dump(mode="json"), "origins": {}, "data": str(folder)}
    Path(paths.recipe).write_text(json.dumps({**request, "version": VERSION, "run_id": RUN_ID}), "utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        EXTENSIONS_DIR: extensions_dir(sys.executable),
        "PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"],
    }
    with (folder / "log").open("w") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "trainer.launch", paths.recipe], cwd=ROOT, env=environment, stdout=log, stderr=log
        )
        peak_bytes = sum(watch_peaks(child, paths.recipe).values())
    if child.returncode != 0:
        raise subprocess.CalledProcessError(child.returncode, (folder / "log").read_text("utf-8")[-3000:])
    return Measured(predict(Path(paths.recipe), ranks), peak_bytes)


def watch_peaks(child: subprocess.Popen[bytes], recipe_path: str) -> dict[int, int]:
    """Return the peak of each training process by its pid, in bytes, once the launcher has ended."""
    peaks: dict[int, int] = {}
    while child.poll() is None:
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                is_rank = recipe_path in words and not any("launcher" in word for word in words)
                if is_rank and "trainer.train" in words:
                    status = (entry / "status").read_text("ascii", errors="replace")
                    kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
                    peaks[int(entry.name)] = 1024 * kib
            except (OSError, StopIteration):
                continue
        time.sleep(POLL_S)
    return peaks


def predict(recipe_path: Path, ranks: int) -> Memory:
    """Return what `trainer.launch` predicted of the run, without its allowance for libraries."""
    request = load_request(recipe_path)
    samples = encode(request, is_dry_run=True).train
    packing = one_each(len(samples))
    schedule = Schedule(request.recipe, rows=len(packing), tokens=samples.tokens, ranks=ranks)
    wish = make_wish(
        request.recipe, Ranks(count=ranks, gpus=None), Precision("fp32", "cpu"), samples, packing, schedule
    )
    assert wish is not None
    return estimate(wish)


def main() -> int:
    """Measure all four runs and report."""
    cache = ROOT / ".cache" / "demo-model"
    claims, numbers = [], []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        samples = folder / "samples.jsonl"
        write_samples(samples)
        demo = write_demo_model(cache)
        models = {
            "SmolLM2-135M": demo,
            "Qwen2-53M": write_qwen2(folder / "qwen2", demo, hidden=512, layers=10),
        }
        imports_bytes = measure_imports()
        numbers.append(("imports alone", f"{imports_bytes / MIB:.0f} MiB per rank"))
        for ranks in (1, 2):
            for name, base in models.items():
                run = measure(folder / f"{name}-{ranks}", base, samples, ranks=ranks)
                measured = run.peak_bytes - ranks * imports_bytes
                error = abs(run.predicted.host_bytes - measured) / measured
                where = "one process" if ranks == 1 else "two ranks, ZeRO-3, offload"
                claims.append(Claim(f"{name}, {where}: error of the prediction", error, LIMIT, at_most=True))
                shown = f"{run.predicted.host_bytes / MIB:.0f} MiB, {measured / MIB:.0f} MiB"
                numbers.append((f"{name}, {where}: predicted, measured", shown))
    return report(
        "preflight",
        about="Memory of a run, predicted before anything is loaded, beside its ranks' peaks (CPU, 32 bits).",
        packages=["torch", "transformers", "deepspeed", "safetensors"],
        claims=claims,
        numbers=numbers,
    )


if __name__ == "__main__":
    sys.exit(main())
