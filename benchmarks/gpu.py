"""What only a GPU can show: speed, memory and precision of the product's own training, on whatever GPU there is.

    python -m benchmarks.gpu [--small-cpu]

Random models of Qwen2.5's shapes (0.5B and 7B), written on the spot: no download. Every part is a process of its own.
What can't run here is named with the reason. Without a GPU nothing is claimed: exit 2. `--small-cpu` runs the same code
on a toy model, to know that this script works; its numbers say nothing and are not kept.

MFU counts 6 floating-point operations per parameter and token (4 where the weights are frozen), none for attention's
own products and none for recomputed layers, of the GPU's dense 16-bit peak. Exit 1: a claim fails or a part breaks.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_part import WARM_UP, Spec
from benchmarks.measure import ROOT, Claim, report
from corpus_builder.errors import parse_error_line
from tests.tiny_run import make_run, tiny_samples
from tests.tokenizers_real import tiny_tokenizer_json, write_tokenizer_folder
from trainer.preflight import GIB, peak_tflops
from trainer.progress import Event, Progress, parse_line
from trainer.ranks import Ranks, alone_argv, free_port, rank_environment, train_argv

#: Source: design, section 6: LLM Foundry's 7B at 4,096 tokens on an H100; preflight.
FOUNDRY_TOKENS_PER_S, LEAST_MFU, PREFLIGHT_OFF = 8611.0, 0.40, 0.10
PART_S = 1500.0
LORA = {"lora": {"r": 16}}
#: What stays unproven until this has run on a GPU.
SUBJECTS = (
    "fp16 and bf16 training steps (tokens/s, MFU)", "packing's gain over padding", "FlashAttention beside SDPA",
    "the loss in the head beside whole logits", "LoRA and QLoRA", "Liger's kernels", "a real search for the fp16 scale",
    "the preflight's memory on a GPU", "the stall of a checkpoint",
)  # fmt: skip


Numbers = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a part gave: numbers, or why it gave none. `is_broken`: it should have run."""

    numbers: Numbers | None
    reason: str = ""
    is_broken: bool = False


class Parts:
    """Runs the parts and keeps the rows of the page, the claims, and what broke."""

    def __init__(self, scratch: Path, *, is_small: bool) -> None:
        self.scratch, self.is_small = scratch, is_small
        self.rows: list[tuple[str, str]] = []
        self.claims: list[Claim] = []
        self.broken: list[str] = []

    def run(
        self, name: str, what: str, size: str, *, is_launched: bool = False, **keys: Any
    ) -> Mapping[str, Any] | None:
        """Run one part; return its numbers, None where it gave none, which the page then says."""
        outcome = self._spawn(self.spec(what, size, keys), is_launched=is_launched)
        self.note(name, outcome)
        return outcome.numbers

    def note(self, name: str, outcome: Outcome) -> None:
        """Enter a part that gave nothing, and say how a part went."""
        if outcome.numbers is None:
            self.rows.append((name, f"{'BROKEN' if outcome.is_broken else 'not run'}: {outcome.reason}"))
            if outcome.is_broken:
                self.broken.append(name)
        print(f"{name}: {outcome.reason or 'measured'}", file=sys.stderr, flush=True)

    def spec(self, what: str, size: str, keys: Mapping[str, Any]) -> Spec:
        folder = str(self.scratch / ("toy" if self.is_small else size))
        if self.is_small:  # the same way with numbers that a laptop can take; half precision needs a GPU
            keys = {key: value for key, value in keys.items() if key != "precision"}
            return Spec(what=what, size="toy", folder=folder, steps=2, tokens_per_step=512, max_seq_len=128, keys=keys)
        return Spec(what=what, size=size, folder=folder, keys=keys)

    def _spawn(self, spec: Spec, *, is_launched: bool) -> Outcome:
        argv = [sys.executable, "-m", "benchmarks.gpu_part", spec.packed()]
        environment = rank_environment(self.ranks, os.environ) | {"PYTHONPATH": str(ROOT)}
        if not self.is_small:
            environment["CUDA_VISIBLE_DEVICES"] = "0"  # else transformers would wrap all GPUs in DataParallel
        if is_launched:
            rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
            environment |= rank | {"MASTER_PORT": str(free_port())}
            environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), environment["PATH"]))
            if self.is_small:
                environment["DS_ACCELERATOR"] = "cpu"
        try:
            done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PART_S)
        except subprocess.TimeoutExpired:
            return Outcome(None, f"still running after {PART_S:.0f} s", is_broken=True)
        lines = done.stdout.splitlines()
        if done.returncode != 0 or not lines or not lines[-1].startswith("{"):
            said = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit {done.returncode}"]
            return Outcome(None, said[-1][:300], is_broken=True)
        found = json.loads(lines[-1])
        return Outcome(None, found["not_run"]) if "not_run" in found else Outcome(found)

    @property
    def ranks(self) -> Ranks:
        """One rank on the first GPU, or on the CPU."""
        return Ranks(count=1, gpus=None if self.is_small else (0,))


