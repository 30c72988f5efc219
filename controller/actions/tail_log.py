"""tail-log: the last 12,000 bytes of the newest log, as much as the reader may see. Side effects: asks the box."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.job import Job
from controller.reports import StepsReport, TailReport

if TYPE_CHECKING:
    from controller.box import Box

TIMEOUT_S = 60
TAIL_BYTES = 12_000


def run(box: Box, job: Job) -> TailReport | StepsReport:
    """Return the end of the log of whatever ran last: a run, or a setup."""
    if job.is_dry_run:
        return StepsReport(action=job.inputs.action, steps=())
    request = {"data": job.settings.data, "bytes": TAIL_BYTES, "which": "auto", "see": job.sees}
    answer = box.ask("tail_log", request, timeout_s=TIMEOUT_S)
    return TailReport(
        action=job.inputs.action,
        log_id=str(answer["id"] or ""),
        text=answer["text"],
        size=answer["size"],
        from_offset=answer["from_offset"],
        hidden_lines=answer["hidden_lines"],
    )
