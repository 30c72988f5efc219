"""Follows one setup or one run until it ends, shows its lines as they come, and gives up at a deadline.

Side effects: asks the box; sleeps. The work itself never depends on being followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from controller.cursor import BEGINNING, Cursor
from controller.job import Job
from corpus_builder.errors import ProjectError
from corpus_builder.say import say
from trainer.progress import Event, Progress, parse_line
from trainer.run_state import has_ended

if TYPE_CHECKING:
    from controller.box import Box

FIRST_POLL_S = 0.5
SLOWEST_POLL_S = 10.0
POLL_GROWTH = 1.5  # 0.5 s grows to 10 s within half a minute of silence; a new line starts over at 1 s
BUSY_POLL_S = 1.0
MAX_BYTES = 256 * 1024  # of log per poll
ASK_TIMEOUT_S = 60
#: A broken connection is tried again this long: a rebooted router must not end a day of watching.
LOST_PATIENCE_S = 10 * 60
LOST_CODES = frozenset({"connection_lost", "box_unreachable"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """How it stands when following ends: ended, or still alive at the deadline."""

    id: str
    state: str
    outcome: dict[str, Any] | None
    error: ProjectError | None
    points: tuple[Progress, ...]
    eta_s: float | None
    elapsed_s: float
    preflight: Mapping[str, str] = field(default_factory=dict)  # the numbers that a run told before it began
    cursor: Cursor = BEGINNING  # where in the log showing it stopped
    hidden_lines: int = 0

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will happen."""
        return has_ended(self.state)


def follow(box: Box, job: Job, *, kind: str, work_id: str, deadline_s: float, start: Cursor = BEGINNING) -> Followed:
    """Follow `work_id` (`setup` or `train`) and return how it stands at its end, or after `deadline_s` seconds.

    Its log is shown from `start` on; else from where its attempt began.

    Raises:
        ProjectError: the box could not be asked for ten minutes on end.
    """
    began = job.clock()
    points: list[Progress] = []
    preflight: Mapping[str, str] = {}
    cursor, poll_s, hidden_lines = start, FIRST_POLL_S, 0
    while True:
        answer = _ask(box, job, kind=kind, work_id=work_id, cursor=cursor, give_up=began + deadline_s)
        lines = answer["lines"]
        hidden_lines += answer.get("hidden_lines", 0)
        if answer.get("log_change"):
            job.echo(say(f"log.{answer['log_change']}", job.lang))
        items = _show(job, lines)
        points += [item for item in items if isinstance(item, Progress)]
        told = [item.values for item in items if isinstance(item, Event) and item.name == "preflight"]
        preflight = told[-1] if told else preflight
        is_drained = answer["next_offset"] == cursor.offset and not answer.get("log_change")
        cursor = Cursor(work_id, answer["next_offset"], answer.get("log_key"))
        is_over = has_ended(answer["state"]) and is_drained
        if is_over or job.clock() - began >= deadline_s:
            break
        poll_s = BUSY_POLL_S if lines else min(SLOWEST_POLL_S, poll_s * POLL_GROWTH)
        if not has_ended(answer["state"]):
            job.sleep(max(0.0, min(poll_s, began + deadline_s - job.clock())))
    packed = answer.get("error")
    return Followed(
        id=answer["id"],
        state=answer["state"],
        outcome=answer["outcome"],
        error=ProjectError.from_json(packed) if packed else None,
        points=tuple(points),
        eta_s=answer.get("eta_s"),
        elapsed_s=job.clock() - began,
        preflight=preflight,
        cursor=cursor,
        hidden_lines=hidden_lines,
    )


def _show(job: Job, lines: list[str]) -> list[Progress | Event]:
    """Echo the lines and return the points and events in them."""
    for line in lines:
        job.echo(line)
    return [item for line in lines for item in parse_line(line)]


def _ask(box: Box, job: Job, *, kind: str, work_id: str, cursor: Cursor, give_up: float) -> dict[str, Any]:
    """Return one answer; a lost connection is tried again until `give_up`, ten minutes at most."""
    args = {
        **job.places,
        "kind": kind,
        "id": work_id,
        "offset": cursor.offset,
        "log_key": cursor.key,
        "max_bytes": MAX_BYTES,
        "see": job.sees,
    }
    return ask_patiently(box, job, "follow", args, give_up=give_up)


def ask_patiently(box: Box, job: Job, op: str, args: Mapping[str, Any], *, give_up: float) -> dict[str, Any]:
    """Return an answer; a lost connection is tried again until `give_up` on the job's clock, ten minutes at most.

    Raises:
        ProjectError: the last one, when that time is up; at once what is no lost connection.
    """
    lost_at: float | None = None
    while True:
        try:
            return box.ask(op, args, timeout_s=ASK_TIMEOUT_S)
        except ProjectError as error:
            lost_at = job.clock() if lost_at is None else lost_at
            if error.code not in LOST_CODES or job.clock() >= min(lost_at + LOST_PATIENCE_S, give_up):
                raise
            job.sleep(SLOWEST_POLL_S)