def measure_steps(parts: Parts, peak: float | None) -> None:
    """Time training steps in each precision, size and method, beside what the preflight expected of their memory."""
    whole: list[tuple[str, str, bool, dict[str, Any]]] = [
        ("0.5B, all weights, bf16", "0.5b", False, {"precision": "bf16"}),
        ("0.5B, all weights, fp16", "0.5b", False, {"precision": "fp16"}),
        ("0.5B, all weights, ZeRO-3 with offload", "0.5b", True, {"deepspeed": "zero3_offload"}),
        ("7B, all weights, ZeRO-3", "7b", True, {"deepspeed": "zero3"}),
        ("7B, all weights, ZeRO-3 with offload", "7b", True, {"deepspeed": "zero3_offload"}),
        ("7B, LoRA", "7b", False, LORA),
        ("7B, QLoRA", "7b", False, {"lora": {"r": 16, "load_in_4bit": True}}),
    ]
    best_of_7b = 0.0, 0.0
    for name, size, is_launched, keys in whole:
        found = parts.run(name, "train", size, is_launched=is_launched, **keys)
        if found is None:
            continue
        speed, share = found["tokens"] / found["seconds"], _mfu(found, peak)
        parts.rows.append((name, _step_row(found, share)))
        _claim_memory(parts, name, found, is_quantized=bool(keys.get("lora", {}).get("load_in_4bit")))
        if size == "7b" and "lora" not in keys:
            best_of_7b = max(best_of_7b, (speed, share or 0.0))
    if best_of_7b[0] and not parts.is_small:
        parts.claims.append(Claim("7B at 4,096: tokens/s of LLM Foundry's", best_of_7b[0] / FOUNDRY_TOKENS_PER_S, 1))
        if peak is not None:
            parts.claims.append(Claim("7B at 4,096: MFU", best_of_7b[1], LEAST_MFU))


def _mfu(found: Numbers, peak: float | None) -> float | None:
    """Return the share of the peak that a part reached, None where the GPU's peak is not known."""
    per_token = 4 * found["parameters"] + 2 * min(found["learned_parameters"], found["parameters"])
    return None if peak is None else per_token * found["tokens"] / found["seconds"] / (peak * 1e12)


def _step_row(found: Numbers, share: float | None) -> str:
    mfu = "MFU unknown" if share is None else f"MFU {share:.1%}"
    return (
        f"{found['precision']}, {found['attention']}: {found['tokens'] / found['seconds']:,.0f} tok/s, {mfu}; "
        f"steps {found['fastest_s']:.3f} to {found['slowest_s']:.3f} s; peak {found['peak_bytes'] / GIB:.2f} GiB, "
        f"the preflight expected {found['expected_bytes'] / GIB:.2f}"
    )


def _claim_memory(parts: Parts, name: str, found: Numbers, *, is_quantized: bool) -> None:
    """Claim the preflight's number; on the toy it is drowned by libraries, in 4 bits it counts 16."""
    if not parts.is_small and not is_quantized:
        off = abs(found["expected_bytes"] / found["peak_bytes"] - 1)
        parts.claims.append(Claim(f"preflight's memory, {name}: off by", off, PREFLIGHT_OFF, at_most=True))


