"""What a supervisor writes while its child speaks: log, progress, events, state. Side effects: files of one run.

Runs on the box too: standard library and Python 3.8 only. `t` is seconds since boot on a clock that no one sets;
ages are differences of it. Numbers that JSON cannot hold are the words `nan`, `inf` and `-inf`.

    progress.jsonl  {"t": 812.4, "at": "2026-05-03T10:15:00Z", "attempt": 1, "step": 10, "total": 75, "loss": 2.1,
                     "lr": 9.8e-06, "epoch": 0.67, "total_epochs": 5, "thr": 3.2, "extras": {"loss_soul": 2.2}}
    events.jsonl    {"t": 812.4, "at": "2026-05-03T10:15:00Z", "attempt": 1, "name": "checkpoint_saved",
                     "values": {"step": "100"}}
"""

import json
import math
import os
import sys
import time
from collections import deque
from dataclasses import asdict, replace
from typing import Any, BinaryIO, Deque, Dict, Mapping, Optional, Sequence, Tuple

from corpus_builder.errors import ProjectError, parse_error_line
from trainer.progress import Event, Progress, format_event, parse_line
from trainer.run_paths import RunPaths
from trainer.run_state import Outcome

STEP_WINDOW = 20  # progress points by which the time of a step is judged
STATE_EVERY_S = 1.0
#: What a stop file says.
CHECKPOINT, NOW = "checkpoint", "now"
#: What `reserve` takes for an outcome, an error of a step in it; a file of a few words takes one block.
RESERVE_BYTES, BLOCK_BYTES = 16 * 1024, 4096
_KEPT_BYTES = 64 * 1024  # of lines that no disk took


def seconds_since_boot() -> float:
    """Return the one clock by which ages on this box are told."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def now_utc() -> str:
    """Return the wall clock for people; nothing is decided by it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def to_text(value: Any) -> str:
    """Return `value` as our JSON files hold it."""
    return json.dumps(value, ensure_ascii=False, indent=1)


def save_json(path: str, value: Any) -> None:
    """Write `value` as `save_text` does."""
    save_text(path, to_text(value))


def save_text(path: str, text: str) -> None:
    """Write `text` to `path` by rename, on the disk before it is named, readable by the owner only."""
    partial = "%s.partial.%d" % (path, os.getpid())
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        _remove(partial)  # what a full disk took of it holds room that the next file needs
        raise


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def _reserve_of(path: str) -> str:
    return path + ".reserve"


