"""What a box is: Python, tmux, GPUs, disks, locks, health, the base model. Asks and changes nothing.

Runs on the box: standard library and Python 3.8 only. "Could not ask" is None, never an empty answer. Side effects:
none.

    {"python": "3.11.2", "tmux": "3.3a", "home": "/root", "user": "root", "gpus": [{"index": 0, "name":
     "Tesla V100-SXM2-32GB", "memory_mib": 32768, "used_mib": 3, "utilization": 0, "compute_capability": "7.0",
     "processes": 0, "pids": [], "ecc_uncorrected": 0, "rows_failed": false, "foreign": 0}], "gpus_silent": false,
     "disks": {"/data/zy": {"free_gib": 402.1, "total_gib": 1000.0}}, "release_present": true,
     "locks": {"setup": null, "run": null}, "base_model": {"exists": true, "config": true, "missing": []},
     "health": {…}}                                                                              health.py says what
"""

import json
import os
import platform
import pwd
import shutil
import subprocess
from typing import Any, Dict, Optional

from controller.boxside.archives import find_archives
from controller.boxside.arguments import DIGEST, Arguments
from controller.boxside.health import GIB, HealthQuery, read_health
from trainer.base_model import find_model_faults, is_adapter
from trainer.gpus import GpuQuery
from trainer.locks import Lock, is_alive, read_lock
from trainer.run_paths import RootPaths

RELEASE_COMPLETE = "release.json"  # written last into a release


def read_tmux_version() -> Optional[str]:
    """Return e.g. `3.3a`, None when there is no tmux."""
    try:
        answer = subprocess.run(
            ["tmux", "-V"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.decode("utf-8", "replace").strip().rpartition(" ")[2] or None


def read_disk(path: str) -> Dict[str, float]:
    """Return free and total GiB of the file system where `path` lies or would lie."""
    usage = shutil.disk_usage(nearest_existing(path))
    return {"free_gib": round(usage.free / GIB, 2), "total_gib": round(usage.total / GIB, 2)}


def nearest_existing(path: str) -> str:
    """Return `path`, or the nearest folder above it that exists."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def read_live_lock(path: str) -> Optional[Lock]:
    """Return a lock whose process is alive, else None."""
    lock = read_lock(path)
    return lock if lock is not None and is_alive(lock.process) else None


def read_locks(root: str) -> Dict[str, Optional[Dict[str, str]]]:
    """Return who holds the setup lock and the run lock."""
    paths = RootPaths(root)
    found: Dict[str, Optional[Dict[str, str]]] = {}
    for name, path in (("setup", paths.setup_lock), ("run", paths.run_lock)):
        lock = read_live_lock(path)
        found[name] = None if lock is None else {"owner": lock.owner, "action": lock.action, "name": lock.name}
    return found


def is_release_present(root: str, digest: str) -> bool:
    """Whether a release lies whole on the box: `release.json` is written last and names it."""
    try:
        with open(os.path.join(RootPaths(root).release(digest), RELEASE_COMPLETE), encoding="utf-8") as file:
            return bool(json.load(file)["digest"] == digest)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_base_model(folder: str) -> Dict[str, Any]:
    """Return whether the base model is there and whole; `missing` are weight files."""
    faults = find_model_faults(folder)
    codes = {fault.code for fault in faults}
    return {
        "adapter": is_adapter(folder),
        "exists": "base_model_missing" not in codes,
        "config": not codes & {"base_model_missing", "base_model_no_config"},
        "tokenizer": not codes & {"base_model_missing", "tokenizer_missing"},
        "missing": [fault.file for fault in faults if fault.code == "base_model_incomplete"],
    }


def facts(args: Arguments) -> Dict[str, Any]:
    """Operation `facts`: everything that decides whether this box can do the job, in one answer."""
    query, health = GpuQuery(), HealthQuery()
    data, root = args.path("data"), args.path("root")
    base_model_dir, digest = args.optional_path("base_model_dir"), args.optional_text("digest", DIGEST)
    dialog_path, source = args.optional_path("dialog_path"), args.optional_text("dialog_source", DIGEST)
    locks, gpus = read_locks(root), query.read()
    return {
        "python": platform.python_version(),
        "tmux": read_tmux_version(),
        "home": os.path.expanduser("~"),
        "user": read_user(),
        "disks": {path: read_disk(path) for path in (data, root)},
        "release_present": digest is not None and is_release_present(root, digest),
        "locks": locks,
        "base_model": None if base_model_dir is None else read_base_model(base_model_dir),
        "dialog": None if dialog_path is None else {"exists": os.path.isfile(dialog_path)},
        "dialog_archive": source is not None and bool(find_archives(data, source)),
        "health": read_health(health, gpus.rows, is_at_work=locks["run"] is not None),
        "gpus": gpus.rows,
        "gpus_silent": gpus.is_installed and gpus.rows is None,
    }


def read_user() -> str:
    """Return the name of the user that everything runs as."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
