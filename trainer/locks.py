"""One setup and one run at a time on a box: a lock is a JSON file that names its owner. Side effects: files.

Runs on the box too: standard library and Python 3.8 only. A lock is stale when its process is gone: pid, start
ticks (field 22 of `/proc/<pid>/stat`) and boot id must all match; no wall clock decides (design 4.4, 4.8).

    {"owner": "alice", "action": "setup-and-train", "name": "20260503-101500-3fa1", "pid": 4242,
     "start_ticks": 991, "boot_id": "0b6e…"}
"""

import contextlib
import fcntl
import json
import os
from dataclasses import asdict, dataclass
from typing import Callable, Optional

from corpus_builder.errors import ProjectError


@dataclass(frozen=True)
class Process:
    """A process that can be told from a later one with the same pid."""

    pid: int
    start_ticks: int
    boot_id: str


@dataclass(frozen=True)
class Lock:
    """Who holds a lock; `name` is the run or setup id."""

    owner: str
    action: str
    name: str
    process: Process


def boot_id(proc: str = "/proc") -> str:
    """Return the kernel's boot id; it changes at every boot."""
    with open(os.path.join(proc, "sys/kernel/random/boot_id"), encoding="ascii") as file:
        return file.read().strip()


def start_ticks(pid: int, proc: str = "/proc") -> Optional[int]:
    """Return when process `pid` started, in clock ticks since boot; None when it is gone or a zombie."""
    try:
        with open(os.path.join(proc, str(pid), "stat"), encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # the name may hold spaces and brackets
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def identify(pid: int) -> Process:
    """Return process `pid` of this box; raise ProcessLookupError when it is gone."""
    ticks = start_ticks(pid)
    if ticks is None:
        raise ProcessLookupError(pid)
    return Process(pid, ticks, boot_id())


def is_alive(process: Process) -> bool:
    """Whether exactly this process still runs on this boot."""
    return process.boot_id == boot_id() and start_ticks(process.pid) == process.start_ticks


def read_lock(path: str) -> Optional[Lock]:
    """Return the lock in `path`, None when there is none. A torn file counts as held by nobody known."""
    try:
        with open(path, encoding="utf-8") as file:
            packed = json.load(file)
        return Lock(packed["owner"], packed["action"], packed["name"], Process(**packed["process"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        return Lock("unknown", "unknown", "unknown", Process(0, 0, ""))


def take_lock(path: str, lock: Lock, is_process_alive: Callable[[Process], bool] = is_alive) -> None:
    """Hold `path` for `lock`; a stale lock is taken over.

    Looking at the holder and taking its place are one step for all takers: the kernel's lock on `<path>.guard` orders
    them, and falls with its taker. Links and renames alone can't: whoever moves a stale lock aside may move the lock
    of one who was faster, and a third takes the empty place before it is given back.

    Raises:
        ProjectError: `lock_held`, naming the action and id of the holder.
    """
    mine = "%s.%d" % (path, os.getpid())
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    with open(path + ".guard", "ab") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        holder = read_lock(path)
        if holder is not None and is_process_alive(holder.process):
            raise _held(holder)
        try:
            with open(mine, "w", encoding="utf-8") as file:
                json.dump(asdict(lock), file)
            os.replace(mine, path)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(mine)
            raise


def _held(holder: Lock) -> ProjectError:
    return ProjectError("lock_held", action=holder.action, name=holder.name, owner=holder.owner)


def release_lock(path: str, process: Process) -> bool:
    """Remove the lock if `process` holds it; return whether it did."""
    holder = read_lock(path)
    if holder is None or holder.process != process:
        return False
    os.unlink(path)
    return True
