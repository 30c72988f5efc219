"""Checkpoints of one run: marked complete last, found by number, kept to a limit. Side effects: writes and deletes.

Hugging Face's Trainer and DeepSpeed write `checkpoint-N/`; a folder without `complete.json` is not a checkpoint.
Folders of other runs are never touched.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from corpus_builder.errors import ProjectError
from trainer.run_paths import CHECKPOINT, CHECKPOINT_COMPLETE


def mark_complete(checkpoint_dir: Path, *, step: int, ranks: int) -> None:
    """Make a folder a checkpoint: call it when every rank has written its part."""
    partial = checkpoint_dir / f"{CHECKPOINT_COMPLETE}.partial"
    with partial.open("w", encoding="utf-8") as file:
        json.dump({"step": step, "ranks": ranks}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, checkpoint_dir / CHECKPOINT_COMPLETE)


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints of one run, the newest (highest step) last."""
    found = [
        (int(match.group(1)), path)
        for path in (run_dir.iterdir() if run_dir.is_dir() else ())
        if (match := CHECKPOINT.match(path.name)) and (path / CHECKPOINT_COMPLETE).is_file()
    ]
    return [path for _, path in sorted(found)]


def find_resume_point(run_dir: Path, resume_from: str | None) -> Path | None:
    """Return the checkpoint to go on from: this run's newest, else `resume_from`, None to start anew.

    Args:
        resume_from: A checkpoint, or a folder of checkpoints whose newest complete one is meant.

    Raises:
        ProjectError: `checkpoint_missing`: `resume_from` holds no complete checkpoint.
    """
    own = complete_checkpoints(run_dir)
    if own or resume_from is None:
        return own[-1] if own else None
    asked = Path(resume_from)
    if (asked / CHECKPOINT_COMPLETE).is_file():
        return asked
    others = complete_checkpoints(asked)
    if not others:
        raise ProjectError("checkpoint_missing", path=resume_from)
    return others[-1]


def delete_old(run_dir: Path, *, keep: int) -> list[str]:
    """Delete this run's complete checkpoints but the newest `keep`; return the names that went."""
    gone = complete_checkpoints(run_dir)[: -max(1, keep)]
    for path in gone:
        (path / CHECKPOINT_COMPLETE).unlink()  # first, so that a half-deleted folder is no checkpoint
        shutil.rmtree(path)
    return [path.name for path in gone]


def delete_incomplete(run_dir: Path) -> list[str]:
    """Delete what an interrupted save of this run left behind; return the names that went."""
    left = [
        path
        for path in (run_dir.iterdir() if run_dir.is_dir() else ())
        if CHECKPOINT.match(path.name) and not (path / CHECKPOINT_COMPLETE).is_file()
    ]
    for path in left:
        shutil.rmtree(path)
    return [path.name for path in left]
