"""Checkpoints of one run: marked complete last, proven before use, kept to a limit. Side effects: writes and deletes.

Hugging Face's Trainer and DeepSpeed write `checkpoint-N/`; a folder without `complete.json` is not a checkpoint:

    {"step": 100, "ranks": 4, "is_launched": true, "is_model_only": false, "files": {"latest": 14, …},
     "eval_loss": 1.71, "best_loss": 1.68, "best_step": 80, "stale_looks": 1}

What is listed there is on the disk. Folders of other runs are never touched.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from corpus_builder.errors import ProjectError
from trainer.device import Place
from trainer.run_paths import CHECKPOINT, CHECKPOINT_COMPLETE

GIB = 1 << 30
TRAINER_STATE = "trainer_state.json"
DEEPSPEED_LATEST = "latest"
OPTIMIZER_SHARDS = "*_optim_states.pt"
#: Bytes of optimizer per trained parameter: Adam's two moments in 32 bits; DeepSpeed adds the 32-bit weights.
MOMENT_BYTES, MASTER_BYTES = 8, 4
#: A file system that is filled to the last byte fails elsewhere: this much stays free.
SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What `complete.json` says.

    Attributes:
        is_launched: DeepSpeed wrote it; else one plain process.
        files: Size in bytes of every other file, by its path in the folder. Empty in marks of earlier versions.
        eval_loss: Held-out loss of these weights, None where nobody looked.
        best_loss, best_step, stale_looks: Where early stopping stood.
    """

    step: int
    ranks: int
    is_launched: bool = True
    is_model_only: bool = False
    files: dict[str, int] = field(default_factory=dict)
    eval_loss: float | None = None
    best_loss: float | None = None
    best_step: int = 0
    stale_looks: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a checkpoint cannot be used: one word, and the file in its folder."""

    kind: str
    file: str

    def __str__(self) -> str:
        return f"{self.kind} {self.file}"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a run goes on: `path` is None to start anew; `skipped` are newer checkpoints with what is wrong."""

    path: Path | None
    skipped: tuple[tuple[Path, Fault], ...] = ()

    @property
    def step(self) -> int:
        """The steps that are done."""
        return 0 if self.path is None else _step(self.path)


def mark_complete(checkpoint_dir: Path, mark: Mark) -> None:
    """Make a folder a checkpoint: call it when every rank has written its part.

    The files are on the disk before the mark is: after a power cut a marked checkpoint is whole.
    """
    sizes = {}
    for path in _files(checkpoint_dir):
        _flush(path)
        sizes[str(path.relative_to(checkpoint_dir))] = path.stat().st_size
    partial = checkpoint_dir / f"{CHECKPOINT_COMPLETE}.partial"
    with partial.open("w", encoding="utf-8") as file:
        json.dump(asdict(mark) | {"files": sizes}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, checkpoint_dir / CHECKPOINT_COMPLETE)
    _flush(checkpoint_dir)


