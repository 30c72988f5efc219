"""A work that is alive and whose folder is gone: known by the lock that it holds. Side effects: `restore` writes files.

Runs on the box: standard library and Python 3.8 only. Without it a person who deletes a run's folder has a training
that nothing shows and nothing ends. Its log lies elsewhere and goes on; so do its checkpoints.
"""

import os
from dataclasses import asdict
from typing import Optional

from controller.boxside.facts import read_live_lock
from controller.boxside.work import FILES_GONE, KINDS, TRAIN, Work, lock_path, next_number, require_work, works_dir
from trainer.children import Child
from trainer.journal import save_json
from trainer.locks import Lock
from trainer.run_paths import RunPaths, run_paths, setup_paths


def find_orphan(data: str, root: str, kind: str) -> Optional[Work]:
    """Return the work of `data` that holds the lock and has no files any more, None where there is none."""
    lock = read_live_lock(lock_path(root, kind))
    if lock is None:
        return None
    folder = os.path.join(works_dir(data, kind), lock.name)
    spec_path = RunPaths(folder, "", "").supervisor_spec
    if os.path.exists(spec_path) or not _supervises(lock, spec_path):
        return None
    paths = run_paths(data, "", lock.name) if kind == TRAIN else setup_paths(data, lock.name)
    spec = {"kind": kind, "data": data, "owner": lock.owner, "action": lock.action, FILES_GONE: True}
    spec["number"] = next_number(data)
    attempt = {"process": asdict(lock.process), "child": Child(None, 0, folder).to_json()}
    return Work(kind, lock.name, paths, spec, [attempt], None, None)


def require_living(data: str, root: str, kind: str, work_id: Optional[str]) -> Work:
    """Return a work by its id, or the newest, also one that lives without its files; raise `run_not_found`."""
    orphan = find_orphan(data, root, kind)
    if orphan is not None and work_id in (None, orphan.id):
        return orphan
    return require_work(data, kind, work_id)


def _supervises(lock: Lock, spec_path: str) -> bool:
    """Whether the holder of a lock works for `spec_path`; else it is one of another data folder."""
    try:
        with open("/proc/%d/cmdline" % lock.process.pid, "rb") as file:
            return os.fsencode(spec_path) in file.read().split(b"\0")
    except OSError:
        return False


def restore_orphans(data: str, root: str) -> None:
    """Give every such work a folder again: it can be asked to stop there, and tell its end."""
    for kind in KINDS:
        work = find_orphan(data, root, kind)
        if work is None:
            continue
        try:
            os.makedirs(work.paths.folder, mode=0o700, exist_ok=True)
            save_json(work.paths.supervisor, {"attempts": work.attempts})
            save_json(work.paths.supervisor_spec, work.spec)
        except OSError:
            pass  # no room: it is ended by signals