def reserve(path: str, size: int = RESERVE_BYTES) -> None:
    """Take the room on the disk that `save_reserved` will need for `path`; raise OSError where there is none."""
    descriptor = os.open(_reserve_of(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(descriptor, "wb", buffering=0) as file:
            _write_whole(file, os.urandom(size))  # zeros may become a hole, which holds no room
            os.fsync(file.fileno())
    except OSError:
        _remove(_reserve_of(path))
        raise


def give_back(path: str) -> None:
    """Let the room go that `reserve` took for `path`."""
    _remove(_reserve_of(path))


def save_reserved(path: str, text: str) -> None:
    """Write `text` to `path` by rename, into the room that `reserve` took: a full disk cannot refuse it.

    Without that room, or with more text than it holds, as any other file; raise OSError when that is refused.
    """
    if not _fill_reserve(path, text.encode("utf-8")):
        save_text(path, text)
    give_back(path)


def _fill_reserve(path: str, data: bytes) -> bool:
    """Write `data` in place, so that nobody can take the room between, and name it `path`; return whether it is."""
    room = _reserve_of(path)
    try:
        with open(os.open(room, os.O_WRONLY), "wb", buffering=0) as file:
            if len(data) > os.fstat(file.fileno()).st_size:
                return False
            _write_whole(file, data)
            os.ftruncate(file.fileno(), len(data))
            os.fsync(file.fileno())
        os.replace(room, path)
        return True
    except OSError:  # a file system that copies on write, or no reserve
        give_back(path)
        return False


def save_outcome(path: str, outcome: Outcome) -> None:
    """Write how a work ended, last; where even the reserve is too small, without the error that a step told."""
    try:
        save_reserved(path, to_text(asdict(outcome)))
    except OSError:
        save_reserved(path, to_text(asdict(replace(outcome, error=None))))


def request_stop(paths: RunPaths, mode: str) -> None:
    """Ask for a stop, by rename: rank 0 reads the file at a step border."""
    save_reserved(paths.stop, mode + "\n")


def jsonable(value: Any) -> Any:
    """Return a number as JSON holds it: nan and the infinities as words."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    return value


class Journal:
    """One attempt's account. A full disk costs lines and states, counted in `unwritten_lines`, never the run.

    A log that was moved or deleted underneath is begun anew under its name.
    """

    def __init__(self, paths: RunPaths, *, attempt: int, secrets: Sequence[str] = ()) -> None:
        self.paths = paths
        self.attempt = attempt
        self.error: Optional[ProjectError] = None
        self.last: Optional[Progress] = None
        self.stop_was_seen = False
        self.unwritten_lines = 0
        self._secrets = [value.encode("utf-8") for value in secrets if len(value) >= 8]
        self._points: Deque[Tuple[int, float]] = deque(maxlen=STEP_WINDOW)
        self._unwritten = b""  # the newest of the lines that no disk took
        self._state_written_at = self._log_looked_at = -math.inf
        os.makedirs(os.path.dirname(paths.log), mode=0o700, exist_ok=True)
        self._log = _open_log(paths.log)  # held for the attempt
        self.log_start = self.log_size

    def close(self) -> None:
        """Let the log go."""
        self._log.close()

    @property
    def log_size(self) -> int:
        """Where the log ends now."""
        return os.fstat(self._log.fileno()).st_size

    def write(self, line: bytes, second_log: Optional[str] = None) -> None:
        """Append one line, its newline included, to the log, the second log and whoever watches the session."""
        for secret in self._secrets:
            line = line.replace(secret, b"<redacted>")
        self._follow_log()
        try:
            _write_whole(self._log, line)
            if second_log is not None:
                with open(os.open(second_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
                    file.write(line)
        except OSError:
            self.unwritten_lines += 1
            self._unwritten = (self._unwritten + line)[-_KEPT_BYTES:]
        try:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        except (OSError, ValueError, AttributeError):
            pass  # nobody watches any more: the session's terminal is gone

    def _follow_log(self) -> None:
        """Begin the log anew where its name no longer leads to it; looked at once a second."""
        if seconds_since_boot() - self._log_looked_at < STATE_EVERY_S:
            return
        self._log_looked_at = seconds_since_boot()
        try:
            if os.stat(self.paths.log).st_ino == os.fstat(self._log.fileno()).st_ino:
                return
        except OSError:
            pass  # it is not there
        try:
            anew = _open_log(self.paths.log)
        except OSError:
            return  # neither is its folder: the old one is as good
        self._log.close()
        self._log, self.log_start = anew, 0

    def say(self, line: str) -> None:
        """Append a line of our own."""
        self.write(line.encode("utf-8") + b"\n")

    def read(self, line: bytes) -> None:
        """Take what one line of the child tells: progress, events, why it ended."""
        text = line.decode("utf-8", errors="replace")
        error = parse_error_line(text.strip())
        self.error = error or self.error
        for item in parse_line(text):
            if isinstance(item, Progress):
                self._take_progress(item)
            else:
                self._take_event(item)

    def event(self, name: str, **values: str) -> None:
        """Record an event of our own, and say it in the log."""
        item = Event(name, values)
        self.say(format_event(item))
        self._take_event(item)

    def _take_progress(self, progress: Progress) -> None:
        self.last = progress
        self._points.append((progress.step, seconds_since_boot()))
        self._append(self.paths.progress, asdict(progress))

    def _take_event(self, event: Event) -> None:
        self.stop_was_seen = self.stop_was_seen or event.name == "stop_requested"
        self._append(self.paths.events, {"name": event.name, "values": event.values})

    def _append(self, path: str, row: Mapping[str, Any]) -> None:
        stamped = dict({"t": round(seconds_since_boot(), 3), "at": now_utc(), "attempt": self.attempt}, **jsonable(row))
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8") as file:
                file.write(json.dumps(stamped, ensure_ascii=False) + "\n")
        except OSError:
            self.unwritten_lines += 1

    @property
    def last_step(self) -> int:
        """The newest step, 0 before the first line."""
        return self.last.step if self.last else 0

    @property
    def step_s(self) -> Optional[float]:
        """Seconds per step over the last points of this attempt, None before two of them."""
        if len(self._points) < 2 or self._points[-1][0] <= self._points[0][0]:
            return None
        (first_step, first_t), (last_step, last_t) = self._points[0], self._points[-1]
        return (last_t - first_t) / (last_step - first_step)

    def save_state(self, state: str, step_name: str, *, is_urgent: bool = False) -> None:
        """Write `state.json`, at most once a second unless `is_urgent`."""
        if not is_urgent and seconds_since_boot() - self._state_written_at < STATE_EVERY_S:
            return
        self._state_written_at = seconds_since_boot()
        values: Dict[str, Any] = {
            "state": state,
            "step_name": step_name,
            "last_step": self.last_step,
            "total": self.last.total if self.last else 0,
            "loss": jsonable(self.last.loss) if self.last else None,
            "step_s": self.step_s,
            "unwritten_lines": self.unwritten_lines,
            "updated_at": now_utc(),
        }
        try:
            save_json(self.paths.state, values)
        except OSError:
            self.unwritten_lines += 1

    def tail(self) -> str:
        """Return the end of this attempt's log for the table of known failures, with what no disk took of it."""
        return read_tail(self.paths.log, self.log_start) + self._unwritten.decode("utf-8", errors="replace")


def read_tail(path: str, start: int, max_bytes: int = 256 * 1024) -> str:
    """Return the end of a log from `start` on; empty when it cannot be read."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - max_bytes))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def _open_log(path: str) -> BinaryIO:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", buffering=0)


def _write_whole(file: BinaryIO, data: bytes) -> None:
    """Write all of `data`; a disk that fills up takes a part first, and refuses only the rest."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
