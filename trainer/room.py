"""Whether a run has room: what the preflight expects of it, said, and compared with what this machine has left.

The numbers are preflight.py's. Side effects: reads the machine and the model's configuration, says lines.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from corpus_builder.errors import ProjectError
from corpus_builder.log_lines import log_line
from trainer.arguments import PRESETS_DIR, Schedule, load_deepspeed
from trainer.base_model import CONFIG
from trainer.device import Precision
from trainer.encoded import EncodedSet
from trainer.gpus import Gpus
from trainer.head_types import PLAIN_HEADS
from trainer.machine import Machine, read_machine
from trainer.pace import Pace, find_pace
from trainer.packing import Packing
from trainer.preflight import GIB, LIBRARIES_BYTES, Memory, Wish, advise, disk_bytes, estimate, fits, read_zero
from trainer.ranks import Ranks
from trainer.recipe import Recipe
from trainer.request import Request
from trainer.sizes import EMBEDDINGS, HEAD, read_model_size
from trainer.voice import Voice

#: Free GPU memory that stays free: the CUDA context, NCCL's buffers and holes between blocks. Chosen, not measured.
GPU_RESERVE_BYTES = 1 << 30
#: NCCL's own floor for ranks on one machine (its guide "Troubleshooting", shared memory).
SHM_FLOOR_BYTES = 1 << 30


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
