"""The end of a work: asked for, enforced, proved. Side effects: signals, the files of a work's end.

Runs on the box: standard library and Python 3.8 only. `kill` needs no lock, no room on the disk and no answer of a
supervisor; `gone` asks only.
"""

import json
import os
import signal
import time
from typing import Any, Dict, List, Optional, Set

from controller.boxside.arguments import NAME, Arguments
from controller.boxside.audit import append_audit
from controller.boxside.facts import read_live_lock
from controller.boxside.orphans import restore_orphans
from controller.boxside.work import (
    KINDS,
    TRAIN,
    Work,
    find_works,
    load_work,
    lock_path,
    look_at,
    read_json,
)
from trainer.children import end_group, find_members
from trainer.gpus import GpuQuery, find_held
from trainer.journal import CHECKPOINT, NOW, now_utc, request_stop, save_outcome
from trainer.locks import Process, is_alive, start_ticks
from trainer.on_end import AFTER_S, ON_END, OnEnd, leave_behind
from trainer.run_state import KILLED, Outcome

END_PATIENCE_S = 25.0
#: From a KILL to the end of a process that hangs in no disk.
_KILL_PATIENCE_S = 2.0
#: A driver gives the memory of a killed process back a moment after its end.
GPU_PATIENCE_S = 15.0
SURVIVORS_OF = 3  # the newest ended works whose children are looked for