def read_mark(checkpoint_dir: Path) -> Mark | None:
    """Return the mark of a checkpoint, None where it cannot be read."""
    packed = _read_json(checkpoint_dir / CHECKPOINT_COMPLETE)
    known = {item.name for item in fields(Mark)}
    try:
        return Mark(**{key: value for key, value in (packed or {}).items() if key in known})
    except TypeError:
        return None


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints of one run, the newest (highest step) last."""
    return [path for path in _checkpoint_folders(run_dir) if (path / CHECKPOINT_COMPLETE).is_file()]


def find_resume_point(run_dir: Path, resume_from: str | None, place: Place) -> ResumePoint:
    """Return the checkpoint to go on from: this run's newest sound one, else that of `resume_from`.

    Args:
        resume_from: A checkpoint, or a folder of checkpoints whose newest sound one is meant.
        place: How many processes train now; a checkpoint of another number is not for them.

    Raises:
        ProjectError: `checkpoint_missing`: `resume_from` holds no complete checkpoint; `checkpoint_corrupt`: there
            are some and none is sound; `ranks_changed`; `checkpoint_model_only`: it has no optimizer.
    """
    candidates = complete_checkpoints(run_dir)
    if not candidates:
        if resume_from is None:
            return ResumePoint(None)
        asked = Path(resume_from)
        candidates = [asked] if (asked / CHECKPOINT_COMPLETE).is_file() else complete_checkpoints(asked)
        if not candidates:
            raise ProjectError("checkpoint_missing", path=resume_from)
    skipped: list[tuple[Path, Fault]] = []
    for path in reversed(candidates):
        fault = find_fault(path)
        if fault is None:
            _check_fit(path, place)
            return ResumePoint(path, tuple(skipped))
        skipped.append((path, fault))
    newest, fault = skipped[0]
    raise ProjectError("checkpoint_corrupt", fault=str(fault), path=str(newest))


def _check_fit(path: Path, place: Place) -> None:
    """Raise unless the processes that train now can go on from a sound checkpoint."""
    mark = read_mark(path)
    assert mark is not None, "a sound checkpoint has a mark"
    if mark.is_model_only:
        raise ProjectError("checkpoint_model_only", path=str(path))
    if mark.ranks != place.ranks:
        raise ProjectError("ranks_changed", had=mark.ranks, now=place.ranks, path=str(path))
    if mark.is_launched != place.is_launched:
        raise ProjectError(
            "ranks_changed",
            had=_kind(mark.ranks, mark.is_launched),
            now=_kind(place.ranks, place.is_launched),
            path=str(path),
        )


def _kind(ranks: int, is_launched: bool) -> str:
    return f"{ranks} (DeepSpeed)" if is_launched else f"{ranks} (plain)"


def find_fault(checkpoint_dir: Path) -> Fault | None:
    """Return the first reason why a complete checkpoint cannot be used, None for a sound one."""
    mark = read_mark(checkpoint_dir)
    if mark is None:
        return Fault("mark_unreadable", CHECKPOINT_COMPLETE)
    return next(_faults(checkpoint_dir, mark), None)


def _faults(folder: Path, mark: Mark) -> Iterator[Fault]:
    """Yield what is wrong, the cheap looks first."""
    for name, size in mark.files.items():
        if not (folder / name).is_file():
            yield Fault("file_missing", name)
        elif (folder / name).stat().st_size != size:
            yield Fault("wrong_size", name)
    state = _read_json(folder / TRAINER_STATE)  # bare NaN and Infinity are what transformers writes
    if state is None or state.get("global_step") != mark.step:
        yield Fault("trainer_state_unreadable", TRAINER_STATE)
    if mark.is_launched and not mark.is_model_only:
        yield from _deepspeed_faults(folder, mark.ranks)
    for path in sorted(folder.rglob("*.safetensors")):
        if (kind := _safetensors_fault(path)) is not None:
            yield Fault(kind, str(path.relative_to(folder)))
    for path in sorted((*folder.rglob("*.pt"), *folder.rglob("*.pth"))):
        if not is_whole_zip(path):
            yield Fault("shard_truncated", str(path.relative_to(folder)))


def _deepspeed_faults(folder: Path, ranks: int) -> Iterator[Fault]:
    """Look at what DeepSpeed needs: `latest`, the folder that it names, and one optimizer shard per rank."""
    try:
        name = (folder / DEEPSPEED_LATEST).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        name = ""
    if not name or not (folder / name).is_dir():
        yield Fault("latest_names_nothing", DEEPSPEED_LATEST)
    elif len(list((folder / name).glob(OPTIMIZER_SHARDS))) != ranks:
        yield Fault("shard_missing", f"{name}/{OPTIMIZER_SHARDS}")


def _safetensors_fault(path: Path) -> str | None:
    """Return what is wrong with a file of weights, read from its header alone.

    The format: 8 bytes of length, little-endian; a JSON object of that length with dtype, shape and data_offsets of
    each tensor; the data.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size
            if length > size:
                return "weights_unreadable"
            header = json.loads(file.read(length))
        tensors = [value for key, value in header.items() if key != "__metadata__"]
        if any(0 in tensor["shape"] for tensor in tensors):
            return "empty_tensor"  # ZeRO-3 saved a share that it had not gathered
        ends = max((tensor["data_offsets"][1] for tensor in tensors), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return "weights_unreadable"
    return None if size == 8 + length + ends else "weights_truncated"


def is_whole_zip(path: Path) -> bool:
    """Whether a file of `torch.save` has its directory, which a ZIP carries at its end, and all that it lists.

    Python moves every offset by what lies before the archive; where bytes are missing, the first is not 0 any more.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return min((member.header_offset for member in archive.infolist()), default=-1) == 0
    except (OSError, zipfile.BadZipFile, ValueError):
        return False


def best_checkpoint(run_dir: Path) -> tuple[Path, float] | None:
    """Return this run's checkpoint with the lowest held-out loss and that loss, None where nobody looked."""
    judged = [
        (mark.eval_loss, path)
        for path in complete_checkpoints(run_dir)
        if (mark := read_mark(path)) is not None and mark.eval_loss is not None
    ]
    if not judged:
        return None
    loss, path = min(judged, key=lambda pair: pair[0])
    return path, loss


def delete_old(run_dir: Path, *, keep: int) -> list[str]:
    """Delete this run's complete checkpoints but the newest `keep` and the best; return the names that went."""
    best = best_checkpoint(run_dir)
    gone = [path for path in complete_checkpoints(run_dir)[: -max(1, keep)] if best is None or path != best[0]]
    for path in gone:
        _delete(path)
    return [path.name for path in gone]


def delete_unusable(run_dir: Path, resume_step: int) -> list[str]:
    """Delete what this run will write again: interrupted saves, and checkpoints beyond the one it goes on from.

    Returns:
        The names that went.
    """
    gone = [
        path
        for path in _checkpoint_folders(run_dir)
        if not (path / CHECKPOINT_COMPLETE).is_file() or _step(path) > resume_step
    ]
    for path in gone:
        _delete(path)
    return [path.name for path in gone]


def _delete(path: Path) -> None:
    (path / CHECKPOINT_COMPLETE).unlink(missing_ok=True)  # first, so that a half-deleted folder is no checkpoint
    shutil.rmtree(path)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in _files(folder))


