"""tail-log: the last 12,000 bytes of the newest log, or what follows a cursor, as much as the reader may see.

`--follow` prints on until the run or setup ends, or the deadline; then the exit code is that of the run. Side effects:
asks the box.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controller.actions.setup_and_train import run_error
from controller.actions.setup_only import setup_error
from controller.cursor import Cursor
from controller.follow import Followed, follow
from controller.job import Job
from controller.reports import StepsReport, TailReport
from corpus_builder.errors import ProjectError
from corpus_builder.say import say

if TYPE_CHECKING:
    from controller.box import Box

TIMEOUT_S = 60
TAIL_BYTES = 12_000
MOST_BYTES = 256 * 1024  # after a cursor: what a person has not seen yet; a step summary holds 1 MiB


def run(box: Box, job: Job) -> TailReport | StepsReport:
    """Return the part of the log that was asked for; followed, show it as it grows."""
    if job.is_dry_run:
        return StepsReport(action=job.inputs.action, steps=())
    answer = _ask(box, job)
    cursor = Cursor(answer["id"], answer["next_offset"], answer["log_key"])
    if job.inputs.is_following and job.inputs.watch_minutes > 0:
        return _follow(box, job, answer, cursor)
    lines = [*answer["lines"], answer["rest"]] if answer["rest"] else answer["lines"]
    return TailReport(
        action=job.inputs.action,
        log_id=str(answer["id"] or ""),
        text="".join(f"{line}\n" for line in lines),
        size=answer["size"],
        from_offset=answer["from_offset"],
        hidden_lines=answer["hidden_lines"],
        next_offset=cursor.offset,
        cursor=str(cursor),
        log_change=answer["log_change"],
        state=answer["state"],
    )


def _ask(box: Box, job: Job) -> dict[str, Any]:
    request: dict[str, Any] = {**job.places, "bytes": TAIL_BYTES, "which": "auto", "see": job.sees}
    cursor = job.inputs.cursor
    if cursor is not None:
        more = {"bytes": MOST_BYTES, "from_offset": cursor.offset, "log_key": cursor.key, "id": cursor.work_id}
        request = {**request, **more}
    return box.ask("tail_log", request, timeout_s=TIMEOUT_S)


def _follow(box: Box, job: Job, answer: dict[str, Any], cursor: Cursor) -> TailReport:
    """Show what was asked for, then all that comes; a link that breaks is tried again (follow.py)."""
    if answer["log_change"]:
        job.echo(say(f"log.{answer['log_change']}", job.lang))
    for line in answer["lines"]:
        job.echo(line)
    deadline_s = 60.0 * job.inputs.watch_minutes
    kind = answer["kind"]
    followed = follow(box, job, kind=kind, work_id=answer["id"], deadline_s=deadline_s, start=cursor)
    return TailReport(
        action=job.inputs.action,
        log_id=str(answer["id"]),
        text="",
        size=max(answer["size"], followed.cursor.offset),
        from_offset=answer["from_offset"],
        hidden_lines=answer["hidden_lines"] + followed.hidden_lines,
        next_offset=followed.cursor.offset,
        cursor=str(followed.cursor),
        log_change=answer["log_change"],
        state=followed.state,
        error=_end_error(kind, followed, job.lang),
    )


def _end_error(kind: str, followed: Followed, lang: str) -> ProjectError | None:
    return run_error(followed, lang=lang) if kind == "train" else setup_error(followed)
