"""Before a run: all that can be known without loading a model. Then the launcher takes this process's place.

    python -m trainer.launch RUN_FOLDER/recipe.json [--dry-run]

The supervisor's train step, and `zy train`. No torch here: what is wrong is said within seconds. In order: the base
model, the GPUs, the samples (encoded, so that the ranks find them), the preflight, the questions that the base must
answer. `--dry-run` prints the preflight and the exact command, and changes nothing.

Side effects: asks nvidia-smi; writes the encoded samples, digests of weight files and the base's answers; replaces
this process by DeepSpeed's launcher (`os.execve`), whose exit code is then ours.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from corpus_builder.errors import ProjectError, format_error_line
from corpus_builder.frame import load_frame
from corpus_builder.log_lines import log_line
from trainer.arguments import PRESETS_DIR, Schedule, check_trackers, load_deepspeed
from trainer.base_model import CONFIG, check_base_model
from trainer.base_rules import DigestCache, check_answers, check_not_stock
from trainer.device import Device, Place, Precision, choose_attention, choose_precision
from trainer.encode import check_samples, encode_corpus, read_samples
from trainer.encoded import EncodedCorpus, EncodedSet
from trainer.gpus import Choice, GpuQuery, Gpus, Row, choose_gpus
from trainer.head_types import PLAIN_HEADS
from trainer.machine import Machine, count_processors, read_machine
from trainer.material import check_steps, load_corpus, pack_rows, packs_rows
from trainer.methods import check_methods
from trainer.pace import Pace, find_pace
from trainer.packing import Packing, one_each
from trainer.preflight import GIB, LIBRARIES_BYTES, Memory, Wish, advise, disk_bytes, estimate, fits, read_zero
from trainer.recipe import Recipe
from trainer.request import Request, load_request
from trainer.sizes import EMBEDDINGS, HEAD, read_model_size
from trainer.voice import Voice

FIRST = Place(rank=0, local_rank=0, ranks=1, is_launched=False)
#: What rank 0 says of the samples is said once: not by us.
SILENT = Voice(Place(rank=1, local_rank=1, ranks=2, is_launched=False))
#: Free GPU memory that stays free: the CUDA context, NCCL's buffers and holes between blocks. Chosen, not measured.
GPU_RESERVE_BYTES = 1 << 30
#: NCCL's own floor for ranks on one machine (its guide "Troubleshooting", shared memory).
SHM_FLOOR_BYTES = 1 << 30


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run that may start."""

    request: Request
    ranks: Ranks


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


def tracker_environment(report_to: Sequence[str], folder: str) -> dict[str, str]:
    """Return where trackers keep their files: in the run's folder, else they lie in our code (the working folder).

    Source: both makers' lists of environment variables; SwanLab's newer versions spell it without the underscore.
    """
    names = {"wandb": ("WANDB_DIR",), "swanlab": ("SWANLAB_LOG_DIR", "SWANLAB_LOGDIR")}
    return {name: folder for tracker in report_to for name in names.get(tracker, ())}


