"""How well a box is: its system, memory, limits and clock, and what ails its GPUs. Asks and changes nothing.

Runs on the box: standard library and Python 3.8 only. "Could not ask" is None, never an empty answer. Side effects:
none.

    {"os": "Ubuntu 22.04.4 LTS", "driver": "550.54.15", "xids": [79],
     "ram": {"total_gib": 503.5, "available_gib": 480.1}, "shm": {"free_gib": 0.06, "total_gib": 0.06},
     "limits": {"nofile": 1024, "memlock": 8388608, "nproc": -1}, "time": 1777800000.0}

Of each GPU: `ecc_uncorrected`, errors since the driver was loaded; `rows_failed`, memory that can no longer be
replaced; `foreign`, processes that are no run of ours.
"""

import os
import re
import resource
import time
from typing import Any, Dict, List, Optional, Sequence

from trainer.children import MARK
from trainer.gpus import read_query, start_query, start_smi

GIB = 1 << 30
#: Keys of `nvidia-smi --query-gpu`; drivers before 450 do not know the last one.
FIELDS = ("index", "driver_version", "ecc.errors.uncorrected.volatile.total", "remapped_rows.failure")
_TIMEOUT_S = 20
_DMESG_TIMEOUT_S = 5
#: Faults of a program, what follows from its end, and notes are no trouble of the GPU (NVIDIA's Xid catalogue).
_HARMLESS_XIDS = frozenset((13, 31, 43, 45, 63))
_XID = re.compile(r"NVRM: Xid \([^)\n]{1,60}\): (\d{1,4})\b")
_UNLIMITED = -1


class HealthQuery:
    """nvidia-smi and the kernel's log, started now and read later; a box without nvidia-smi is asked for neither."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._smi = start_smi(FIELDS)
        self._dmesg = None if self._smi is None else start_query(["dmesg"])

    def read_gpus(self) -> Optional[List[Dict[str, Any]]]:
        """Return index, driver_version, ecc_uncorrected and rows_failed of each GPU; None where nobody could say."""
        fields: Sequence[str] = FIELDS
        text = read_query(self._smi, self._left(_TIMEOUT_S))
        if text is None and self._smi is not None and self._smi.returncode > 0:  # it answered: a key is unknown to it
            fields = FIELDS[:-1]
            text = read_query(start_smi(fields), _TIMEOUT_S)
        return None if text is None else parse_health(text, fields)

    def read_xids(self) -> Optional[List[int]]:
        """Return the kinds of trouble that the driver has noted since the boot, None where the log is not ours."""
        text = read_query(self._dmesg, self._left(_DMESG_TIMEOUT_S))
        if text is None:
            return None
        return sorted({int(number) for number in _XID.findall(text)} - _HARMLESS_XIDS)

    def _left(self, timeout_s: float) -> float:
        return max(1.0, self._began + timeout_s - time.monotonic())


def parse_health(text: str, fields: Sequence[str]) -> List[Dict[str, Any]]:
    """Return the rows of nvidia-smi's CSV; what it does not know (`[N/A]`) is None."""
    rows = []
    for line in text.splitlines():
        cells = dict(zip(fields, (cell.strip() for cell in line.split(","))))
        if "driver_version" not in cells or not cells["index"].isdigit():
            continue
        failed = cells.get("remapped_rows.failure", "").lower()
        uncorrected = cells.get("ecc.errors.uncorrected.volatile.total", "")
        rows.append(
            {
                "index": int(cells["index"]),
                "driver_version": cells["driver_version"] or None,
                "ecc_uncorrected": int(uncorrected) if uncorrected.isdigit() else None,
                "rows_failed": failed in ("yes", "1") if failed in ("yes", "no", "0", "1") else None,
            }
        )
    return rows


def read_driver() -> Optional[str]:
    """Return the version of the GPUs' driver, None where there is none or it does not say."""
    rows = parse_health(read_query(start_smi(FIELDS[:2]), _TIMEOUT_S) or "", FIELDS[:2])
    return rows[0]["driver_version"] if rows else None


def read_health(query: HealthQuery, gpus: Optional[List[Dict[str, Any]]], *, is_at_work: bool) -> Dict[str, Any]:
    """Return everything but the GPUs' own rows, which are completed in place.

    Args:
        gpus: Rows of `trainer.gpus`.
        is_at_work: Whether a run of ours is: then a process that cannot be seen from here may be its.
    """
    found = query.read_gpus()
    by_index = {row["index"]: row for row in found or []}
    for row in gpus or []:
        health = by_index.get(row["index"], {})
        row["ecc_uncorrected"] = health.get("ecc_uncorrected")
        row["rows_failed"] = health.get("rows_failed")
        pids = row.get("pids")
        row["foreign"] = None if pids is None else sum(is_foreign(pid, is_at_work=is_at_work) for pid in pids)
    return {
        "os": read_os(),
        "driver": found[0]["driver_version"] if found else None,
        "xids": query.read_xids(),
        "ram": read_ram(),
        "shm": read_size("/dev/shm"),
        "limits": read_limits(),
        "time": time.time(),
    }


def is_foreign(pid: int, *, is_at_work: bool) -> bool:
    """Whether a process on a GPU is none of ours; one in another container has no folder here."""
    try:
        with open("/proc/%d/environ" % pid, "rb") as file:
            return not any(item.startswith((MARK + "=").encode()) for item in file.read().split(b"\0"))
    except FileNotFoundError:
        return not is_at_work
    except OSError:  # another user's
        return True


def read_os(path: str = "/etc/os-release") -> Optional[str]:
    """Return e.g. `Ubuntu 22.04.4 LTS` (os-release(5))."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            values = dict(line.rstrip("\n").partition("=")[::2] for line in file if "=" in line)
    except OSError:
        return None
    return values.get("PRETTY_NAME", "").strip("\"'")[:80] or None


def read_ram(path: str = "/proc/meminfo") -> Optional[Dict[str, float]]:
    """Return the machine's memory and what of it can be used without swapping, in GiB (proc(5))."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            values = dict(line.partition(":")[::2] for line in file)
        total, available = (int(values[name].split()[0]) * 1024 / GIB for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError, IndexError):
        return None
    return {"total_gib": round(total, 2), "available_gib": round(available, 2)}


def read_size(path: str) -> Optional[Dict[str, float]]:
    """Return free and total GiB of the file system that is mounted at `path`, None where there is none."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    sizes = {"free_gib": found.f_bavail, "total_gib": found.f_blocks}
    return {name: round(blocks * found.f_frsize / GIB, 3) for name, blocks in sizes.items()}


def read_limits() -> Dict[str, Optional[int]]:
    """Return the soft limits of open files, locked memory (bytes) and processes; -1 is unlimited."""
    kinds = {"nofile": "RLIMIT_NOFILE", "memlock": "RLIMIT_MEMLOCK", "nproc": "RLIMIT_NPROC"}
    return {name: _limit(kind) for name, kind in kinds.items()}


def _limit(kind: str) -> Optional[int]:
    try:
        soft = resource.getrlimit(getattr(resource, kind))[0]
    except (AttributeError, OSError, ValueError):
        return None
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft
