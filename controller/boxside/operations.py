"""What begins on the box, each a named operation: a setup, a training. Side effects: files, processes.

Runs on the box: standard library and Python 3.8 only. What decides is asked first (facts.py, work.py); the lock is
looked at before anything is written and taken by the supervisor itself; each operation leaves a line in `audit.jsonl`.
"""

import json
import os
import shutil
import time
from typing import Any, Dict, List, Optional

from controller.boxside.arguments import Arguments
from controller.boxside.audit import append_audit
from controller.boxside.ending import SURVIVORS_OF, kill_process
from controller.boxside.facts import read_live_lock
from controller.boxside.folders import make_private_folder
from controller.boxside.releases import note_release_use
from controller.boxside.sessions import start_session, supervisor_argv
from controller.boxside.setup_plan import SetupPlan, plan_setup
from controller.boxside.space import disk_error
from controller.boxside.train_plan import plan_training
from controller.boxside.work import SESSIONS, SETUP, TRAIN, find_works, load_work, lock_path, look_at, next_number
from corpus_builder.errors import ProjectError
from trainer.children import Child, end_group
from trainer.journal import save_json, seconds_since_boot
from trainer.locks import Process, boot_id, identify, read_lock

START_PATIENCE_S = 15.0
#: One that has the lock is at work, on a slow disk maybe: it gets this much more.
LOCKED_PATIENCE_S = 60.0
#: A work that has written its outcome lets its lock go a moment later.
ENDING_PATIENCE_S = 5.0


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
    append_audit(plan.data, args, "start_setup", plan.id)
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
    _launch(plan, plan.spec(), {plan.paths.recipe: plan.recipe_json(), plan.paths.secrets: plan.secrets_json()})
    append_audit(plan.data, args, "start_train", plan.id)
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
        if number < SURVIVORS_OF:
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
        asked["number"] = next_number(plan.data)
        save_json(plan.paths.supervisor_spec, dict(spec, **asked))
        argv = supervisor_argv(plan.code, plan.paths.supervisor_spec)
        start_session(SESSIONS[plan.kind], argv, cwd=plan.code)
        _wait_for_begin(plan)
    except ProjectError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise disk_error(folder, error, needed_bytes=0) from error


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
        kill_process(process)
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
