"""Where reading a log goes on: a byte in a file that may have been moved, cut or replaced since. Asks only.

Runs on the box: standard library and Python 3.8 only. A log is known by its inode, its first bytes and the bytes
before the place; a cursor without a key is only a number, and tells no more than that a log became shorter.

    {"offset": 5120, "key": "8a3f.0123456789abcdef"}
"""

import hashlib
import os
import re
from dataclasses import dataclass
from typing import BinaryIO, List, Optional

KEY = re.compile(r"[0-9a-f]{1,16}\.[0-9a-f]{16}\Z")
#: The log was cut; moved aside, the rest of it is read there first; or another one lies there and the rest is gone.
TRUNCATED, ROTATED, REPLACED = "truncated", "rotated", "replaced"
_HEAD_BYTES, _BEFORE_BYTES = 1024, 256
_PACKED = (".gz", ".xz", ".bz2", ".zst", ".zip")
_MOST_SIBLINGS = 50


@dataclass(frozen=True)
class LogPlace:
    """The file to read and where in it; `change` is why that is not where the cursor pointed, else None."""

    path: str
    offset: int
    change: Optional[str] = None


def key_at(file: BinaryIO, offset: int) -> str:
    """Return the key of `offset` in an open log; the file's position is moved."""
    digest = hashlib.sha256()
    for start, end in ((0, min(offset, _HEAD_BYTES)), (max(0, offset - _BEFORE_BYTES), offset)):
        file.seek(start)
        digest.update(file.read(end - start))
    return "%x.%s" % (os.fstat(file.fileno()).st_ino, digest.hexdigest()[:16])


def find_place(path: str, offset: int, key: Optional[str]) -> LogPlace:
    """Return where to read on after `offset` of the log that `key` names, or of whichever lies at `path`."""
    if key is None:
        return LogPlace(path, offset) if offset <= _size(path) else LogPlace(path, 0, TRUNCATED)
    inode, _, _ = key.partition(".")
    here = _key(path, offset)
    if here == key:
        return LogPlace(path, offset)
    moved = _find_moved(path, offset, key)
    if moved is not None:
        is_drained = offset >= _size(moved) and os.path.exists(path)
        return LogPlace(path, 0, ROTATED) if is_drained else LogPlace(moved, offset, ROTATED)
    if here is not None and offset > 0 and _content(here) == _content(key):
        return LogPlace(path, offset)  # the same bytes in a file that was copied back
    return LogPlace(path, 0, TRUNCATED if _inode(path) == inode else REPLACED)


def _find_moved(path: str, offset: int, key: str) -> Optional[str]:
    """Return the file beside `path` that the key fits: by inode (renamed), else by its bytes (copied, then cut)."""
    keys = [(name, found) for name in _siblings(path) for found in [_key(name, offset)] if found is not None]
    by_inode = [name for name, found in keys if found == key]
    by_bytes = [name for name, found in keys if offset > 0 and _content(found) == _content(key)]
    return next(iter(by_inode + by_bytes), None)


def _siblings(path: str) -> List[str]:
    """Return what rotation may have made of a log, `train.log.1` or `train.log-20260503`, youngest first."""
    folder, name = os.path.split(path)
    try:
        names = [item for item in os.listdir(folder) if item.startswith((name + ".", name + "-"))]
    except OSError:
        return []
    paths = [os.path.join(folder, item) for item in names if not item.endswith(_PACKED)]
    files = [item for item in paths if os.path.isfile(item) and not os.path.islink(item)]
    return sorted(files, key=os.path.getmtime, reverse=True)[:_MOST_SIBLINGS]


def _key(path: str, offset: int) -> Optional[str]:
    """Return the key of `offset` in a file, None where the file is shorter or not there."""
    try:
        with open(path, "rb") as file:
            return key_at(file, offset) if os.fstat(file.fileno()).st_size >= offset else None
    except OSError:
        return None


def _content(key: str) -> str:
    return key.partition(".")[2]


def _inode(path: str) -> Optional[str]:
    try:
        return "%x" % os.stat(path).st_ino
    except OSError:
        return None


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0
