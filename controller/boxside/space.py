"""Room for the dialog ZIP and what it unpacks to. Asks only; errors as values.

Runs on the box: standard library and Python 3.8 only. Side effects: none.
"""

import errno
import os
import shutil

from controller.boxside.facts import nearest_existing
from controller.boxside.health import GIB
from corpus_builder.errors import ProjectError

RESERVE_BYTES = 64 << 20  # left free beside the ZIP and what it unpacks to


def check_space(path: str, *, missing_bytes: int, whole_bytes: int) -> None:
    """Raise `box_disk_full` unless the rest of the ZIP fits where `path` lies, and as much as all of it unpacked."""
    needed = missing_bytes + whole_bytes + RESERVE_BYTES
    if shutil.disk_usage(os.path.dirname(path)).free < needed:
        raise _full(path, needed)


def disk_error(path: str, error: OSError, *, needed_bytes: int) -> ProjectError:
    """Return what a failed write to `path` means; `needed_bytes` were still to come."""
    folder = os.path.dirname(path)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _full(path, 2 * needed_bytes + RESERVE_BYTES)
    return ProjectError("box_not_writable", path=folder, reason=os.strerror(error.errno or 0))


def _full(path: str, needed_bytes: int) -> ProjectError:
    folder = os.path.dirname(path)
    free = shutil.disk_usage(nearest_existing(folder)).free
    return ProjectError(
        "box_disk_full", path=folder, free_gib=round(free / GIB, 2), needed_gib=round(needed_bytes / GIB, 2)
    )
