"""Who trains: which GPUs, or how many processes on a CPU; their command and their environment. Asks for a free port."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from corpus_builder.log_lines import log_line
from trainer.device import Device
from trainer.gpus import Choice, Gpus, Row, choose_gpus
from trainer.machine import count_processors
from trainer.recipe import Recipe
from trainer.voice import Voice


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Who trains. `gpus`: their numbers as nvidia-smi counts, None on a CPU. `row`: nvidia-smi's of the first."""

    count: int
    gpus: tuple[int, ...] | None
    skipped: tuple[int, ...] = ()
    row: Row | None = None

    @property
    def is_alone(self) -> bool:
        """One process on a CPU trains without DeepSpeed: there is nobody to share with."""
        return self.gpus is None and self.count == 1

    @property
    def device(self) -> Device:
        """The device as `device.choose_precision` knows it."""
        if self.row is None:
            return Device("cpu", "cpu")
        major, _, minor = (self.row["compute_capability"] or "7.0").partition(".")  # an old driver: an old GPU
        return Device("cuda", self.row["name"], (int(major), int(minor or 0)))


def choose_ranks(recipe: Recipe, gpus: Gpus) -> Ranks:
    """Return who trains; raise `gpus_missing` or `gpus_busy`. Pure."""
    if recipe.device == "cpu" or (recipe.device == "auto" and not gpus.is_installed):
        return Ranks(count=recipe.ranks, gpus=None)
    choice: Choice = choose_gpus(recipe.gpus, gpus.rows or [])
    row = next(row for row in gpus.rows or [] if row["index"] == choice.chosen[0])
    return Ranks(count=len(choice.chosen), gpus=tuple(choice.chosen), skipped=tuple(choice.skipped), row=row)


def say_ranks(ranks: Ranks, voice: Voice) -> None:
    """Say which GPUs train, and which busy ones were passed over."""
    if ranks.gpus is None:
        return
    busy = {"busy": _words(ranks.skipped)} if ranks.skipped else {}
    voice.event("gpus_chosen", chosen=_words(ranks.gpus), **busy)
    if ranks.skipped:
        sentence = "GPUs {chosen} train; {busy} are in use and were passed over"
        voice.say(log_line("train", sentence, chosen=_words(ranks.gpus), busy=_words(ranks.skipped)))


def _words(numbers: Sequence[int]) -> str:
    return ",".join(str(number) for number in numbers)


def train_argv(recipe_path: str, python: str, *, ranks: int, gpus: Sequence[int] | None, master_port: int) -> list[str]:
    """Return DeepSpeed's command for all ranks, by their GPUs' numbers, or `ranks` processes on a CPU.

    It is the second half of what the `deepspeed` command does on one machine. The first half would turn our numbers
    into `--world_info`, import torch for that, and stay in memory until the end.
    """
    world = json.dumps({"localhost": [*range(ranks)] if gpus is None else [*gpus]})
    encoded = base64.urlsafe_b64encode(world.encode()).decode()
    options = ["--no_local_rank", "--master_addr", "127.0.0.1", "--master_port", str(master_port)]
    launch = [python, "-m", "deepspeed.launcher.launch", "--world_info=" + encoded]
    return [*launch, *options, "--module", "trainer.train", recipe_path]


def alone_argv(recipe_path: str, python: str) -> list[str]:
    """Return the command of one process without DeepSpeed."""
    return [python, "-m", "trainer.train", recipe_path]


def free_port() -> int:
    """Return a TCP port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(ranks: Ranks, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the launcher and its ranks."""
    if ranks.gpus is not None:
        # CUDA's own order is by speed; nvidia-smi counts by slot, and so do we (CUDA programming guide, appendix
        # "environment variables").
        return {**environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if ranks.is_alone:
        return {**environ, "CUDA_VISIBLE_DEVICES": ""}
    threads = str(max(1, count_processors() // ranks.count))
    return {**environ, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": threads}


def asking_environment(ranks: Ranks, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the one process that asks the base model: it sees the first GPU."""
    shown = "" if ranks.gpus is None else str(ranks.gpus[0])
    return {**environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": shown}
