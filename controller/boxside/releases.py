"""Receives a release: our code and the corpus sources as one stream, proven, then put in place by rename.

Runs on the box: standard library and Python 3.8 only. Side effects: folders below `$ROOT/releases`. The stream holds
contents alone, gzipped; what they are called and where each ends says the listing, so nothing else can come to be, and
only plain files. The last three releases stay, and every one that a live work uses.
"""

import errno
import gzip
import hashlib
import os
import posixpath
import re
import shutil
import zlib
from typing import IO, Any, Dict, List, Set

from controller.boxside.arguments import DIGEST, Arguments
from controller.boxside.facts import RELEASE_COMPLETE, is_release_present, read_live_lock
from controller.boxside.folders import make_private_folder, point_to
from controller.boxside.release_digest import release_digest
from controller.boxside.space import disk_error
from controller.boxside.work import LAUNCH_PATIENCE_S, read_json
from corpus_builder.errors import Named, ProjectError
from trainer.journal import now_utc, save_json, seconds_since_boot
from trainer.locks import boot_id, start_ticks
from trainer.run_paths import RootPaths

KEPT_RELEASES = 3
MAX_FILES = 20_000
_CHUNK_BYTES = 1 << 20
_PARTIAL = re.compile(r"\.[0-9a-f]+\.partial\.([0-9]+)(\.torn)?\Z")
_TORN = ".torn"
#: A listing in which one path is a file and a folder, or a name that no file system takes.
_OF_THE_NAMES = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
_LIVE = "live"  # which works use a release is written below `locks/`, beside the locks that prove them alive


def receive_release(args: Arguments, stream: IO[bytes]) -> Dict[str, Any]:
    """Operation `receive_release`. A release that is there already is not read again."""
    root, digest = args.path("root"), args.text("digest", DIGEST)
    paths = RootPaths(root)
    listing = _checked_listing(args.values.get("files"), digest, paths.release(digest))
    if not is_release_present(root, digest):
        make_private_folder(root)
        make_private_folder(paths.releases)
        _drop_leftovers(paths)
        _receive(stream, listing, digest, paths)
        point_to(paths.current_release, digest)
    return {"digest": digest, "files": len(listing), "kept": drop_old_releases(root, digest)}


def _checked_listing(rows: Any, digest: str, path: str) -> Dict[str, Dict[str, Any]]:
    """Return the listing by path; raise `release_corrupt` for a path that leaves the release, or a wrong digest."""
    if not isinstance(rows, list) or not 0 < len(rows) <= MAX_FILES:
        raise ProjectError("release_corrupt", path=path, reason="the listing is empty or too long")
    try:
        listing = {str(row["path"]): dict(row, size=int(row["size"]), mode=int(row["mode"])) for row in rows}
        found = release_digest(rows)
    except (KeyError, TypeError, ValueError):
        raise ProjectError("release_corrupt", path=path, reason="the listing cannot be read") from None
    for name, row in listing.items():
        if not _stays_inside(name) or row["size"] < 0:
            raise ProjectError("release_corrupt", path=path, reason="a member would leave its folder")
        if any(folder in listing for folder in _folders_of(name)):
            raise ProjectError("release_corrupt", path=path, reason="a member lies in another one")
    if len(listing) != len(rows) or found != digest:
        raise ProjectError("release_corrupt", path=path, reason="the listing has another digest")
    return listing


def _folders_of(name: str) -> List[str]:
    parts = name.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def _stays_inside(name: str) -> bool:
    parts = name.split("/")
    return parts[0] in ("code", "sources") and len(parts) > 1 and posixpath.normpath(name) == name and "\0" not in name


