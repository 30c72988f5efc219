"""Which GPUs a machine has, which are busy, and which a run takes. `choose_gpus` is pure; `GpuQuery` asks nvidia-smi.

Runs on the box too: standard library and Python 3.8 only. "Could not ask" is None, never an empty answer.

    >>> parse_gpus("0, Tesla V100-SXM2-32GB, 32768, 3, 0, 7.0, GPU-5f2a\\n", "GPU-5f2a, 4711, 2048\\n")
    [{'index': 0, 'name': 'Tesla V100-SXM2-32GB', 'memory_mib': 32768, 'used_mib': 3, 'utilization': 0,
      'compute_capability': '7.0', 'processes': 1, 'pids': [4711]}]
"""

import subprocess
from dataclasses import dataclass
from typing import Any, Callable, Container, Dict, Iterable, List, Optional, Sequence, Union

from corpus_builder.errors import ProjectError

#: Keys of `nvidia-smi --query-gpu` (`nvidia-smi --help-query-gpu`); the driver's oldest ones first.
FIELDS = ("index", "name", "memory.total", "memory.used", "utilization.gpu", "compute_cap", "uuid")
APP_FIELDS = ("gpu_uuid", "pid", "used_memory")  # `nvidia-smi --help-query-compute-apps`
TIMEOUT_S = 20
#: An idle GPU reports a few MiB to some hundreds (driver, display server, MPS); a model in use takes gigabytes.
BUSY_ABOVE_MIB = 1024
Row = Dict[str, Any]


@dataclass(frozen=True)
class Gpus:
    """The answer of nvidia-smi. `rows` is None when it could not be asked; `is_installed`: there is an nvidia-smi."""

    is_installed: bool
    rows: Optional[List[Row]]


@dataclass(frozen=True)
class Choice:
    """Numbers of the GPUs that a run takes, and of the busy ones that it would else have taken, in order."""

    chosen: List[int]
    skipped: List[int]


class GpuQuery:
    """nvidia-smi, started now and read later: it takes a second or more."""

    def __init__(self) -> None:
        self._gpus = start_smi(FIELDS)
        self._apps = None if self._gpus is None else start_smi(APP_FIELDS, "compute-apps")

    def read(self) -> Gpus:
        """Return the answer; a driver that is too old for `compute_cap` is asked without it."""
        if self._gpus is None:
            return Gpus(False, None)
        fields: Sequence[str] = FIELDS
        text = read_query(self._gpus)
        apps = read_query(self._apps)
        if text is None:
            fields = tuple(name for name in FIELDS if name != "compute_cap")
            text = read_query(start_smi(fields))
        return Gpus(True, None if text is None else parse_gpus(text, apps, fields))


def start_smi(fields: Sequence[str], what: str = "gpu") -> "Optional[subprocess.Popen[str]]":
    """Start to ask nvidia-smi for fields of its GPUs, or of what runs on them (`compute-apps`)."""
    return start_query(["nvidia-smi", "--query-%s=%s" % (what, ",".join(fields)), "--format=csv,noheader,nounits"])


def start_query(argv: Sequence[str]) -> "Optional[subprocess.Popen[str]]":
    """Start a program that is asked something, and return at once; None where it is not there."""
    try:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            universal_newlines=True,
            errors="replace",
        )
    except OSError:
        return None


def read_query(running: "Optional[subprocess.Popen[str]]", timeout_s: float = TIMEOUT_S) -> Optional[str]:
    """Return what a program has printed; None where it is not there, has failed, or hangs: then it is ended."""
    if running is None:
        return None
    try:
        text, _ = running.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:  # a hung driver
        running.kill()
        running.communicate()
        return None
    return text if running.returncode == 0 else None


