"""kill: ends the run and the setup, with a checkpoint where there is time for one, and proves that they are gone.

One click, no confirmation, and it works while a setup holds the lock and on a full disk. What was ended is looked
for at last: its processes, and what they held on GPUs. Side effects: through the box.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from controller.job import Job
from controller.reports import KillReport, Step, StepsReport
from corpus_builder.errors import ProjectError
from trainer.run_state import LIVE_STATES

if TYPE_CHECKING:
    from controller.box import Box

TIMEOUT_S = 120
POLL_S = 2.0
#: The supervisor ends what has not ended by itself within its own grace; a little later it is our turn.
EXTRA_S = 30


def run(box: Box, job: Job) -> KillReport | StepsReport:
    """Ask for a checkpoint and an end, wait for it, end what is left, and say what is still there."""
    places = job.places
    at_work = _at_work(box, places)
    if job.is_dry_run:
        steps = tuple(Step(key="end_work", values={"name": name}) for name in at_work)
        return StepsReport(action=job.inputs.action, steps=steps)

    asked = box.ask("kill", {**places, **job.audit, "mode": "checkpoint"}, timeout_s=TIMEOUT_S)
    give_up = job.clock() + job.grace_s + EXTRA_S
    while (still := _at_work(box, places)) and job.clock() < give_up:
        job.sleep(POLL_S)
    answers = [asked]
    if still:
        answers.append(box.ask("kill", {**places, **job.audit, "mode": "now"}, timeout_s=TIMEOUT_S))
    ended = {item["id"]: item for answer in answers for item in answer["ended"]}
    if not ended:
        return KillReport(action=job.inputs.action, ended=(), alive=answers[-1]["alive"])

    left = box.ask("gone", {**places, "ids": list(ended)}, timeout_s=TIMEOUT_S)
    final = box.ask("status", places, timeout_s=TIMEOUT_S)
    alive = max(left["alive"], answers[-1]["alive"])
    gpus = None if left["gpus"] is None else tuple(left["gpus"])
    return KillReport(
        action=job.inputs.action,
        ended=tuple(_with_end_state(item, final) for item in ended.values()),
        alive=alive,
        was_forced=bool(still),
        gpus=gpus,
        has_gpus=left["has_gpus"],
        was_audited=all(answer.get("audited", True) for answer in answers),
        error=_find_error(alive, gpus or (), ", ".join(ended)),
    )


def _at_work(box: Box, places: dict[str, str]) -> list[str]:
    """Return the ids of what is alive, by the box's own account."""
    status = box.ask("status", places, timeout_s=TIMEOUT_S)
    found = [status["run"], status["setup"]]
    return [item["id"] for item in found if item is not None and item["state"] in LIVE_STATES]


def _find_error(alive: int, gpus: Sequence[dict[str, Any]], name: str) -> ProjectError | None:
    """Return what is still there as an error: memory that our processes hold, processes, memory of nobody. Pure."""
    indices = ", ".join(str(gpu["index"]) for gpu in gpus)
    mib = sum(gpu["used_mib"] or 0 for gpu in gpus)
    pids = [pid for gpu in gpus for pid in gpu["pids"]]
    if pids:
        said = ", ".join(str(pid) for pid in pids)
        return ProjectError("gpu_memory_held", pids=said, gpus=indices, mib=mib, name=name)
    if alive:
        return ProjectError("kill_incomplete", count=alive, name=name)
    return ProjectError("gpu_memory_orphaned", gpus=indices, mib=mib, name=name) if gpus else None


def _with_end_state(item: dict[str, Any], status: dict[str, Any]) -> dict[str, Any]:
    """Return `item` with the state it has now. Pure."""
    now = status.get("run" if item["kind"] == "train" else "setup")
    return {**item, "state": now["state"]} if now is not None and now["id"] == item["id"] else item
