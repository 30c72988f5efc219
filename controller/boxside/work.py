"""One run or one setup as its files and processes tell: its state, its progress, who works for it. Asks only.

Runs on the box: standard library and Python 3.8 only. A *work* is either: both have the files of a run.
Side effects: none.
"""

import json
import os
from dataclasses import dataclass
from typing import Any, Dict, List, Optional

from corpus_builder.errors import ProjectError
from trainer.children import Child, child_from_json
from trainer.journal import seconds_since_boot
from trainer.locks import Process, boot_id, is_alive
from trainer.run_paths import SETUP_SESSION, TRAIN_SESSION, DataPaths, RootPaths, RunPaths, run_paths, setup_paths
from trainer.run_state import (
    LIVE_STATES,
    LOST,
    RUNNING,
    STARTING,
    Outcome,
    RunFacts,
    derive_state,
    eta_s,
    outcome_from_json,
)

SETUP, TRAIN = "setup", "train"
KINDS = (SETUP, TRAIN)
SESSIONS = {SETUP: SETUP_SESSION, TRAIN: TRAIN_SESSION}
#: Between the words "start it" and its first file, a supervisor is loading Python.
LAUNCH_PATIENCE_S = 30.0
_TAIL_BYTES = 64 * 1024
#: In the specification of a work whose folder was deleted under it (orphans.py).
FILES_GONE = "files_gone"


@dataclass(frozen=True)
class Work:
    """What lies in the folder of one run or setup."""

    kind: str
    id: str
    paths: RunPaths
    spec: Dict[str, Any]
    attempts: List[Dict[str, Any]]
    outcome: Optional[Outcome]
    error: Optional[Dict[str, Any]]

    @property
    def supervisor(self) -> Optional[Process]:
        """The supervisor of the newest attempt."""
        return Process(**self.attempts[-1]["process"]) if self.attempts else None

    @property
    def children(self) -> List[Child]:
        """The newest child of every attempt."""
        return [child_from_json(attempt["child"]) for attempt in self.attempts if attempt.get("child")]

    @property
    def number(self) -> int:
        """Which one it was on this box: ids begin with a clock's time, and clocks are set back."""
        return int(self.spec.get("number", 0))

    @property
    def version(self) -> str:
        """The version that a run trains, empty for a setup."""
        return str(self.spec.get("version") or "")

    @property
    def log_start(self) -> int:
        """Where in its log the newest attempt begins."""
        return int(self.attempts[-1].get("log_start", 0)) if self.attempts else 0

    @property
    def log_end(self) -> Optional[int]:
        """Where in its log the newest attempt ends; of one without a beginning, its very start."""
        return self.attempts[-1].get("log_end") if self.attempts else 0

    @property
    def is_supervised(self) -> bool:
        """Whether the supervisor of the newest attempt is alive."""
        return self.supervisor is not None and is_alive(self.supervisor)

    @property
    def is_launching(self) -> bool:
        """Whether the supervisor was asked for a moment ago and has not written yet."""
        asked_at = self.spec.get("asked_t")
        if self.attempts or self.error or asked_at is None or self.spec.get("asked_boot") != boot_id():
            return False
        return bool(0 <= seconds_since_boot() - asked_at < LAUNCH_PATIENCE_S)


def lock_path(root: str, kind: str) -> str:
    """Return the lock that a kind of work holds."""
    return RootPaths(root).setup_lock if kind == SETUP else RootPaths(root).run_lock


def works_dir(data: str, kind: str) -> str:
    """Return the folder that holds every work of a kind."""
    return DataPaths(data).setups if kind == SETUP else DataPaths(data).runs


def load_work(data: str, kind: str, work_id: str) -> Optional[Work]:
    """Return one work, None when it has no readable specification."""
    folder = os.path.join(works_dir(data, kind), work_id)
    spec = read_json(RunPaths(folder, "", "").supervisor_spec)
    if spec is None:
        return None
    paths = setup_paths(data, work_id) if kind == SETUP else run_paths(data, str(spec.get("version")), work_id)
    outcome = read_json(paths.outcome)
    attempts = (read_json(paths.supervisor) or {}).get("attempts", [])
    return Work(
        kind, work_id, paths, spec, attempts, outcome_from_json(outcome) if outcome else None, read_json(paths.error)
    )


def find_works(data: str, kind: str) -> List[Work]:
    """Return every work of a kind that began or is about to, newest first."""
    try:
        names = sorted(os.listdir(works_dir(data, kind)), reverse=True)
    except OSError:
        return []
    works = [load_work(data, kind, name) for name in names]
    found = [work for work in works if work is not None and (work.attempts or work.outcome or work.is_launching)]
    return sorted(found, key=lambda work: work.number, reverse=True)  # by their ids where they have no number


def find_newest(data: str, kind: str) -> Optional[Work]:
    """Return the newest work of a kind, None when there is none."""
    return next(iter(find_works(data, kind)), None)


def next_number(data: str) -> int:
    """Return the number of a work that begins now."""
    newest = [find_newest(data, kind) for kind in KINDS]
    return 1 + max((work.number for work in newest if work is not None), default=0)


def require_work(data: str, kind: str, work_id: Optional[str]) -> Work:
    """Return a work by its id, or the newest; raise `run_not_found`."""
    work = find_newest(data, kind) if work_id is None else load_work(data, kind, work_id)
    if work is None:
        raise ProjectError("run_not_found", path=works_dir(data, kind))
    return work


def read_json(path: str) -> Optional[Dict[str, Any]]:
    """Return the JSON object in a file, None when it is missing or torn."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def read_last_row(path: str, attempt: int) -> Optional[Dict[str, Any]]:
    """Return the newest JSON line of `attempt`, None when there is none. Reads the file's end only."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            row = json.loads(line.decode("utf-8"))
        except ValueError:
            continue
        return row if row.get("attempt") == attempt else None
    return None


def count_rows(path: str) -> int:
    """Return the whole lines of a file, 0 when it is missing."""
    try:
        with open(path, "rb") as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
    except OSError:
        return 0


@dataclass(frozen=True)
class Standing:
    """How a work stands now; `progress` is the newest row of this attempt."""

    state: str
    progress: Optional[Dict[str, Any]]
    eta_s: Optional[float]

    @property
    def is_live(self) -> bool:
        """Whether something may still happen."""
        return self.state in LIVE_STATES


def look_at(work: Work) -> Standing:
    """Return how a work stands; of a setup only whether it runs, because no step of it tells its pace."""
    attempt = len(work.attempts)
    progress = read_last_row(work.paths.progress, attempt)
    if work.outcome is not None:
        return Standing(work.outcome.state, progress, None)
    if not work.is_supervised:
        return Standing(STARTING if work.is_launching else LOST, progress, None)
    if work.kind == SETUP or FILES_GONE in work.spec:
        return Standing(RUNNING, progress if work.kind == TRAIN else None, None)
    event = read_last_row(work.paths.events, attempt)
    signs = [work.attempts[-1].get("started_t", 0.0)] + [row["t"] for row in (progress, event) if row is not None]
    step_s = (read_json(work.paths.state) or {}).get("step_s")
    last_step = progress["step"] if progress else 0
    facts = RunFacts(None, True, last_step, seconds_since_boot() - max(signs), step_s)
    return Standing(derive_state(facts), progress, eta_s(last_step, progress["total"], step_s) if progress else None)
