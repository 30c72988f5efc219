"""Samples on the disk to packed, proved arrays, against the raw tokenizer and against peers.

    python -m benchmarks.prepare [SAMPLES …]     sizes, 5000 and 20000 unless named

Peers are installed once, each into an environment of its own below `.cache/peers` that borrows torch from this one.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from benchmarks.chats import write_chats
from benchmarks.measure import ROOT, Claim, report, run_child
from benchmarks.peers import INSTALLED, PEERS_DIR, trl_python
from tests.tokenizers_real import QWEN_TEMPLATE, qwen_tokenizer_json, write_tokenizer_folder

ROUNDS = 3
#: Samples up to which peers are measured.
WITH_PEERS = 5000
FIRST_USER = 471
#: What LLaMA-Factory's preparation needs; it pins other versions than ours of what it does not touch here.
LLAMA_FACTORY_NEEDS = (
    "datasets==4.0.0", "httpx", "omegaconf", "fire", "einops", "tyro", "sentencepiece", "av", "typer",
)  # fmt: skip
LLAMA_FACTORY = (
    "llamafactory==0.9.5", "transformers==5.6.0", "trl==0.24.0", "tokenizers==0.22.2", "huggingface_hub==1.8.0",
    "modelscope==1.40.2",
)  # fmt: skip
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151_665, "hidden_size": 8,
    "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Took:
    """What one side took: seconds by the clock, seconds of processors, tokens; memory and loading where told."""

    wall_s: float
    cpu_s: float
    tokens: int
    peak_mb: float = 0.0
    load_s: float = 0.0


def llama_factory_python() -> str:
    """Return the Python that can import LLaMA-Factory beside the project's torch, made when missing."""
    folder = PEERS_DIR / "llamafactory"
    python = folder / "bin" / "python"
    if not (folder / INSTALLED).exists():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        (site_packages,) = (folder / "lib").glob("python*/site-packages")
        (site_packages / "project.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, *LLAMA_FACTORY_NEEDS], check=True)
        subprocess.run([*install, "--no-deps", *LLAMA_FACTORY], check=True)
        (folder / INSTALLED).touch()
    return str(python)


PEERS = {"trl": trl_python, "llamafactory": llama_factory_python}


def run(command: Sequence[str], *, threads: int = 1) -> Took:
    """Return what a side says of itself."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAYON_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1:]}")
    return Took(**json.loads(done.stdout.splitlines()[-1]))


def side(name: str, model: Path, samples: Path, threads: int = 1) -> Callable[[], Took]:
    """Return what runs one of our sides."""
    command = [sys.executable, "-m", "benchmarks.prepare_side", name, str(model), str(samples), str(threads)]
    return lambda: run(command, threads=threads)


def peer(name: str, model: Path, samples: Path) -> Callable[[], Took]:
    """Return what runs a peer."""
    command = [PEERS[name](), "-m", "benchmarks.peer_prepare", name, str(model), str(samples)]
    return lambda: run(command)


def rounds_of(sides: Mapping[str, Callable[[], Took]]) -> list[dict[str, Took]]:
    """Return what each took, all run in turn, round after round."""
    return [{name: action() for name, action in sides.items()} for _ in range(ROUNDS)]


def best_of(rounds: Sequence[Mapping[str, Took]], name: str) -> Took:
    """Return the best of one side over all rounds."""
    tooks = [one[name] for one in rounds]
    return Took(
        wall_s=min(took.wall_s for took in tooks),
        cpu_s=min(took.cpu_s for took in tooks),
        tokens=tooks[0].tokens,
        peak_mb=max(took.peak_mb for took in tooks),
        load_s=min(took.load_s for took in tooks),
    )


def ratio(rounds: Sequence[Mapping[str, Took]], other: str, ours: str, read: Callable[[Took], float]) -> float:
    """Return how many times as long as ours the other took, in the middle one of the rounds: machines are restless."""
    return statistics.median(read(one[other]) / read(one[ours]) for one in rounds)


def compare(size: int, model: Path, folder: Path, claims: list[Claim], numbers: list[tuple[str, str]]) -> None:
    """Measure one corpus of `size` samples; peers on the smaller ones."""
    samples = folder / f"{size}.jsonl"
    write_chats(samples, size)
    sides = {
        "raw": side("raw", model, samples),
        "tokenizers": side("tokenizers", model, samples),
        "tiktoken": side("tiktoken", model, samples),
        "raw, two threads": side("raw", model, samples, 2),
        "tokenizers, two threads": side("tokenizers", model, samples, 2),
        "tiktoken, two threads": side("tiktoken", model, samples, 2),
    }
    if size <= WITH_PEERS:
        sides |= {name: peer(name, model, samples) for name in PEERS}
    rounds = rounds_of(sides)
    found = {name: best_of(rounds, name) for name in sides}
    raw, cpu_s, wall_s = found["raw"], attrgetter("cpu_s"), attrgetter("wall_s")
    name = f"{size:,} samples"
    numbers.append((f"{name}: tokens", f"{raw.tokens:,}, raw tokenizer {raw.tokens / raw.cpu_s / 1e6:.2f} Mtok/s"))
    for what, took in found.items():
        memory = f", {took.peak_mb:.0f} MB at most" if took.peak_mb else ""
        of_raw = f"{raw.cpu_s / took.cpu_s:.2f} × raw" if "two" not in what else ""
        numbers.append((f"{name}: {what}", f"{took.cpu_s:.2f} s of processor, {took.wall_s:.2f} s{memory} {of_raw}"))
    built_s = found["tiktoken"].load_s
    with_building = raw.cpu_s / (found["tiktoken"].cpu_s + built_s)
    numbers.append((f"{name}: tiktoken with building it, {built_s:.2f} s", f"{with_building:.2f} × raw"))
    two_threads = ratio(rounds, "raw, two threads", "tokenizers, two threads", wall_s)
    claims += [
        Claim(f"{name}: tokenizers of raw, one thread", ratio(rounds, "raw", "tokenizers", cpu_s), 0.85),
        Claim(f"{name}: tokenizers of raw, two threads", two_threads, 0.95),
        Claim(f"{name}: tokens in rows, of all", found["tiktoken"].tokens / raw.tokens, 1),
    ]
    if size <= WITH_PEERS:
        claims += [
            Claim(f"{name}: tiktoken of TRL", ratio(rounds, "trl", "tiktoken", cpu_s), 8),
            Claim(f"{name}: tiktoken of LLaMA-Factory", ratio(rounds, "llamafactory", "tiktoken", cpu_s), 7),
        ]
        numbers.append((f"{name}: tokens that TRL loses", f"{1 - found['trl'].tokens / raw.tokens:.2%}"))
    else:
        claims.append(Claim(f"{name}: tiktoken of raw", ratio(rounds, "raw", "tiktoken", cpu_s), 4))


def compare_whole(model: Path, folder: Path, claims: list[Claim], numbers: list[tuple[str, str]]) -> None:
    """Measure the first user's size as whole commands, from their start to their end."""
    samples = folder / "first.jsonl"
    write_chats(samples, FIRST_USER, seed=3)
    ours = [sys.executable, "-m", "benchmarks.prepare_side", "whole", str(model), str(samples), "1"]
    theirs = [trl_python(), "-m", "benchmarks.peer_prepare", "trl", str(model), str(samples)]
    rounds = [(run_child(ours), run_child(theirs)) for _ in range(3)]
    best = [min(column, key=lambda child: child.wall_s) for column in zip(*rounds, strict=True)]
    claims.append(Claim(f"{FIRST_USER} samples: whole command, of TRL", best[1].wall_s / best[0].wall_s, 6))
    for name, child in zip(("ours", "trl"), best, strict=True):
        said = f"{child.wall_s:.2f} s, {child.cpu_s:.2f} s of processor, {child.peak_mb:.0f} MB at most"
        numbers.append((f"{FIRST_USER} samples: whole command, {name}", said))


def main() -> int:
    sizes = [int(size) for size in sys.argv[1:]] or [5000, 20_000]
    claims: list[Claim] = []
    numbers: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = write_tokenizer_folder(Path(scratch, "model"), qwen_tokenizer_json(), QWEN_TEMPLATE)
        (model / "config.json").write_text(json.dumps(CONFIG))
        compare_whole(model, Path(scratch), claims, numbers)
        for size in sizes:
            compare(size, model, Path(scratch), claims, numbers)
    about = (
        "Chats of our own invention (`chats.py`), Qwen's vocabulary. Ratios are of processor time, one thread, but for "
        "the lines of two threads and of whole commands; each is the middle one of three "
        "rounds. Ours: from the samples' file to arrays whose every label is "
        "proved, written, mapped again and packed. Tokenizers and libraries are loaded before the clock starts, on all "
        "sides; what building our second engine costs stands by itself. The raw tokenizer has its texts in memory. "
        "Peers (TRL 1.16, LLaMA-Factory 0.9.5) cut at 4096. A run that meets its corpus again opens the file."
    )
    return report(
        "prepare",
        about=about,
        packages=("tokenizers", "tiktoken", "numpy", "pyarrow", "transformers", "torch"),
        claims=claims,
        numbers=numbers,
    )


if __name__ == "__main__":
    raise SystemExit(main())
