"""Receives the dialog ZIP from the runner's own disk: as the rest of a request, on from where an earlier try was cut.

Runs on the box: standard library and Python 3.8 only. Side effects: `raw/.download` in the data folder. A ZIP is named
by its sha256 and gets that name only when its bytes have proved it. A sender that was cut may still be writing when the
next one begins: both write the same bytes to the same places, none leaves a gap, and the whole is hashed again.
"""

import hashlib
import os
import re
from typing import IO, Any, Dict

from controller.boxside.arguments import Arguments
from controller.boxside.folders import make_private_folder
from controller.boxside.space import check_space, disk_error
from corpus_builder.errors import ProjectError
from trainer.run_paths import DataPaths

SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_CHUNK_BYTES = 1 << 18
_MAX_BYTES = 1 << 42


def upload_state(args: Arguments) -> Dict[str, Any]:
    """Operation `upload_state`: how many bytes of a ZIP are there, and whether it need not be sent at all."""
    paths, sha256 = DataPaths(args.path("data")), args.text("sha256", SHA256)
    is_there = os.path.isdir(paths.archive(sha256)) or os.path.isfile(paths.upload(sha256))
    return {"is_there": is_there, "bytes": _size(paths.upload(sha256) + ".partial")}


def receive_upload(args: Arguments, stream: IO[bytes]) -> Dict[str, Any]:
    """Operation `receive_upload`: the bytes of a ZIP from `offset` on. Returns how many are there now."""
    data, sha256 = args.path("data"), args.text("sha256", SHA256)
    size, offset = args.count("size", 0, _MAX_BYTES), args.count("offset", 0, _MAX_BYTES)
    path = DataPaths(data).upload(sha256)
    make_private_folder(data)
    make_private_folder(os.path.dirname(path))
    partial = path + ".partial"
    if offset > _size(partial):
        raise ProjectError("input_invalid", name="offset", reason="less than that is there")
    check_space(partial, missing_bytes=size - offset, whole_bytes=size)
    got = _take(stream, partial, offset, size)
    if got == size:
        _prove(partial, sha256)
        os.replace(partial, path)
    return {"bytes": got}


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _take(stream: IO[bytes], partial: str, offset: int, size: int) -> int:
    """Write what comes to `partial` and return where it ends, early where the connection was cut."""
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT, 0o600), "wb", buffering=0) as file:
            file.seek(offset)
            while offset < size:
                data = stream.read(min(_CHUNK_BYTES, size - offset))
                if not data:
                    break
                offset += len(data)
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) :]
    except OSError as error:
        raise disk_error(partial, error, needed_bytes=size - offset) from error
    return offset


def _prove(partial: str, sha256: str) -> None:
    """Raise unless the bytes are those that were announced; they are of no use then, and go."""
    digest = hashlib.sha256()
    with open(partial, "rb") as file:
        for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""):
            digest.update(chunk)
    if digest.hexdigest() != sha256:
        os.unlink(partial)
        raise ProjectError("dialog_zip_unreadable", path=sha256[:16], reason="reason.other_bytes")