def measure_packing(parts: Parts) -> None:
    """Compare tokens per second, padding not counted, of packed rows and of padded batches of four."""
    packed = parts.run("packed rows", "train", "0.5b", packing=True)
    padded = parts.run("padded rows", "train", "0.5b", packing=False, per_device_train_batch_size=4)
    if packed and padded:
        gain = (packed["tokens"] / packed["seconds"]) / (padded["tokens"] / padded["seconds"])
        wasted = 1 - padded["tokens"] / padded["padded"]
        parts.rows.append(
            ("packing over padding", f"{gain:.2f} × tokens/s; the padded batches are {wasted:.0%} padding")
        )


def measure_attention(parts: Parts) -> None:
    """Compare FlashAttention 2 with SDPA on packed rows."""
    sdpa = parts.run("SDPA, packed", "train", "0.5b", attn_implementation="sdpa")
    flash = parts.run("FlashAttention 2, packed", "train", "0.5b", attn_implementation="flash_attention_2")
    if sdpa and flash:
        gain = (flash["tokens"] / flash["seconds"]) / (sdpa["tokens"] / sdpa["seconds"])
        parts.rows.append(("FlashAttention 2 over SDPA", f"{gain:.2f} × tokens/s"))


def measure_liger(parts: Parts) -> None:
    """Compare Liger's kernels with torch's."""
    plain = parts.run("torch's kernels", "train", "0.5b", use_liger_kernel=False)
    liger = parts.run("Liger's kernels", "train", "0.5b", use_liger_kernel=True)
    if plain and liger:
        gain = (liger["tokens"] / liger["seconds"]) / (plain["tokens"] / plain["seconds"])
        memory = liger["peak_bytes"] / plain["peak_bytes"]
        parts.rows.append(("Liger over torch", f"{gain:.2f} × tokens/s, {memory:.2f} × peak memory"))


def measure_loss(parts: Parts) -> None:
    """Compare the loss in the head with whole logits, in time and in memory above the model."""
    for size in ("0.5b", "7b"):
        name = f"{size.upper()}, loss in the head"
        found = parts.run(name, "loss", size)
        if found is None:
            continue
        head, whole = found["head"], found["whole"]
        parts.rows.append(
            (name, f"{found['precision']}, {found['row_tokens']:,} tokens: {head['seconds']:.3f} s beside "
             f"{whole['seconds']:.3f} s with whole logits; {head['above_bytes'] / GIB:.2f} GiB above the model beside "
             f"{whole['above_bytes'] / GIB:.2f}; losses {head['loss']:.2f} and {whole['loss']:.2f}")
        )  # fmt: skip
        if parts.is_small:
            off = abs(head["loss"] / whole["loss"] - 1)
            parts.claims.append(Claim("both losses, in 32 bits: off by", off, 1e-5, at_most=True))


def measure_run(parts: Parts, name: str, *, is_launched: bool, **keys: Any) -> None:
    """Run the product itself, from its recipe: what it says of the fp16 scale, and how long a checkpoint stops it."""
    written = parts.run(f"{name}: the model", "write", "0.5b")
    if written is None:
        return
    base = Path(parts.spec("write", "0.5b", {}).folder)
    samples = tiny_samples(60)
    tokenizer_json = tiny_tokenizer_json(message.content for sample in samples for message in sample.messages)
    write_tokenizer_folder(base, tokenizer_json, "")
    wanted = {} if parts.is_small else {"device": "cuda", **keys}
    run = make_run(
        parts.scratch / name.replace(" ", "-"), base, samples,
        **{"gpus": 1, "num_train_epochs": 6, "tokens_per_step": 250, "save_steps": 12, "packing": True} | wanted,
    )  # fmt: skip
    argv = (
        train_argv(run.paths.recipe, sys.executable, ranks=1, gpus=parts.ranks.gpus, master_port=free_port())
        if is_launched
        else alone_argv(run.paths.recipe, sys.executable)
    )
    said = list(_listen(argv, rank_environment(parts.ranks, os.environ) | {"PYTHONPATH": str(ROOT)}))
    outcome = _read_run(said)
    parts.note(name, outcome)
    if outcome.numbers is not None:
        parts.rows.append((name, "{precision}: {steps} steps, the scale was reduced {reduced} times, to {scale}; "
                           "a step takes {step_s:.3f} s, a checkpoint stops it for {stall_s:.2f} s".format_map(
                               outcome.numbers)))  # fmt: skip