def estimated_bytes(model: Any, *, is_launched: bool, is_model_only: bool) -> int:
    """Return about what the first checkpoint of a run will take.

    Weights in their own type, all of them or, of adapters, the trained ones; Adam's moments, and DeepSpeed's 32-bit
    weights, of the trained ones.
    """
    trained = sum(_count(parameter) for parameter in model.parameters() if parameter.requires_grad)
    per_trained = 0 if is_model_only else MOMENT_BYTES + MASTER_BYTES * is_launched
    return weights_bytes(model, only_trained=hasattr(model, "peft_config")) + per_trained * trained


def weights_bytes(model: Any, *, only_trained: bool = False) -> int:
    """Return what a model's weights take in their own types."""
    return sum(
        _count(parameter) * int(parameter.element_size())
        for parameter in model.parameters()
        if parameter.requires_grad or not only_trained
    )


def _count(parameter: Any) -> int:
    """Return the elements of a parameter over all ranks: under ZeRO-3 the tensor itself is empty."""
    return int(getattr(parameter, "ds_numel", 0) or parameter.numel())


def needed_bytes(run_dir: Path, estimate: int) -> int:
    """Return what the next checkpoint takes: as much as this run's newest, else the estimate; and a spare."""
    known = complete_checkpoints(run_dir)
    return (folder_bytes(known[-1]) if known else estimate) + SPARE_BYTES


def has_room(run_dir: Path, needed: int, *, keep: int) -> bool:
    """Whether the next checkpoint fits.

    Before the answer is no, what the next checkpoint would push out of the `keep` newest is deleted; the newest stays.
    """
    if _free_bytes(run_dir) < needed:
        delete_old(run_dir, keep=keep - 1)
    return _free_bytes(run_dir) >= needed


def check_room_for_result(run_dir: Path, model: Any, *, only_trained: bool) -> None:
    """Raise `disk_short` where the result does not fit, after all checkpoints but the newest and the best went."""
    needed = weights_bytes(model, only_trained=only_trained) + SPARE_BYTES
    if not has_room(run_dir, needed, keep=1):
        raise disk_short(run_dir, needed)


def disk_short(run_dir: Path, needed: int) -> ProjectError:
    """Return the error of a checkpoint that does not fit."""
    free = _free_bytes(run_dir)
    return ProjectError(
        "disk_short", needed_gib=round(needed / GIB, 2), free_gib=round(free / GIB, 2), path=str(run_dir)
    )


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _checkpoint_folders(run_dir: Path) -> list[Path]:
    """Return the folders that a Trainer made, complete or not, in the order of their steps."""
    found = [path for path in (run_dir.iterdir() if run_dir.is_dir() else ()) if CHECKPOINT.match(path.name)]
    return sorted(found, key=_step)


def _step(path: Path) -> int:
    match = CHECKPOINT.match(path.name)
    return int(match.group(1)) if match else 0


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKPOINT_COMPLETE)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
