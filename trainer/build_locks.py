"""Locks that a killed build of torch extensions has left behind. Side effects: `drop_stale_locks` deletes them.

torch marks a build of a C++ extension (DeepSpeed's CPU Adam) by an empty file `lock`, and every later process waits
for that file to go, without an end and without a word. A build that is killed never removes it. Runs on the box too:
standard library and Python 3.8 only.
"""

import os
import time
from typing import Iterator, List

LOCK = "lock"  # torch.utils.file_baton, as torch.utils.cpp_extension names it
#: Between the lock and the compiler's start lie seconds in which nobody works in the folder yet.
YOUNG_S = 20.0


def extensions_dir() -> str:
    """Return where torch builds extensions (torch.utils.cpp_extension, `_get_build_directory`)."""
    default = os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "torch_extensions")
    return os.environ.get("TORCH_EXTENSIONS_DIR") or default


def drop_stale_locks(folder: str = "", proc: str = "/proc") -> List[str]:
    """Delete the locks in whose folder nobody builds any more; return the names of those extensions."""
    dropped = []
    for path in _locks(folder or extensions_dir()):
        try:
            if time.time() - os.stat(path).st_mtime < YOUNG_S or _is_worked_in(os.path.dirname(path), proc):
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
