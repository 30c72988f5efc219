"""status: how the box, its run and its setup stand; one question, nothing is changed. Side effects: asks the box."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.job import Job
from controller.reports import StatusReport, StepsReport

if TYPE_CHECKING:
    from controller.box import Box

TIMEOUT_S = 60


def run(box: Box, job: Job) -> StatusReport | StepsReport:
    """Return the box's own account."""
    if job.is_dry_run:
        return StepsReport(action=job.inputs.action, steps=())
    answer = box.ask("status", job.places, timeout_s=TIMEOUT_S)
    return StatusReport(action=job.inputs.action, box=box.name, status=answer)
