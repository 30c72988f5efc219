"""A whole training run in miniature: a random model of two layers, a small corpus with its manifest, a recipe."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from corpus_builder.errors import ProjectError, parse_error_line
from corpus_builder.frame import CHAT_TEMPLATE
from corpus_builder.manifest import ClassAccount, FileAccount, Gate, Manifest, save_manifest
from corpus_builder.sample import Message, Sample, format_sample
from tests.tokenizers_real import tiny_tokenizer_json, write_tokenizer_folder
from trainer.build_locks import EXTENSIONS_DIR, extensions_dir
from trainer.progress import Event, Progress, parse_line
from trainer.ranks import train_argv
from trainer.recipe import Recipe
from trainer.run_paths import DataPaths, RunPaths, run_paths
from trainer.tiny_model import write_weights

#: What a test does while a run speaks.
OnLine = Callable[["Progress | Event", "subprocess.Popen[str]"], None]
ROOT = Path(__file__).parents[1]
VERSION, RUN_ID = "tiny_v1", "20260101-000000-abcd"
TOPICS = ("lamp", "fog", "gull", "boat", "bell", "ink", "stairs", "storm")


def tiny_samples(count: int = 22) -> list[Sample]:
    """Return samples of two classes, of unequal lengths and weights, Chinese and English."""
    samples = []
    for at in range(count):
        topic = TOPICS[at % len(TOPICS)]
        is_tool = at % 3 == 2
        messages = [
            *([Message("system", "You keep a lighthouse. 灯塔")] if at % 2 else []),
            Message("user", f"Tell me about the {topic}, number {at}."),
            Message("assistant", f"The {topic} is mine. " * (1 + at % 4) + "晚安"),
        ]
        samples.append(
            Sample(
                messages=tuple(messages),
                source=f"test:{at}",
                sample_class="tool" if is_tool else "soul",
                weight=0.5 if is_tool else 1.0,
            )
        )
    return samples


def write_base_model(folder: Path, samples: list[Sample], *, seed: int = 3) -> Path:
    """Write a random Qwen2 model of two layers with a tokenizer trained on the samples."""
    texts = [message.content for sample in samples for message in sample.messages]
    tokenizer_json = tiny_tokenizer_json(texts)
    write_weights(folder, vocab_size=len(json.loads(tokenizer_json)["model"]["vocab"]), seed=seed)
    return write_tokenizer_folder(folder, tokenizer_json, CHAT_TEMPLATE)


def write_corpus(data: DataPaths, samples: list[Sample], *, verdict: str = "pass") -> None:
    """Write samples and manifest where the built corpus lies."""
    text = "".join(format_sample(sample) + "\n" for sample in samples)
    Path(data.samples).parent.mkdir(parents=True, exist_ok=True)
    Path(data.samples).write_text(text, "utf-8")
    classes = sorted({sample.sample_class for sample in samples})
    counts = {name: sum(sample.sample_class == name for sample in samples) for name in classes}
    manifest = Manifest(
        plan_name="tiny",
        plan_digest="0",
        tokenizer="estimated",
        max_seq_len=256,
        files=tuple(
            FileAccount(path=name, sample_class=name, bytes=1, encoding="utf-8", units_read=n, units_kept=n, samples=n)
            for name, n in counts.items()
        ),
        missing=(),
        classes={
            name: ClassAccount(samples=n, unique=n, characters=1, tokens=1, trained_tokens=1, lost_tokens=0)
            for name, n in counts.items()
        },
        gates=(Gate(name="total", verdict=verdict, found=len(samples), wanted=1),),
        samples_sha256=hashlib.sha256(text.encode()).hexdigest(),
    )
    save_manifest(manifest, Path(data.manifest))


@dataclass(frozen=True)
class TinyRun:
    """One run that is ready to be launched."""

    paths: RunPaths
    data: DataPaths
    recipe: Recipe

    def environment(self) -> dict[str, str]:
        """Return what a launcher's process needs: our code, the CPU as accelerator, ninja on PATH."""
        binaries = str(Path(sys.executable).parent)
        kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        return kept | {
            "PYTHONPATH": str(ROOT),
            "DS_ACCELERATOR": "cpu",
            "PATH": binaries + os.pathsep + os.environ["PATH"],
            "CUDA_VISIBLE_DEVICES": "",
            EXTENSIONS_DIR: extensions_dir(sys.executable),
        }

    def launch(
        self, *, alone: bool = False, stop_at: int | None = None, on_line: OnLine | None = None, timeout_s: float = 600
    ) -> Ended:
        """Train: under DeepSpeed's launcher, or in one plain process.

        Args:
            stop_at: Write the stop file once this step was reported.
            on_line: Called with each point or event as it is told, and the process that was started.
        """
        argv = (
            [sys.executable, "-m", "trainer.train", self.paths.recipe]
            if alone
            else train_argv(
                self.paths.recipe, sys.executable, ranks=self.recipe.ranks, gpus=None, master_port=free_port()
            )
        )
        with (
            tempfile.TemporaryFile("w+") as stderr,
            subprocess.Popen(
                argv, env=self.environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True
            ) as child,
        ):
            killer = threading.Timer(timeout_s, child.kill)
            killer.start()
            try:
                stdout = "".join(self._watch(child, stop_at, on_line))
                exit_code = child.wait()
            finally:
                killer.cancel()
            stderr.seek(0)
            return Ended(exit_code, stdout, stderr.read())

    def _watch(self, child: subprocess.Popen[str], stop_at: int | None, on_line: OnLine | None) -> Iterator[str]:
        assert child.stdout is not None
        for line in child.stdout:
            yield line
            for item in parse_line(line):
                if stop_at is not None and isinstance(item, Progress) and item.step >= stop_at:
                    Path(self.paths.stop).write_text("checkpoint")
                if on_line is not None:
                    on_line(item, child)


