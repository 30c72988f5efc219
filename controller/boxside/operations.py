"""Every change on the box, each a named operation: a setup, a training, an end. Side effects: files, processes.

Runs on the box: standard library and Python 3.8 only. What decides is asked first (facts.py, work.py); the lock is
looked at before anything is written and taken by the supervisor itself; each operation leaves a line in `audit.jsonl`.
"""

import json
import os
import shutil
import signal
import time
from dataclasses import asdict
from typing import Any, Dict, List, Optional

from controller.boxside.arguments import Arguments
from controller.boxside.facts import read_live_lock
from controller.boxside.folders import make_private_folder
from controller.boxside.releases import note_release_use
from controller.boxside.sessions import start_session, supervisor_argv
from controller.boxside.setup_plan import SetupPlan, plan_setup
from controller.boxside.train_plan import plan_training
from controller.boxside.work import KINDS, SESSIONS, SETUP, TRAIN, Work, find_works, load_work, lock_path, look_at
from corpus_builder.errors import ProjectError
from trainer.children import Child, end_group, find_members
from trainer.journal import CHECKPOINT, NOW, now_utc, request_stop, save_json, seconds_since_boot
from trainer.locks import Process, boot_id, identify, is_alive, read_lock
from trainer.run_paths import DataPaths
from trainer.run_state import KILLED, Outcome

START_PATIENCE_S = 15.0
#: One that has the lock is at work, on a slow disk maybe: it gets this much more.
LOCKED_PATIENCE_S = 60.0
#: A work that has written its outcome lets its lock go a moment later.
ENDING_PATIENCE_S = 5.0
END_PATIENCE_S = 25.0
#: From a KILL to the end of a process that hangs in no disk.
_KILL_PATIENCE_S = 2.0
_SURVIVORS_OF = 3  # the newest ended works whose children are looked for


def start_setup(args: Arguments) -> Dict[str, Any]:
    """Operation `start_setup`: begin a setup, or join the same one; another one is `lock_held`."""
    plan = plan_setup(args)
    holder = _wait_for_free_lock(plan.root, SETUP, plan.data)
    if holder is not None:
        return _join(plan, holder)
    _prepare(plan)
    try:
        _launch(plan, plan.spec(), {plan.paths.secrets: plan.secrets, **plan.request_files()})
    except ProjectError as error:
        if error.code != "lock_held":
            raise
        return _join(plan, str(error.values["name"]))  # two at the same instant: the other one was first
    _append_audit(plan.data, args, "start_setup", plan.id)
    return {"setup_id": plan.id, "attached": False}


def _join(plan: SetupPlan, holder: str) -> Dict[str, Any]:
    """Return the setup that is at work if it is the same request, else raise `lock_held`."""
    work = load_work(plan.data, SETUP, holder)
    if work is not None and work.spec.get("request_digest") == plan.request_digest:
        return {"setup_id": holder, "attached": True}
    raise _held(plan.root, SETUP)


def start_train(args: Arguments) -> Dict[str, Any]:
    """Operation `start_train`: begin a run; `lock_held` while one runs, or a setup that may change its corpus."""
    plan = plan_training(args)
    if _wait_for_free_lock(plan.root, TRAIN, plan.data) is not None:
        raise _held(plan.root, TRAIN)
    setup = _wait_for_free_lock(plan.root, SETUP, plan.data)
    if setup is not None and load_work(plan.data, SETUP, setup) is not None:  # else one of another data folder
        raise _held(plan.root, SETUP)
    plan.check()
    _prepare(plan)
    _launch(plan, plan.spec(), {plan.paths.recipe: plan.recipe_json(), plan.paths.secrets: plan.secrets})
    _append_audit(plan.data, args, "start_train", plan.id)
    return {"run_id": plan.id}


def _wait_for_free_lock(root: str, kind: str, data: str) -> Optional[str]:
    """Return the name of the work that holds the lock, None when it is free."""
    give_up = time.monotonic() + ENDING_PATIENCE_S
    while True:
        lock = read_live_lock(lock_path(root, kind))
        if lock is None:
            return None
        work = load_work(data, kind, lock.name)
        if work is None or work.outcome is None or time.monotonic() >= give_up:
            return lock.name
        time.sleep(0.1)


def _held(root: str, kind: str) -> ProjectError:
    lock = read_lock(lock_path(root, kind))
    words = (lock.action, lock.name, lock.owner) if lock is not None else ("unknown",) * 3
    return ProjectError("lock_held", action=words[0], name=words[1], owner=words[2])


def _prepare(plan: Any) -> None:
    """Make the folders, keep the release, and clear away what a killed supervisor left: secrets and processes."""
    make_private_folder(plan.data)
    make_private_folder(plan.root)
    for number, work in enumerate(find_works(plan.data, plan.kind)):
        if look_at(work).is_live:
            continue
        if os.path.exists(work.paths.secrets):
            os.unlink(work.paths.secrets)
        if number < _SURVIVORS_OF:
            for child in work.children:
                end_group(child)
    note_release_use(plan.root, plan.id, plan.digest)