def _listen(argv: list[str], environment: dict[str, str]) -> Iterator[tuple[float, str]]:
    """Yield what a process says, with the time at which it came; at the end its exit code."""
    environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), environment["PATH"]))
    with subprocess.Popen(
        argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            yield time.monotonic(), line
    yield time.monotonic(), f"exit {child.returncode}"


def _read_run(said: list[tuple[float, str]]) -> Outcome:
    """Return the numbers of a whole run from what it said."""
    if said[-1][1] != "exit 0":
        errors = [error for _, line in said if (error := parse_error_line(line)) is not None]
        if errors and errors[0].code in ("precision_unsupported", "method_unsupported", "memory_short", "gpus_missing"):
            return Outcome(None, errors[0].code)
        return Outcome(None, " / ".join(line.strip() for _, line in said[-3:])[:300], is_broken=True)
    items = [(at_s, item) for at_s, line in said for item in parse_line(line)]
    times = {item.step: at_s for at_s, item in items if isinstance(item, Progress)}
    events = [item for _, item in items if isinstance(item, Event)]
    saved = {int(event.values["step"]) for event in events if event.name == "checkpoint_saved"}
    gaps = {step: times[step + 1] - times[step] for step in times if step + 1 in times}
    plain = statistics.median(gap for step, gap in gaps.items() if step > WARM_UP and step not in saved)
    stalls = [gap - plain for step, gap in gaps.items() if step in saved]
    reduced = [event for event in events if event.name == "scale_reduced"]
    return Outcome(
        {
            "precision": next(event.values["precision"] for event in events if event.name == "precision"),
            "steps": max(times), "reduced": len(reduced), "step_s": plain, "stall_s": max(stalls),
            "scale": reduced[-1].values["scale"] if reduced else "nothing",
        }
    )  # fmt: skip


def gpu_name() -> str | None:
    """Return the name of the first GPU that torch can use, None without one."""
    code = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    return done.stdout.strip() or None


def main(*, is_small: bool) -> int:
    name = None if is_small else gpu_name()
    if name is None and not is_small:
        print("no GPU: unproven here, and claimed nowhere, are")
        print("\n".join(f"- {subject}" for subject in SUBJECTS))
        return 2
    with tempfile.TemporaryDirectory(prefix="gpu-") as scratch:
        parts = Parts(Path(scratch), is_small=is_small)
        measure_steps(parts, None if name is None else peak_tflops(name))
        measure_packing(parts)
        measure_attention(parts)
        measure_liger(parts)
        measure_loss(parts)
        measure_run(parts, "fp16 run", is_launched=False, precision="fp16")
        measure_run(parts, "fp16 run under DeepSpeed", is_launched=True, precision="fp16", deepspeed="zero3_offload")
    exit_code = report(
        "gpu",
        about=f"{(__doc__ or '').strip()}\n\nOn {name or 'a CPU, a toy model: the numbers say nothing'}.",
        packages=("torch", "transformers", "deepspeed", "peft", "bitsandbytes", "flash-attn", "liger-kernel"),
        claims=parts.claims,
        numbers=parts.rows,
        is_kept=not is_small,
    )
    return max(exit_code, int(bool(parts.broken)))


if __name__ == "__main__":
    unknown = set(sys.argv[1:]) - {"--small-cpu"}
    raise SystemExit(f"unknown: {', '.join(sorted(unknown))}" if unknown else main(is_small="--small-cpu" in sys.argv))