def asking_environment(ranks: Ranks, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the one process that asks the base model: it sees the first GPU."""
    shown = "" if ranks.gpus is None else str(ranks.gpus[0])
    return {**environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": shown}


def choose_ranks(recipe: Recipe, gpus: Gpus) -> Ranks:
    """Return who trains; raise `gpus_missing` or `gpus_busy`. Pure."""
    if recipe.device == "cpu" or (recipe.device == "auto" and not gpus.is_installed):
        return Ranks(count=recipe.ranks, gpus=None)
    choice: Choice = choose_gpus(recipe.gpus, gpus.rows or [])
    row = next(row for row in gpus.rows or [] if row["index"] == choice.chosen[0])
    return Ranks(count=len(choice.chosen), gpus=tuple(choice.chosen), skipped=tuple(choice.skipped), row=row)


def prepare(request: Request, voice: Voice, *, is_dry_run: bool) -> Prepared:
    """Check everything, say the preflight, and return the run; raise what stands against it."""
    recipe = request.recipe
    query = GpuQuery() if recipe.device != "cpu" else None
    check_base_model(recipe.base_model_dir)
    check_not_stock(recipe, DigestCache(Path(request.data.weight_digests)), keeps=not is_dry_run)
    check_trackers(recipe.report_to)
    seen = Gpus(False, None) if query is None else query.read()
    ranks = choose_ranks(recipe, seen)
    say_ranks(ranks, voice)
    precision = choose_precision(recipe.precision, ranks.device)
    choose_attention(recipe.attn_implementation, ranks.device, precision)
    check_methods(recipe, ranks.device, precision)

    corpus = encode(request, is_dry_run=is_dry_run)
    packing = pack_rows(corpus.train, recipe, SILENT) if packs_rows(recipe, SILENT) else one_each(len(corpus.train))
    schedule = Schedule(recipe, rows=len(packing), tokens=corpus.train.tokens, ranks=ranks.count)
    check_steps(schedule.steps, recipe, SILENT)
    check_room(request, ranks, precision, corpus.train, packing, schedule, seen, voice)

    if not is_dry_run:
        out = Path(request.paths.base_answers)
        check_answers(recipe, out, asking_environment(ranks, os.environ))
    return Prepared(request=request, ranks=ranks)


def say_ranks(ranks: Ranks, voice: Voice) -> None:
    """Say which GPUs train, and which busy ones were passed over."""
    if ranks.gpus is None:
        return
    busy = {"busy": _words(ranks.skipped)} if ranks.skipped else {}
    voice.event("gpus_chosen", chosen=_words(ranks.gpus), **busy)
    if ranks.skipped:
        sentence = "GPUs {chosen} train; {busy} are in use and were passed over"
        voice.say(log_line("train", sentence, chosen=_words(ranks.gpus), busy=_words(ranks.skipped)))


def encode(request: Request, *, is_dry_run: bool) -> EncodedCorpus:
    """Return the encoded samples, written for the ranks to find; a dry run keeps them to itself."""
    recipe = request.recipe
    frame = load_frame(Path(recipe.base_model_dir))
    if not is_dry_run:
        return load_corpus(request, frame, FIRST, SILENT)
    is_own = recipe.data_path is None
    meant = request.samples_sha256 if is_own else None
    samples = check_samples(Path(recipe.data_path or request.data.samples), is_own=is_own, meant_sha256=meant)
    return encode_corpus(read_samples(samples), frame, max_seq_len=recipe.max_seq_len)


def check_room(
    request: Request,
    ranks: Ranks,
    precision: Precision,
    samples: EncodedSet,
    packing: Packing,
    schedule: Schedule,
    gpus: Gpus,
    voice: Voice,
) -> None:
    """Say what the run will take, and raise `memory_short` or `disk_short` where there is less."""
    recipe = request.recipe
    wish = make_wish(recipe, ranks, precision, samples, packing, schedule)
    machine = read_machine(Path(recipe.output_dir or request.paths.checkpoints))
    pace = find_pace(request, ranks.row, wish, tokens=samples.tokens, steps=schedule.steps)
    if wish is None:
        say_preflight(None, None, schedule, recipe, pace, voice)
        return
    memory = estimate(wish)
    memory = Memory(
        gpu_bytes=memory.gpu_bytes, host_bytes=memory.host_bytes + ranks.count * LIBRARIES_BYTES, moments=memory.moments
    )
    has_best = recipe.load_best_model_at_end or recipe.early_stopping_patience is not None
    disk = disk_bytes(
        wish,
        kept=recipe.save_total_limit,
        is_model_only=recipe.save_only_model,
        has_best=has_best,
        is_merged=recipe.lora is not None and recipe.lora.merge,
    )
    say_preflight(memory, disk, schedule, recipe, pace, voice)
    check_memory(recipe, wish, memory, gpu_free_bytes(ranks, gpus), machine, voice)
    check_disk(Path(request.paths.checkpoints), disk, machine)


def make_wish(
    recipe: Recipe, ranks: Ranks, precision: Precision, samples: EncodedSet, packing: Packing, schedule: Schedule
) -> Wish | None:
    """Return what decides the needs of a run; None for a model whose shape is not known."""
    folder = Path(recipe.base_model_dir)
    size = read_model_size(folder)
    if size is None:
        return None
    model_type = json.loads((folder / CONFIG).read_text("utf-8")).get("model_type")
    tokens, trained = longest_batch(samples, packing, recipe.per_device_train_batch_size, is_packed=recipe.packing)
    saved = () if recipe.lora is None else recipe.lora.modules_to_save
    head_names = (HEAD.split(".")[0], EMBEDDINGS.split(".")[0])
    return Wish(
        size=size,
        trained=size.trained(recipe.lora),
        ranks=ranks.count,
        zero=None if ranks.is_alone else read_zero(load_deepspeed(recipe.deepspeed), hidden=size.hidden),
        is_on_gpu=ranks.gpus is not None,
        weight_bytes=4 if precision.name == "fp32" else 2,
        row_tokens=tokens,
        head_tokens=trained,
        accumulation=schedule.accumulation,
        checkpointing=recipe.gradient_checkpointing,
        has_head_loss=model_type in PLAIN_HEADS,
        has_head_trained=recipe.lora is None or any(name in saved for name in head_names),
        is_4bit=recipe.lora is not None and recipe.lora.load_in_4bit,
        is_merged=recipe.lora is not None and recipe.lora.merge,
    )


def longest_batch(samples: EncodedSet, packing: Packing, batch_size: int, *, is_packed: bool) -> tuple[int, int]:
    """Return tokens, padding included, and trained tokens of the micro-batch that takes most memory, at worst.

    Packed rows of a micro-batch lie end to end; others are padded to the longest.
    """
    lengths = samples.lengths[packing.samples]
    rows = np.add.reduceat(lengths, packing.starts[:-1])
    trained_before = np.concatenate([[0], np.cumsum(samples.is_trained, dtype=np.int64)])
    trained_of = trained_before[samples.starts[1:]] - trained_before[samples.starts[:-1]]
    trained = np.add.reduceat(trained_of[packing.samples], packing.starts[:-1])
    return int(rows.max()) * batch_size, int(trained.max()) * batch_size


def gpu_free_bytes(ranks: Ranks, gpus: Gpus) -> int | None:
    """Return what the fullest of the chosen GPUs has left for us; None on a CPU or where it is not known."""
    if ranks.gpus is None:
        return None
    rows = [row for row in gpus.rows or [] if row["index"] in ranks.gpus]
    if any(row["memory_mib"] is None for row in rows):
        return None
    free_mib = min(row["memory_mib"] - (row["used_mib"] or 0) for row in rows)
    return int(free_mib * (1 << 20)) - GPU_RESERVE_BYTES


def check_memory(
    recipe: Recipe, wish: Wish, memory: Memory, gpu_free: int | None, machine: Machine, voice: Voice
) -> None:
    """Raise `memory_short` with advice where the run needs more than there is; warn of a small /dev/shm."""
    host_free = machine.host_free_bytes
    kind = fits(memory, gpu_free_bytes=gpu_free, host_free_bytes=host_free)
    if kind is not None:
        libraries = wish.ranks * LIBRARIES_BYTES
        advice = advise(wish, load_presets(recipe), gpu_free_bytes=gpu_free, host_free_bytes=host_free - libraries)
        needed, free = (memory.gpu_bytes, gpu_free or 0) if kind == "gpu" else (memory.host_bytes, host_free)
        where = "gpu" if kind == "gpu" else f"host ({machine.host_limit_by})"
        raise ProjectError("memory_short", needed_gib=_gib(needed), free_gib=_gib(free), kind=where, advice=advice)
    shm = machine.shm_free_bytes
    if wish.is_on_gpu and wish.ranks > 1 and shm is not None and shm < SHM_FLOOR_BYTES:
        sentence = "/dev/shm has {free_gib} GiB; NCCL may need {floor_gib}: start the container with a larger one"
        voice.say(log_line("train", sentence, free_gib=_gib(shm), floor_gib=_gib(SHM_FLOOR_BYTES)))


def check_disk(folder: Path, needed_bytes: int, machine: Machine) -> None:
    """Raise `disk_short` unless there is room for a run; what an earlier attempt of it wrote is there already."""
    needed_bytes -= sum(path.lstat().st_size for path in folder.rglob("*")) if folder.is_dir() else 0
    if needed_bytes > machine.disk_free_bytes:
        needed_gib, free_gib = _gib(needed_bytes), _gib(machine.disk_free_bytes)
        raise ProjectError("disk_short", path=str(folder), needed_gib=needed_gib, free_gib=free_gib)


def load_presets(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return the shipped DeepSpeed presets that the recipe does not have yet, parameters offloaded last."""
    names = sorted(path.stem for path in PRESETS_DIR.glob("*.json") if path.stem != recipe.deepspeed)
    return {name: load_deepspeed(name) for name in sorted(names, key=lambda name: ("params" in name, name))}


def say_preflight(
    memory: Memory | None, disk: int | None, schedule: Schedule, recipe: Recipe, pace: Pace, voice: Voice
) -> None:
    """Say the numbers as one event, for summaries, and as two lines, for people."""
    numbers = {
        "gpu_gib": "unknown" if memory is None else _gib(memory.gpu_bytes),
        "host_gib": "unknown" if memory is None else _gib(memory.host_bytes),
        "disk_gib": "unknown" if disk is None else _gib(disk),
    }
    minutes = "unknown" if pace.minutes is None else f"{pace.minutes:.0f}"
    voice.event(
        "preflight", **numbers, steps=schedule.steps, views=recipe.num_train_epochs, minutes=minutes, basis=pace.basis
    )
    sentence = "expected: {gpu_gib} GiB on each GPU, {host_gib} GiB of host memory, {disk_gib} GiB of disk"
    if memory is not None and not memory.gpu_bytes:
        sentence = "expected: {host_gib} GiB of memory, {disk_gib} GiB of disk"
    voice.say(log_line("train", sentence, **numbers))
    sentence = "{steps} optimizer steps, each sample seen {views} times; minutes: {minutes} ({basis})"
    values: dict[str, Any] = {"steps": schedule.steps, "views": recipe.num_train_epochs, "minutes": minutes}
    voice.say(log_line("train", sentence, basis=pace.said, **values))


def _gib(size: float) -> float:
    return round(size / GIB, 2)


def _words(numbers: Sequence[int]) -> str:
    return ",".join(str(number) for number in numbers)


def command_of(prepared: Prepared) -> list[str]:
    """Return the command that trains the run."""
    recipe_path, ranks = prepared.request.paths.recipe, prepared.ranks
    if ranks.is_alone:
        return alone_argv(recipe_path, sys.executable)
    return train_argv(recipe_path, sys.executable, ranks=ranks.count, gpus=ranks.gpus, master_port=free_port())


def free_port() -> int:
    """Return a TCP port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def replace_process(argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Become `argv`: same pid, so whoever watches us watches the launcher."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(argv[0], list(argv), dict(environment))


def main(argv: Sequence[str]) -> int:
    """Prepare the run of a recipe file and start it; returns only for a dry run, a finished run or an error."""
    os.umask(0o077)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    is_dry_run = "--dry-run" in argv
    (recipe_path,) = (word for word in argv if word != "--dry-run")
    voice = Voice(FIRST)
    try:
        request = load_request(Path(recipe_path))
        is_done = Path(request.paths.final).exists() and not is_dry_run
        prepared = None if is_done else prepare(request, voice, is_dry_run=is_dry_run)
    except ProjectError as error:
        print(format_error_line(error), file=sys.stderr, flush=True)
        return error.exit_code
    if prepared is None:  # the recipe page knows what a finished run still lacks
        replace_process(alone_argv(request.paths.recipe, sys.executable), os.environ)
    command = command_of(prepared)
    if is_dry_run:
        print(shlex.join(command), flush=True)
        return 0
    trackers = tracker_environment(request.recipe.report_to, request.paths.folder)
    replace_process(command, rank_environment(prepared.ranks, {**os.environ, **trackers}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
