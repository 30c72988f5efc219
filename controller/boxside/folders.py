"""Folders and pointers on the box: private ones, made once; pointers swapped by rename, never merged.

Runs on the box: standard library and Python 3.8 only. Side effects: folders and symbolic links.
"""

import os
from typing import Optional

from controller.boxside.facts import nearest_existing
from controller.boxside.space import disk_error
from corpus_builder.errors import ProjectError
from trainer.journal import now_utc


def make_private_folder(path: str) -> None:
    """Make `path` with 0700 where it is missing; raise `box_not_writable` unless we alone may write there."""
    check_private(nearest_existing(path), is_ours=os.path.exists(path), wanted=path)
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        raise disk_error(os.path.join(path, ""), error, needed_bytes=0) from error


def check_private(existing: str, *, is_ours: bool, wanted: str) -> None:
    """Raise `box_not_writable` when we cannot write to `existing`, or when it is ours and others can."""
    status = os.stat(existing)
    reason = None
    if not os.path.isdir(existing):
        reason = "it is not a folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        reason = "it is not writable"
    elif is_ours and status.st_uid != os.getuid():
        reason = "it belongs to another user"
    elif is_ours and status.st_mode & 0o022:
        reason = "others can write to it (mode %o)" % (status.st_mode & 0o777)
    if reason is not None:
        raise ProjectError("box_not_writable", path=wanted, reason=reason)


def point_to(pointer: str, target: str) -> Optional[str]:
    """Let `pointer` lead to `target`, by rename.

    Returns:
        Where a real file or folder that lay there was moved aside, None when there was none.
    """
    aside = None
    if os.path.lexists(pointer) and not os.path.islink(pointer):
        aside = _free_name("%s.adopted-%s" % (pointer, now_utc().replace(":", "")))
        os.rename(pointer, aside)
    os.makedirs(os.path.dirname(pointer), mode=0o700, exist_ok=True)
    partial = "%s.partial.%d" % (pointer, os.getpid())
    if os.path.lexists(partial):
        os.unlink(partial)
    os.symlink(target, partial)
    os.replace(partial, pointer)
    return aside


def _free_name(path: str) -> str:
    number, candidate = 1, path
    while os.path.lexists(candidate):
        number, candidate = number + 1, "%s-%d" % (path, number)
    return candidate
