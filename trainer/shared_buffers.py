"""Shared memory that DeepSpeed's ranks on a CPU leave behind: 66 MiB each, in RAM, until somebody deletes it.

DeepSpeed never removes these files (csrc/cpu/comm/shm.cpp), so a machine fills with them run after run. Side effects:
deletes files of this user that no process has mapped.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

FOLDER = Path("/dev/shm")
NAME = "deepspeed_allreduce_buffer_"
#: Between a file's making and its mapping lies a moment.
YOUNG_S = 20.0


def drop_own_buffers(folder: Path = FOLDER) -> int:
    """Delete the buffers of this run, which its ranks have mapped already or need no more; return how many went."""
    place = f"{os.environ.get('MASTER_ADDR', '')}_{os.environ.get('MASTER_PORT', '')}_"
    return sum(_delete(path) for path in folder.glob(f"{NAME}*_{place}*"))


def drop_dead_buffers(folder: Path = FOLDER, proc: Path = Path("/proc")) -> int:
    """Delete the buffers that killed runs left: ours, not fresh, mapped by nobody; return how many went."""
    old = [path for path in folder.glob(f"{NAME}*") if _is_old(path)]
    if not old:
        return 0
    mapped = _mapped_names(proc)
    return sum(_delete(path) for path in old if path.name not in mapped)


def _is_old(path: Path) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    age_s = time.time() - status.st_mtime  # far below zero where the clock was set back since
    return status.st_uid == os.getuid() and abs(age_s) > YOUNG_S


def _mapped_names(proc: Path) -> set[str]:
    names: set[str] = set()
    for maps in proc.glob("[0-9]*/maps"):
        try:
            lines = maps.read_text("utf-8", errors="replace").splitlines()
        except OSError:  # gone, or another user's
            continue
        names |= {line.split()[5].rpartition("/")[2] for line in lines if NAME in line}
    return names


def _delete(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True
