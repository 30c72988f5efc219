"""What this machine has left for a run: memory under the limits of its control group, /dev/shm, disk.

Side effects: reads /proc, /sys and file systems.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

#: A control group without a limit says `max` (version 2), or a number near 2^63 (version 1).
UNLIMITED_FROM = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Bytes that are free now; None is unknown.

    `host_limit_by`: `ram`, or `cgroup` where a container may use less than the machine has.
    """

    host_free_bytes: int
    host_limit_by: str
    shm_free_bytes: int | None
    disk_free_bytes: int


def read_machine(folder: Path, *, root: Path = Path("/")) -> Machine:
    """Return what is free for a run whose checkpoints lie in (or below) `folder`."""
    while not folder.exists():
        folder = folder.parent
    available, limit = read_available_bytes(root / "proc/meminfo"), read_cgroup_free_bytes(root)
    shm = root / "dev/shm"
    return Machine(
        host_free_bytes=available if limit is None else min(available, limit),
        host_limit_by="ram" if limit is None or limit >= available else "cgroup",
        shm_free_bytes=shutil.disk_usage(shm).free if shm.is_dir() else None,
        disk_free_bytes=shutil.disk_usage(folder).free,
    )


def read_available_bytes(meminfo: Path) -> int:
    """Return MemAvailable: what can be used without swapping (proc(5))."""
    for line in meminfo.read_text("ascii").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise ValueError(f"{meminfo}: no MemAvailable")


def read_cgroup_free_bytes(root: Path) -> int | None:
    """Return what the control groups of this process leave it, the tightest of them; None where there is no limit.

    Page cache counts as used there, but is given back under pressure. Source: the kernel's
    Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    free = [left for folder in _cgroup_folders(root) if (left := _left_in(folder)) is not None]
    return min(free, default=None)


def _cgroup_folders(root: Path) -> list[Path]:
    """Return the folders of this process's memory group and of all groups around it (cgroups(7))."""
    try:
        lines = (root / "proc/self/cgroup").read_text("ascii").splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        own = top / path.lstrip("/")
        folders += [folder for folder in (own, *own.parents) if folder == top or top in folder.parents]
    return folders


def _left_in(folder: Path) -> int | None:
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit, used = (folder / limit_name).read_text().strip(), int((folder / used_name).read_text())
            cached = _read_file_cache(folder / "memory.stat")
        except (OSError, ValueError):
            continue
        if limit != "max" and int(limit) < UNLIMITED_FROM:
            return max(0, int(limit) - used + cached)
    return None


def _read_file_cache(stat: Path) -> int:
    values = dict(line.split()[:2] for line in stat.read_text().splitlines() if line)
    return int(values.get("inactive_file", values.get("total_inactive_file", "0")))


def count_processors() -> int:
    """Return the processors that this process may use."""
    return len(os.sched_getaffinity(0))
