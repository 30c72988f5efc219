"""Text -> a file that only its owner can read, whole when it appears. Side effects: writes it.

A disk that fills up leaves nothing half written behind, for that would hold the room that the next try needs.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from corpus_builder.errors import ProjectError

#: A disk that is full, or a quota that is.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_GIB = 1024**3
#: What is asked for beside what was to be written: a disk filled to its last byte fails elsewhere.
_SPARE_BYTES = 64 * 2**20


def save_private(text: str, path: Path) -> None:
    """Write `text` to `path` by rename."""
    os.replace(write_partial(text, path), path)


def write_partial(text: str, path: Path) -> Path:
    """Write `text` beside `path`, on the disk when this returns, and return where; nothing stays of a failure."""
    partial = partial_of(path)
    partial.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with gone_on_failure(partial), os.fdopen(os.open(partial, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return partial


@contextmanager
def gone_on_failure(partial: Path) -> Iterator[None]:
    """Remove a file that could not be written to its end."""
    try:
        yield
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def partial_of(path: Path) -> Path:
    """Return where a file is written before it is moved to `path`."""
    return path.with_name(path.name + ".partial")


def disk_full(folder: Path, needed_bytes: int) -> ProjectError:
    """Return the error of a disk that took no more; `needed_bytes` is the least that was still to be written."""
    free = shutil.disk_usage(folder).free
    needed = max(needed_bytes, free) + _SPARE_BYTES
    return ProjectError(
        "box_disk_full", path=str(folder), free_gib=round(free / _GIB, 2), needed_gib=round(needed / _GIB, 2)
    )