def _launch(plan: Any, spec: Dict[str, Any], files: Dict[str, Dict[str, Any]]) -> None:
    """Write the work's folder, start its supervisor, and wait until that has the lock; undo all when it has not."""
    folder = plan.paths.folder
    make_private_folder(os.path.dirname(folder))
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        raise ProjectError("input_invalid", name="id", reason="there is a work of this id") from None
    try:
        for path, values in files.items():
            save_json(path, values)
        asked = {"asked_t": seconds_since_boot(), "asked_boot": boot_id(), "session": SESSIONS[plan.kind]}
        save_json(plan.paths.supervisor_spec, dict(spec, **asked))
        argv = supervisor_argv(plan.code, plan.paths.supervisor_spec)
        start_session(SESSIONS[plan.kind], argv, cwd=plan.code)
        _wait_for_begin(plan)
    except ProjectError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise ProjectError("box_not_writable", path=plan.data, reason=os.strerror(error.errno or 0)) from error


def _wait_for_begin(plan: Any) -> None:
    """Return when the supervisor is at work; raise what kept it from that, or `session_vanished` when it is gone."""
    began = time.monotonic()
    while time.monotonic() < began + START_PATIENCE_S or (
        time.monotonic() < began + START_PATIENCE_S + LOCKED_PATIENCE_S and _has_lock(plan)
    ):
        if os.path.exists(plan.paths.error):
            with open(plan.paths.error, encoding="utf-8") as file:
                raise ProjectError.from_json(json.load(file))
        if os.path.exists(plan.paths.supervisor):
            return
        time.sleep(0.05)
    _end_starting(plan)
    raise ProjectError("session_vanished", name=os.path.basename(plan.paths.folder))


def _has_lock(plan: Any) -> bool:
    lock = read_live_lock(lock_path(plan.root, plan.kind))
    return lock is not None and lock.name == plan.id


def _end_starting(plan: Any) -> None:
    """End a supervisor that was started and is not at work yet, and what it may have started: its folder goes next."""
    processes = _find_processes(supervisor_argv(plan.code, plan.paths.supervisor_spec))
    lock = read_live_lock(lock_path(plan.root, plan.kind))
    if lock is not None and lock.name == plan.id:
        processes.append(lock.process)
    for process in processes:
        _kill_process(process)
    end_group(Child(None, 0, plan.paths.folder))


def _find_processes(argv: List[str]) -> List[Process]:
    """Return who runs exactly these words, before or after `env` gave way; the words name one work's own file."""
    forms = (argv, argv[2:])
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(os.path.join("/proc", name, "cmdline"), "rb") as file:
                words = [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
            if words in forms:
                found.append(identify(int(name)))
        except OSError:  # gone, or another user's
            continue
    return found


def _kill_process(process: Process) -> None:
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
    """Operation `kill`: ask for a checkpoint and return, or end everything at once and prove it."""
    data, root = args.path("data"), args.path("root")
    mode = args.word("mode", (CHECKPOINT, NOW), CHECKPOINT)
    ended, alive = [], 0
    for kind in KINDS:
        for number, work in enumerate(find_works(data, kind)):
            if work.outcome is not None and number >= _SURVIVORS_OF:
                continue
            if _is_at_work(work, root) or any(find_members(child) for child in work.children):
                alive += _end(work, root, mode)
                again = load_work(data, kind, work.id) or work
                ended.append({"kind": kind, "id": work.id, "state": look_at(again).state})
    _append_audit(data, args, "kill " + mode, " ".join(item["id"] for item in ended))
    return {"ended": ended, "alive": alive}


def _is_at_work(work: Work, root: str) -> bool:
    """Whether a supervisor works for this, by its own word or by the lock that it has just taken."""
    lock = read_live_lock(lock_path(root, work.kind))
    return work.is_supervised or (work.outcome is None and lock is not None and lock.name == work.id)


def _end(work: Work, root: str, mode: str) -> int:
    """End one work; return how many of its processes are alive afterwards (not counted while a checkpoint is due)."""
    if _is_at_work(work, root):
        request_stop(work.paths, mode if work.kind == TRAIN else NOW)
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
    lock = read_live_lock(lock_path(root, work.kind))
    supervisor = work.supervisor if work.is_supervised else lock.process if lock and lock.name == work.id else None
    if supervisor is not None:
        _kill_process(supervisor)
    work = load_work(str(work.spec["data"]), work.kind, work.id) or work
    if supervisor is not None and is_alive(supervisor):
        return work  # counted as alive; what it will come to is not known
    if os.path.exists(work.paths.secrets):
        os.unlink(work.paths.secrets)
    if work.outcome is None:
        last_step = int((look_at(work).progress or {}).get("step", 0))
        outcome = Outcome(KILLED, None, 9, "its supervisor did not answer and was ended", last_step, now_utc())
        save_json(work.paths.outcome, asdict(outcome))
    return work


def _append_audit(data: str, args: Arguments, change: str, name: str) -> None:
    """Append who did what, and why we know; the data folder of a kill may not even be there."""
    row = {"at": now_utc(), "who": args.optional_text("owner"), "action": args.optional_text("action")}
    row.update(change=change, name=name, commit=args.optional_text("commit"), run_url=args.optional_text("run_url"))
    if not os.path.isdir(data):
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    with open(os.open(DataPaths(data).audit, flags, 0o600), "a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
