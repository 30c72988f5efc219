"""Where torch extensions are built, and the locks that a killed build left there. `drop_stale_locks` deletes files.

torch keeps one folder for all environments of a user, and builds anew whenever another one comes; here each has its
own. torch marks a build of a C++ extension (DeepSpeed's CPU Adam) by an empty file `lock`, and every later process
waits for that file to go, without an end and without a word; a build that is killed never removes it.
Runs on the box too: standard library and Python 3.8 only.
"""

import hashlib
import os
import time
from typing import Iterator, List

EXTENSIONS_DIR = "TORCH_EXTENSIONS_DIR"
LOCK = "lock"  # torch.utils.file_baton, as torch.utils.cpp_extension names it
#: Between the lock and the compiler's start lie seconds in which nobody works in the folder yet.
YOUNG_S = 20.0


def extensions_dir(python: str) -> str:
    """Return where the environment of an interpreter builds its extensions: where it was told to, else its own place.

    Source: torch.utils.cpp_extension, `get_default_build_root`; ours lies in that folder.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    environment = os.path.dirname(os.path.dirname(os.path.abspath(python)))
    name = "zy-" + hashlib.sha256(os.fsencode(environment)).hexdigest()[:16]
    return os.environ.get(EXTENSIONS_DIR) or os.path.join(cache, "torch_extensions", name)


def drop_stale_locks(folder: str, proc: str = "/proc") -> List[str]:
    """Delete the locks below `folder` where nobody builds any more; return the names of those extensions."""
    dropped = []
    for path in _locks(folder):
        try:
            age_s = time.time() - os.stat(path).st_mtime  # far below zero where the clock was set back since
            if abs(age_s) < YOUNG_S or _is_worked_in(os.path.dirname(path), proc):
                continue
            os.unlink(path)
        except OSError:  # another process was first, or it is not ours
            continue
        dropped.append(os.path.basename(os.path.dirname(path)))
    return dropped


def _locks(folder: str) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        if LOCK in names:
            yield os.path.join(parent, LOCK)


def _is_worked_in(folder: str, proc: str) -> bool:
    """Whether a process has its working directory there: ninja and the compiler do."""
    real = os.path.realpath(folder)
    for name in os.listdir(proc):
        try:
            if name.isdigit() and os.readlink(os.path.join(proc, name, "cwd")) == real:
                return True
        except OSError:  # gone, or another user's
            continue
    return False
