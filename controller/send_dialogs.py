"""The dialog ZIP from this machine's own disk to the box, as the rest of a request over SSH: on from where it was cut.

The bytes go through the agent's stdin, as a release does: one round trip to ask what is there, then a stream that is
as fast as the link. Nothing is sent when the box has these bytes already. Side effects: through the box; reads a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controller.follow import LOST_CODES
from controller.job import Job
from controller.objects import LocalZip
from corpus_builder.errors import ProjectError, Value
from corpus_builder.log_lines import log_line

if TYPE_CHECKING:
    from controller.box import Box

STATE_TIMEOUT_S = 60
#: What the slowest link worth waiting for carries, and what the box needs to hash it.
SLOWEST_BYTES_PER_S = 50_000
LEAST_TIMEOUT_S = 300
#: Tries in a row without one new byte; the pauses between them double from a second.
MAX_TRIES = 5


def send_dialogs(box: Box, job: Job, file: LocalZip, *, is_fresh: bool = False) -> None:
    """Bring the ZIP to the box unless it is there; `is_fresh` sends it in any case.

    Raises:
        ProjectError: what the box says (`box_disk_full`, `dialog_zip_unreadable`, …); `connection_lost` and
            `box_unreachable` when the link breaks again and again; the next action goes on from there.
    """
    tries, seen = 0, -1
    while True:
        try:
            state = _ask_state(box, job, file)
            if state["is_there"] and not is_fresh:
                return _tell(job, "the dialog ZIP is on the machine already; nothing is sent")
            offset = min(int(state["bytes"]), file.size)
            tries, seen = (0, offset) if offset > seen else (tries, seen)
            _tell(job, "sending the dialog ZIP: {left} of {size} bytes", left=file.size - offset, size=file.size)
            if _send(box, job, file, offset) == file.size:
                return _tell(job, "the dialog ZIP has arrived, sha256 {sha256}", sha256=file.sha256)
            raise ProjectError("connection_lost", host=box.name, reason="reason.link_cut")
        except ProjectError as error:
            tries += 1
            if error.code not in LOST_CODES or tries >= MAX_TRIES:
                raise
            _tell(job, "the connection was cut; trying again")
            job.sleep(2.0 ** (tries - 1))


def _tell(job: Job, sentence: str, **values: Value) -> None:
    job.echo(log_line("fetch", sentence, **values))


def _ask_state(box: Box, job: Job, file: LocalZip) -> dict[str, Any]:
    return box.ask("upload_state", {"data": job.settings.data, "sha256": file.sha256}, timeout_s=STATE_TIMEOUT_S)


def _send(box: Box, job: Job, file: LocalZip, offset: int) -> int:
    """Send the bytes from `offset` on; return how many the box has now."""
    args = {"data": job.settings.data, "sha256": file.sha256, "size": file.size, "offset": offset}
    timeout_s = LEAST_TIMEOUT_S + (file.size - offset) / SLOWEST_BYTES_PER_S
    answer = box.ask("receive_upload", args, timeout_s=timeout_s, stream=file.stream(offset))
    return int(answer["bytes"])
