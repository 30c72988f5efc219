"""The fetch step: the dialog ZIP, from a link, a path of the box or an upload, becomes a folder behind a pointer.

Runs on the box: standard library and Python 3.8 only. Side effects: network; `raw/` in the data folder. An archive
lies in a folder named by its sha256, is whole when it appears, and stays; the pointer is swapped by rename. Beside
it is written where it came from:

    raw/.archives/<sha256>.json   {"source": "<digest of the link without its signature>", "etag": "\\"9be0…\\""}
"""

import hashlib
import os
import re
import shutil
import time
from typing import Any, Dict, Mapping, Optional

from controller.boxside.archives import find_archives
from controller.boxside.download import Link, download
from controller.boxside.folders import make_private_folder, point_to
from controller.boxside.space import disk_error
from controller.boxside.work import read_json
from corpus_builder.archive import LIMIT_REASONS, ArchiveAccount, extract_archive, load_account
from corpus_builder.archive_limits import Limits, limits_of
from corpus_builder.errors import Named, ProjectError
from corpus_builder.log_lines import log_line
from trainer.journal import save_json
from trainer.run_paths import DataPaths

DIALOG_URL = "ZY_DIALOG_URL"
_CHUNK_BYTES = 1 << 20
_UPLOAD = re.compile(r"[0-9a-f]{64}\.zip(\.partial)?\Z")
_KEPT_S = 7 * 24 * 3600


def fetch_dialogs(request: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Bring the dialogs of a fetch request to `raw/bingshuo-dialog`; raise a ProjectError that says what hinders it."""
    paths, dialog = DataPaths(request["data"]), request["dialog"]
    if dialog["kind"] == "none":
        say("no dialogs are asked for")
        return
    make_private_folder(paths.archives)
    try:
        _bring(request, environment, paths, limits_of(request.get("limits")))
    except OSError as error:  # whatever is read has been looked at by then: it is the disk
        raise disk_error(os.path.join(paths.archives, ""), error, needed_bytes=0) from error


def _bring(request: Mapping[str, Any], environment: Mapping[str, str], paths: DataPaths, limits: Limits) -> None:
    dialog = request["dialog"]
    _tidy(paths)
    if dialog["kind"] == "path":
        sha256 = _take_path(paths, dialog["path"], limits)
    elif dialog["kind"] == "upload":
        sha256 = _take_upload(paths, dialog["sha256"], limits)
    else:
        link = Link(environment.get(DIALOG_URL, ""), request["allow"])
        sha256 = _take_link(paths, link, limits, is_fresh=bool(dialog["fresh"]))
    aside = point_to(paths.dialog_pointer, os.path.join(os.path.basename(paths.archives), sha256))
    if aside is not None:
        say("a real folder lay where the pointer belongs; it stays as {name}", name=Named(os.path.basename(aside)))


def _tidy(paths: DataPaths) -> None:
    """Clear away what a killed setup left of an extraction; an archive that it had moved aside gets its name back."""
    for name in os.listdir(paths.archives):
        path = os.path.join(paths.archives, name)
        sha256, kind = os.path.splitext(path)
        if kind == ".old" and not os.path.lexists(sha256):
            os.rename(path, sha256)
        elif kind in (".old", ".partial"):
            shutil.rmtree(path, ignore_errors=True)


def say(sentence: str, **values: Any) -> None:
    """Print one line of our log."""
    print(log_line("fetch", sentence, **values), flush=True)


def _take_path(paths: DataPaths, path: str, limits: Limits) -> str:
    """Return the sha256 of a ZIP on the box, extracted."""
    sha256 = _hash_file(path)
    _extract(paths, path, sha256, limits)
    return sha256


def _hash_file(path: str) -> str:
    if not os.path.isfile(path):
        raise ProjectError("dialog_zip_missing", path=Named(path))
    sha256 = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""):
                sha256.update(chunk)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ProjectError("dialog_zip_unreadable", path=Named(path), reason=reason) from error
    return sha256.hexdigest()


def _take_upload(paths: DataPaths, sha256: str, limits: Limits) -> str:
    """Return the sha256 of what `receive_upload` has taken, extracted.

    The ZIP goes once nothing more can come of it; one that went over a limit stays, for other limits.
    """
    account = load_account(paths.archive(sha256))
    if account is None or not account.holds_under(limits):
        if _hash_file(paths.upload(sha256)) != sha256:
            os.unlink(paths.upload(sha256))
            raise ProjectError("dialog_zip_unreadable", path=sha256[:16], reason="reason.other_bytes")
    else:
        say("the archive of these dialogs is there already")
    account = _extract(paths, paths.upload(sha256), sha256, limits)
    if not any(one.reason in LIMIT_REASONS for one in account.refused):
        _drop_uploads(paths, sha256)
    return sha256


def _drop_uploads(paths: DataPaths, sha256: str) -> None:
    """Remove an upload, and what of others nobody has touched for a week."""
    folder, now = os.path.dirname(paths.upload(sha256)), time.time()
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        path = os.path.join(folder, name)
        if path == paths.upload(sha256) or (_UPLOAD.match(name) and os.path.getmtime(path) < now - _KEPT_S):
            os.unlink(path)


def _take_link(paths: DataPaths, link: Link, limits: Limits, *, is_fresh: bool) -> str:
    """Return the sha256 of the ZIP behind a link, extracted; the one that is there already, where that is the same."""
    known = None if is_fresh else _find_earlier(paths, link)
    account = load_account(paths.archive(known["sha256"])) if known else None
    is_current = account is not None and account.holds_under(limits)
    try:
        fetched = download(
            link,
            paths.download,
            known_etag=known["etag"] if known and is_current else None,
            say=lambda words: say("{words}", words=words),
        )
    except ProjectError as error:
        if error.code != "storage_expired" or known is None:
            raise
        say("the link has expired; the archive of an earlier fetch is used")
        return str(known["sha256"])
    if fetched.is_known and known is not None:
        say("the ZIP has not changed since the last fetch")
        return str(known["sha256"])
    say("{bytes} bytes fetched, sha256 {sha256}", bytes=os.path.getsize(fetched.path), sha256=fetched.sha256)
    try:
        _extract(paths, fetched.path, fetched.sha256, limits)
    finally:
        os.unlink(fetched.path)
    save_json(paths.archive(fetched.sha256) + ".json", {"source": link.source, "etag": fetched.etag})
    return fetched.sha256


def _find_earlier(paths: DataPaths, link: Link) -> Optional[Dict[str, Any]]:
    """Return the newest archive that came from the same object and is whole."""
    for sha256 in find_archives(paths.data, link.source):
        if load_account(paths.archive(sha256)) is not None:
            about = read_json(paths.archive(sha256) + ".json") or {}
            return {"sha256": sha256, "etag": about.get("etag")}
    return None


def _extract(paths: DataPaths, zip_path: str, sha256: str, limits: Limits) -> ArchiveAccount:
    """Extract a ZIP unless that was done under these limits, and say what became of its members."""
    account = load_account(paths.archive(sha256))
    if account is None or not account.holds_under(limits):
        account = extract_archive(zip_path, paths.archive(sha256), limits=limits)
    say(
        "archive {sha256}: {kept} file(s) kept, {refused} refused, {bytes} bytes",
        sha256=sha256[:16],
        kept=len(account.kept),
        refused=len(account.refused),
        bytes=account.bytes,
    )
    for refused in account.refused:
        say("refused {name}: {reason}", name=Named(refused.name), reason=refused.reason)
    return account