def _receive(stream: IO[bytes], listing: Dict[str, Dict[str, Any]], digest: str, paths: RootPaths) -> None:
    """Unpack beside the releases, prove every byte, then rename."""
    partial = os.path.join(paths.releases, ".%s.partial.%d" % (digest, os.getpid()))
    shutil.rmtree(partial, ignore_errors=True)
    try:
        os.mkdir(partial, 0o700)
        _unpack(stream, listing, partial)
        save_json(os.path.join(partial, RELEASE_COMPLETE), {"digest": digest, "at": now_utc(), "files": len(listing)})
        _put_in_place(partial, digest, paths)
    except OSError as error:
        if error.errno in _OF_THE_NAMES:
            raise ProjectError("release_corrupt", path=paths.releases, reason=os.strerror(error.errno or 0)) from error
        size = sum(row["size"] for row in listing.values())
        raise disk_error(partial, error, needed_bytes=size) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put_in_place(partial: str, digest: str, paths: RootPaths) -> None:
    """Give a proven release its name; one that another request has put there meanwhile stays: it may be in use."""
    for _ in range(3):
        try:
            os.rename(partial, paths.release(digest))
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if is_release_present(paths.root, digest):
            return
        torn = partial + _TORN
        os.rename(paths.release(digest), torn)  # it has no release.json
        shutil.rmtree(torn, ignore_errors=True)


def _drop_leftovers(paths: RootPaths) -> None:
    """Remove what a request left that was killed while it unpacked."""
    for name in os.listdir(paths.releases):
        match = _PARTIAL.match(name)
        if match is not None and start_ticks(int(match.group(1))) is None:
            shutil.rmtree(os.path.join(paths.releases, name), ignore_errors=True)


def _unpack(stream: IO[bytes], listing: Dict[str, Dict[str, Any]], folder: str) -> None:
    made: Set[str] = set()
    try:
        with gzip.GzipFile(fileobj=stream, mode="rb") as contents:
            for name, row in listing.items():
                path = os.path.join(folder, *name.split("/"))
                if os.path.dirname(path) not in made:
                    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                    made.add(os.path.dirname(path))
                _write_file(contents, row, path)
            if contents.read(1):
                raise ProjectError("release_corrupt", path=folder, reason="more arrived than was announced")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ProjectError("release_corrupt", path=folder, reason="the stream was cut") from error


def _write_file(contents: gzip.GzipFile, row: Dict[str, Any], path: str) -> None:
    """Write the next content of the stream; raise `release_corrupt` where it is another one than announced."""
    digest, left = hashlib.sha256(), row["size"]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700 if row["mode"] & 0o100 else 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        while left:
            data = contents.read(min(left, _CHUNK_BYTES))
            if not data:
                raise EOFError
            digest.update(data)
            left -= len(data)
            while data:
                data = data[file.write(data) :]
    if digest.hexdigest() != row["sha256"]:
        raise ProjectError("release_corrupt", path=Named(row["path"]), reason="its bytes are not those announced")


def note_release_use(root: str, work_id: str, digest: str) -> None:
    """Write down that a work runs from a release, so that it stays while the work lives."""
    folder = os.path.join(RootPaths(root).locks, _LIVE)
    make_private_folder(folder)
    note = {"digest": digest, "boot_id": boot_id(), "t": seconds_since_boot()}
    save_json(os.path.join(folder, work_id + ".json"), note)


def _used_digests(root: str) -> Set[str]:
    """Return the releases of live works; notes of works that no lock names any more are removed."""
    paths = RootPaths(root)
    locks = [read_live_lock(path) for path in (paths.setup_lock, paths.run_lock)]
    alive = {lock.name for lock in locks if lock is not None}
    folder, used = os.path.join(paths.locks, _LIVE), set()
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        note = read_json(os.path.join(folder, name)) or {}
        if name[: -len(".json")] in alive:
            used.add(str(note.get("digest")))
        elif note.get("boot_id") == boot_id() and seconds_since_boot() - note.get("t", 0) < LAUNCH_PATIENCE_S:
            used.add(str(note.get("digest")))  # about to take its lock
        else:
            os.unlink(os.path.join(folder, name))
    return used


def drop_old_releases(root: str, newest: str) -> List[str]:
    """Remove all but the last three releases, `newest` among them, and those in use; return what stays."""
    paths = RootPaths(root)
    digests = [name for name in os.listdir(paths.releases) if is_release_present(root, name)]
    digests.sort(key=lambda name: os.path.getmtime(os.path.join(paths.release(name), RELEASE_COMPLETE)), reverse=True)
    kept = list(dict.fromkeys([newest] + digests))[:KEPT_RELEASES]
    used = _used_digests(root)
    for name in digests:
        if name not in kept and name not in used:
            shutil.rmtree(paths.release(name), ignore_errors=True)
        elif name not in kept:
            kept.append(name)
    return kept
