"""What a box says of its health -> what may trouble a run. Pure.

"Could not ask" is None and troubles nobody; an older agent's answer, without health, neither.
"""

from __future__ import annotations

import calendar
import time
from collections.abc import Iterator, Mapping
from typing import Any

from controller.reports import Notice

#: Source: NCCL's guide "Troubleshooting", shared memory.
LEAST_SHM_GIB = 1.0
#: COS and S3 refuse signatures that are 15 minutes off; five are worth a word.
MOST_CLOCK_OFFSET_S = 300.0
LEAST_FILES = 1024
LEAST_PROCESSES = 1024
#: Keys of the facts that a summary shows.
SHOWN = ("python", "tmux", "gpus", "health")


def shown_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the facts that a report keeps."""
    return {name: facts[name] for name in SHOWN if name in facts}


def clock_offset_s(facts: Mapping[str, Any], before: str, after: str) -> float | None:
    """Return by how many seconds the box's clock is ahead of ours; None where it did not say.

    Args:
        before: Our UTC time, `YYYYmmdd-HHMMSS`, when it was asked.
        after: The same when it had answered.
    """
    told = (facts.get("health") or {}).get("time")
    return None if told is None else float(told) - (_seconds(before) + _seconds(after)) / 2


def _seconds(stamp: str) -> float:
    return float(calendar.timegm(time.strptime(stamp, "%Y%m%d-%H%M%S")))


def find_notices(facts: Mapping[str, Any], *, ranks: int, clock_offset_s: float | None) -> tuple[Notice, ...]:
    """Return what may trouble a run of `ranks` processes, the gravest first."""
    health = facts.get("health") or {}
    gpus = facts.get("gpus") or []
    notices = [*_gpu_notices(facts, health, gpus), *_host_notices(health, ranks=ranks)]
    if clock_offset_s is not None and abs(clock_offset_s) > MOST_CLOCK_OFFSET_S:
        notices.append(Notice(key="clock_off", values={"minutes": round(clock_offset_s / 60)}))
    return tuple(notices)


def _gpu_notices(
    facts: Mapping[str, Any], health: Mapping[str, Any], gpus: list[Mapping[str, Any]]
) -> Iterator[Notice]:
    if facts.get("gpus_silent"):
        yield Notice(key="gpus_silent", values={})
    if health.get("xids"):
        yield Notice(key="xid", values={"numbers": ", ".join(map(str, health["xids"]))})
    for key, row_key in (("ecc_errors", "ecc_uncorrected"), ("rows_failed", "rows_failed"), ("foreign", "foreign")):
        found = [row for row in gpus if row.get(row_key)]
        if found:
            numbers = ", ".join(str(row["index"]) for row in found)
            yield Notice(key=key, values={"gpus": numbers, "count": sum(int(row[row_key]) for row in found)})


def _host_notices(health: Mapping[str, Any], *, ranks: int) -> Iterator[Notice]:
    shm, limits = health.get("shm"), health.get("limits") or {}
    if shm is not None and shm["total_gib"] < LEAST_SHM_GIB and ranks > 1:
        yield Notice(key="shm_small", values={"gib": shm["total_gib"], "ranks": ranks})
    for key, name, least in (("few_files", "nofile", LEAST_FILES), ("few_processes", "nproc", LEAST_PROCESSES)):
        limit = limits.get(name)
        if limit is not None and 0 <= limit < least:
            yield Notice(key=key, values={"limit": limit, "least": least})