def parse_gpus(text: str, apps: Optional[str] = "", fields: Sequence[str] = FIELDS) -> List[Row]:
    """Return the rows of nvidia-smi's CSV; what it does not know (`[N/A]`) is None.

    Args:
        apps: The answer to `--query-compute-apps`; None where it could not be asked: then `processes` is None.
    """
    rows = []
    for line in text.splitlines():
        cells = dict(zip(fields, (cell.strip() for cell in line.split(","))))
        if "utilization.gpu" not in cells:
            continue
        capability = cells.get("compute_cap", "")
        pids = None if apps is None else _pids_on(apps, cells.get("uuid"))
        rows.append(
            {
                "index": _whole(cells["index"]),
                "name": cells["name"],
                "memory_mib": _whole(cells["memory.total"]),
                "used_mib": _whole(cells["memory.used"]),
                "utilization": _whole(cells["utilization.gpu"]),
                "compute_capability": capability if capability[:1].isdigit() else None,
                "processes": None if pids is None else len(pids),
                "pids": pids,
            }
        )
    return rows


def _pids_on(apps: str, uuid: Optional[str]) -> List[int]:
    """Return the processes on one GPU; a number that cannot be read counts as 0."""
    rows = [line.split(",") for line in apps.splitlines()]
    return [_whole(row[1]) or 0 if len(row) > 1 else 0 for row in rows if row[0].strip() == uuid]


def _whole(text: str) -> Optional[int]:
    try:
        return int(float(text))
    except ValueError:
        return None


def is_busy(row: Row) -> bool:
    """Whether somebody computes on a GPU, or more of its memory is taken than an idle one reports."""
    return bool(row.get("processes")) or (row.get("used_mib") or 0) > BUSY_ABOVE_MIB


def find_held(
    rows: Optional[Sequence[Row]], ours: Sequence[int], chosen: Container[int], *, is_visible: Callable[[int], bool]
) -> Optional[List[Row]]:
    """Return the GPUs on which memory is still held after an end: by `ours`, or by nobody who can be seen.

    Args:
        chosen: The GPUs that we had; on others only what is ours counts. Those of somebody else's process are left out.
        is_visible: Whether a pid is that of a process on this machine; one of another container is not.

    Returns:
        `{"index", "used_mib", "pids"}` of each; None when nvidia-smi could not be asked.
    """
    if rows is None or any(row["pids"] is None for row in rows):
        return None
    held = []
    for row in rows:
        pids = row["pids"]
        mine = [pid for pid in pids if pid in ours]
        is_orphaned = (
            row["index"] in chosen
            and (row["used_mib"] or 0) > BUSY_ABOVE_MIB
            and not any(is_visible(pid) for pid in pids)
        )
        if mine or is_orphaned:
            held.append({"index": row["index"], "used_mib": row["used_mib"], "pids": mine})
    return held


def choose_gpus(wanted: Union[int, Sequence[int]], seen: Sequence[Row]) -> Choice:
    """Return the GPUs for a run: the first free ones of a count, or exactly those of a list.

    Raises:
        ProjectError: `gpus_missing`: the machine does not have them; `gpus_busy`: too few of them are free.
    """
    rows = {row["index"]: row for row in seen}
    if isinstance(wanted, int):
        return _choose_first(wanted, rows)
    if not set(wanted) <= set(rows):
        raise ProjectError("gpus_missing", wanted=max(wanted) + 1, found=len(rows))  # number 7 is the eighth
    busy = [index for index in wanted if is_busy(rows[index])]
    if busy:
        raise ProjectError("gpus_busy", wanted=len(wanted), free=len(wanted) - len(busy), busy=_words(busy))
    return Choice(list(wanted), [])


def _choose_first(count: int, rows: Dict[int, Row]) -> Choice:
    if len(rows) < count:
        raise ProjectError("gpus_missing", wanted=count, found=len(rows))
    free = [index for index in sorted(rows) if not is_busy(rows[index])]
    busy = [index for index in sorted(rows) if is_busy(rows[index])]
    if len(free) < count:
        raise ProjectError("gpus_busy", wanted=count, free=len(free), busy=_words(busy))
    chosen = free[:count]
    return Choice(chosen, [index for index in busy if index < chosen[-1]])


def _words(indices: Iterable[int]) -> str:
    return ",".join(str(index) for index in indices)
