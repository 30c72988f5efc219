"""How everything on the box stands, in one answer; the GPU query runs beside the rest. Asks only. Side effects: none.

Runs on the box: standard library and Python 3.8 only.
"""

import json
import os
from dataclasses import asdict
from typing import Any, Dict, List, Optional, Tuple

from controller.boxside.arguments import Arguments
from controller.boxside.facts import read_disk, read_locks
from controller.boxside.health import GIB
from controller.boxside.orphans import find_orphan
from controller.boxside.work import KINDS, SETUP, TRAIN, Work, find_newest, find_works, look_at, read_json
from trainer.curve import describe_learning
from trainer.gpus import GpuQuery
from trainer.journal import read_tail
from trainer.run_paths import CHECKPOINT, CHECKPOINT_COMPLETE, RUN_ID, DataPaths
from trainer.run_state import LOST

MAX_CHECKPOINTS = 50
MAX_POINTS = 2000  # of a curve; a few times more than any run that was seen


def status(args: Arguments) -> Dict[str, Any]:
    """Operation `status`."""
    query = GpuQuery()
    data, root = args.path("data"), args.path("root")
    run, setup = (find_orphan(data, root, kind) or find_newest(data, kind) for kind in (TRAIN, SETUP))
    return {
        "run": None if run is None else describe_run(run),
        "setup": None if setup is None else describe_work(setup),
        "checkpoints": find_checkpoints(data),
        "disks": {path: read_disk(path) for path in (data, root)},
        "locks": read_locks(root),
        "secrets": find_secret_names(data),
        "gpus": query.read().rows,
    }


def manifest(args: Arguments) -> Dict[str, Any]:
    """Operation `manifest`: the account of the corpus, None when there is none."""
    return {"manifest": read_json(DataPaths(args.path("data")).manifest)}


def describe_work(work: Work) -> Dict[str, Any]:
    """Return what is the same for runs and setups. Of a lost one, the remedy is what its log shows."""
    state = look_at(work).state
    remedy = work.outcome.remedy if work.outcome else None
    if state == LOST:
        from trainer.remedies import find_remedy  # its patterns take as long as the rest of an answer

        known = find_remedy(read_tail(work.paths.log, work.log_start))
        remedy = known.code if known else None
    return {
        "id": work.id,
        "state": state,
        "step_name": (read_json(work.paths.state) or {}).get("step_name") or None,
        "owner": work.spec.get("owner"),
        "action": work.spec.get("action"),
        "attempt": len(work.attempts),
        "started_at": work.attempts[-1].get("started_at") if work.attempts else None,
        "outcome": None if work.outcome is None else asdict(work.outcome),
        "error": (work.outcome.error if work.outcome else None) or work.error,
        "remedy": remedy,
    }


def describe_run(work: Work) -> Dict[str, Any]:
    """Return a run: how far it is, and its loss per class."""
    standing = look_at(work)
    progress = standing.progress or {}
    extras = progress.get("extras", {})
    state = read_json(work.paths.state) or {}
    return dict(
        describe_work(work),
        version=work.version,
        last_step=progress.get("step", work.outcome.last_step if work.outcome else 0),
        total=progress.get("total", state.get("total", 0)),
        epoch=progress.get("epoch"),
        total_epochs=progress.get("total_epochs"),
        loss=progress.get("loss"),
        losses={key[len("loss_") :]: value for key, value in extras.items() if key.startswith("loss_")},
        eta_s=standing.eta_s,
        learning=describe_learning(read_points(work.paths.progress)),
    )


def read_points(path: str) -> List[Tuple[int, Any, Dict[str, Any]]]:
    """Return (step, loss, extras) of a run's progress over all attempts, at most MAX_POINTS and every look."""
    try:
        with open(path, "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    every = 1 + len(lines) // MAX_POINTS
    points = []
    for place, line in enumerate(lines):
        if place % every and b'"eval_loss"' not in line:
            continue
        try:
            row = json.loads(line.decode("utf-8"))
            points.append((row["step"], row["loss"], row.get("extras", {})))
        except (ValueError, KeyError, TypeError):
            continue  # torn by a full disk
    return points


def find_checkpoints(data: str) -> List[Dict[str, Any]]:
    """Return the checkpoints and results of every version, newest run first, at most MAX_CHECKPOINTS."""
    paths = DataPaths(data)
    found = []
    for version in _folders(paths.checkpoints):
        for run in _run_names(os.path.join(paths.checkpoints, version)):
            folder = os.path.join(paths.checkpoints, version, run)
            found += [(run, _describe_checkpoint(folder, version, run, name)) for name in sorted(os.listdir(folder))]
    rows = [row for _, row in sorted(found, key=lambda pair: pair[0], reverse=True) if row is not None]
    return rows[:MAX_CHECKPOINTS]


def _folders(path: str) -> List[str]:
    """Return the names of the real folders in `path`; pointers to them would count twice."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _run_names(path: str) -> List[str]:
    """Return the runs of a version; the folder of one may be a link to where its recipe wanted it."""
    return [name for name in sorted(os.listdir(path)) if RUN_ID.match(name) and os.path.isdir(os.path.join(path, name))]


def _describe_checkpoint(folder: str, version: str, run: str, name: str) -> Optional[Dict[str, Any]]:
    match = CHECKPOINT.match(name)
    if match is None and name != "final":
        return None
    path = os.path.join(folder, name)
    return {
        "path": path,
        "version": version,
        "run": run,
        "step": int(match.group(1)) if match else None,
        "gib": round(size_of(path) / GIB, 3),
        "complete": match is None or os.path.exists(os.path.join(path, CHECKPOINT_COMPLETE)),
    }


def size_of(folder: str) -> int:
    """Return the bytes of all files in a folder; what vanishes meanwhile does not count."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                pass
    return total


def find_secret_names(data: str) -> List[str]:
    """Return the names, never the values, of what lies in secret files on the box."""
    names = {name for kind in KINDS for work in find_works(data, kind) for name in read_json(work.paths.secrets) or {}}
    return sorted(names)