def ranks_of(child: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the processes that train: all that a launcher started and that load the recipe page, or the one itself."""
    whole = psutil.Process(child.pid)
    below = [process for process in whole.children(recursive=True) if "trainer.train" in " ".join(process.cmdline())]
    ranks = [process for process in below if "launcher" not in " ".join(process.cmdline())]
    return ranks or [whole]


def kill_all(child: subprocess.Popen[str]) -> None:
    """kill -9 a launcher and every process below it, all at once, as a machine does that loses power."""
    if child.poll() is not None:
        return
    whole = psutil.Process(child.pid)
    for process in [whole, *whole.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def kill_at(step: int) -> OnLine:
    """Return what kills a launch once `step` was reported."""

    def act(item: Progress | Event, child: subprocess.Popen[str]) -> None:
        if isinstance(item, Progress) and item.step >= step:
            kill_all(child)

    return act


@dataclass(frozen=True)
class Ended:
    """How a launched run ended, and what it said."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def points(self) -> list[Progress]:
        """The progress lines, in order."""
        return [item for item in self._items() if isinstance(item, Progress)]

    @property
    def errors(self) -> list[ProjectError]:
        """The errors that ranks told, in order."""
        return [error for line in self.stderr.splitlines() if (error := parse_error_line(line)) is not None]

    @property
    def events(self) -> list[str]:
        """The names of the events, in order."""
        return [item.name for item in self._items() if isinstance(item, Event)]

    def _items(self) -> list[Progress | Event]:
        return [item for line in self.stdout.splitlines() for item in parse_line(line)]


def make_run(
    folder: Path, base_model_dir: Path, samples: list[Sample], *, resume_from: str | None = None, **keys: Any
) -> TinyRun:
    """Write corpus and `recipe.json` into `folder`; `keys` are recipe keys."""
    data = DataPaths(str(folder))
    paths = run_paths(str(folder), VERSION, RUN_ID)
    write_corpus(data, samples)
    values: dict[str, Any] = {
        "name": "tiny", "version": VERSION, "plan": "tiny", "base_model_dir": str(base_model_dir),
        "max_seq_len": 256, "num_train_epochs": 4, "learning_rate": 3e-3, "warmup_ratio": 0.1,
        "tokens_per_step": 250, "per_device_train_batch_size": 2, "allow_few_steps": True, "gpus": 2,
        "device": "cpu", "packing": False, "report_every_steps": 1, "save_steps": 1000, "save_total_limit": 2,
    } | keys  # fmt: skip
    recipe = Recipe.model_validate(values)
    Path(paths.folder).mkdir(parents=True, exist_ok=True)
    packed = {"recipe": recipe.model_dump(mode="json"), "origins": {}, "data": str(folder), "version": VERSION,
              "run_id": RUN_ID, "resume_from": resume_from}  # fmt: skip
    Path(paths.recipe).write_text(json.dumps(packed), "utf-8")
    return TinyRun(paths, data, recipe)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