def kill_process(process: Process) -> None:
    """KILL exactly this process, and return when it is gone or does not go."""
    if not is_alive(process):
        return
    try:
        os.kill(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    give_up = time.monotonic() + _KILL_PATIENCE_S
    while is_alive(process) and time.monotonic() < give_up:
        time.sleep(0.05)


def kill(args: Arguments) -> Dict[str, Any]:
    """Operation `kill`: ask for a checkpoint and return, or end everything at once and prove it.

    No full disk keeps it from that: where no stop file can be written, the supervisor is told by a signal, and
    `audited` says whether there was room for the line of `audit.jsonl`.
    """
    data, root = args.path("data"), args.path("root")
    mode = args.word("mode", (CHECKPOINT, NOW), CHECKPOINT)
    ended, alive = [], 0
    restore_orphans(data, root)
    for kind in KINDS:
        for number, work in enumerate(find_works(data, kind)):
            if work.outcome is not None and number >= SURVIVORS_OF:
                continue
            if _is_at_work(work, root) or any(find_members(child) for child in work.children):
                alive += _end(work, root, mode)
                again = load_work(data, kind, work.id) or work
                ended.append({"kind": kind, "id": work.id, "state": look_at(again).state})
    audited = append_audit(data, args, "kill " + mode, " ".join(item["id"] for item in ended))
    return {"ended": ended, "alive": alive, "audited": audited}


def _is_at_work(work: Work, root: str) -> bool:
    """Whether a supervisor works for this, by its own word or by the lock that it has just taken."""
    lock = read_live_lock(lock_path(root, work.kind))
    return work.is_supervised or (work.outcome is None and lock is not None and lock.name == work.id)


def _find_supervisor(work: Work, root: str) -> Optional[Process]:
    """Return who supervises a work, by its own word or by the lock that it has just taken."""
    if work.is_supervised:
        return work.supervisor
    lock = read_live_lock(lock_path(root, work.kind))
    return lock.process if lock is not None and lock.name == work.id else None


def _ask_to_stop(work: Work, root: str, mode: str) -> None:
    """Ask by the file that every rank reads; by a signal where it cannot be written. One of before knows only TERM."""
    try:
        request_stop(work.paths, mode)
        return
    except OSError:
        supervisor = _find_supervisor(work, root)
    number = work.attempts[-1].get("now_signal") if mode == NOW and work.attempts else None
    try:
        if supervisor is not None:
            os.kill(supervisor.pid, number or signal.SIGTERM)
    except ProcessLookupError:
        pass  # it has just ended


def _end(work: Work, root: str, mode: str) -> int:
    """End one work; return how many of its processes are alive afterwards (not counted while a checkpoint is due)."""
    if _is_at_work(work, root):
        _ask_to_stop(work, root, mode if work.kind == TRAIN else NOW)
        if mode == CHECKPOINT:
            return 0
        work = _wait_for_end(work, root)
    survivors = [pid for child in work.children for pid in end_group(child)]
    return len(survivors) + (1 if work.supervisor is not None and is_alive(work.supervisor) else 0)


def _wait_for_end(work: Work, root: str) -> Work:
    """Return the work when its supervisor has ended; one that does not is ended by us, who then write the outcome."""
    give_up = time.monotonic() + END_PATIENCE_S
    while _is_at_work(work, root):
        time.sleep(0.1)
        work = load_work(str(work.spec["data"]), work.kind, work.id) or work
        if time.monotonic() >= give_up:
            return _end_by_force(work, root)
    return work


def _end_by_force(work: Work, root: str) -> Work:
    """End a supervisor that does not answer; when it is gone, write the outcome that it did not write."""
    supervisor = _find_supervisor(work, root)
    if supervisor is not None:
        kill_process(supervisor)
    work = load_work(str(work.spec["data"]), work.kind, work.id) or work
    if supervisor is not None and is_alive(supervisor):
        return work  # counted as alive; what it will come to is not known
    on_end = _find_on_end(work)
    if os.path.exists(work.paths.secrets):
        os.unlink(work.paths.secrets)
    if on_end is not None:
        leave_behind(on_end, work.paths)  # what it can no longer do itself
    if work.outcome is None:
        last_step = int((look_at(work).progress or {}).get("step", 0))
        outcome = Outcome(KILLED, None, 9, "its supervisor did not answer and was ended", last_step, now_utc())
        _try_to_save(work.paths.outcome, outcome)
    return work


def _find_on_end(work: Work) -> Optional[OnEnd]:
    """Return what was to be done after the end of a run that has not ended by itself."""
    wish = (read_json(work.paths.secrets) or {}).get(ON_END)
    if wish is None or work.kind != TRAIN or work.outcome is not None:
        return None
    spec = work.spec
    return OnEnd(
        str(wish), float(spec.get("on_end_after_s", AFTER_S)), list(spec.get("on_end_locks", [])), len(work.attempts)
    )


def _try_to_save(path: str, outcome: Outcome) -> None:
    try:
        save_outcome(path, outcome)
    except OSError:
        pass  # no room, and none was taken beforehand: it counts as lost, and is gone all the same


def gone(args: Arguments) -> Dict[str, Any]:
    """Operation `gone`: what is left of works that were ended. Asks only, for some seconds where a GPU lags behind.

    `gpus`: those on which memory is still held, with the pids of ours that hold it; none: by nobody who can be seen.
    None: nvidia-smi is there and could not be asked.
    """
    data, ids = args.path("data"), args.texts("ids", NAME)
    found = [load_work(data, kind, work_id) for kind in KINDS for work_id in ids]
    works = [work for work in found if work is not None]
    chosen = {index for work in works for index in chosen_gpus(work)}
    give_up = time.monotonic() + GPU_PATIENCE_S
    while True:
        query = GpuQuery()
        alive = sorted({pid for work in works for pid in _find_alive(work)})
        gpus = query.read()
        held = find_held(gpus.rows, alive, chosen, is_visible=_is_visible) if gpus.is_installed else []
        if not (alive or held) or time.monotonic() >= give_up:
            return {"alive": len(alive), "gpus": held, "has_gpus": gpus.is_installed}
        time.sleep(0.5)


def _find_alive(work: Work) -> List[int]:
    supervisor = work.supervisor
    pids = [pid for child in work.children for pid in find_members(child)]
    if supervisor is not None and work.outcome is None and is_alive(supervisor):
        pids.append(supervisor.pid)
    return pids


def _is_visible(pid: int) -> bool:
    return start_ticks(pid) is not None


def chosen_gpus(work: Work) -> Set[int]:
    """Return the numbers of the GPUs that a run has taken, as its events tell; empty where none does."""
    try:
        with open(work.paths.events, "rb") as file:
            rows = [json.loads(line.decode("utf-8")) for line in file if b'"gpus_chosen"' in line]
        return {int(index) for row in rows for index in row["values"]["chosen"].split(",")}
    except (OSError, ValueError, KeyError):
        return set()
