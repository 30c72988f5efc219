"""A link -> a file: asked for one byte first, then fetched in parts or in one stream, hashed while it comes.

Runs on the box: standard library and Python 3.8 only. Side effects: network, files, threads. The link is a secret: it
is in no message, and no body of a refusal is ever shown. The first question is a GET of one byte, never a HEAD: only
GET is signed. Its answer says how large the file is and whether the storage gives parts (`parts.py`); where it does
not, or does not name the object's version (ETag), there is one stream, which a cut sends back to its beginning.
"""

import hashlib
import http.client
import os
import re
import time
import zipfile
from dataclasses import dataclass
from typing import Callable, Optional, Union

from controller.boxside.addresses import Caller
from controller.boxside.links import Cut as Cut
from controller.boxside.links import Link as Link
from controller.boxside.links import check_head
from controller.boxside.links import expires_at as expires_at
from controller.boxside.links import is_expired as is_expired
from controller.boxside.links import refusal_of as refusal_of
from controller.boxside.parts import HEADERS, Changed, PartFile, PartsDownload, Tries, failure_of, forget, write_whole
from controller.boxside.space import check_space, disk_error
from corpus_builder.errors import ProjectError

_CHUNK_BYTES = 256 * 1024
_CHANGES = 2  # an object that is another one each time we look is fetched in one stream


@dataclass(frozen=True)
class Download:
    """A whole file. `is_known` means that the storage said: the same as `known_etag`; then there is no file."""

    path: str
    sha256: str
    etag: Optional[str]
    is_known: bool = False


@dataclass(frozen=True)
class _Parts:
    """The storage gives parts of an object of this version and size."""

    etag: str
    size: int


class _NoParts(Exception):
    """The storage gives no parts of this object that could be put together: no version is named, or it is empty."""


def download(
    link: Link,
    path: str,
    *,
    known_etag: Optional[str] = None,
    say: Callable[[str], None] = lambda line: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Download:
    """Return the file behind `link`, written to `path`; goes on where an earlier try of the same object stopped.

    Raises:
        ProjectError: `url_refused`, `storage_failed`, `storage_denied`, `storage_expired`, `storage_missing`,
            `storage_clock_skew`, `dialog_zip_not_zip`, `box_disk_full`, `box_not_writable`.
    """
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    try:
        changes = 0
        while True:
            caller = Caller(link.url, link.allow)
            try:
                may_split = changes < _CHANGES
                answer = _ask(link, path, caller, known_etag if not changes else None, may_split, say, sleep)
                if isinstance(answer, Download):
                    return answer
                return _fetch_parts(link, path, caller, answer, say, sleep)
            except _NoParts:
                changes = _CHANGES
            except Changed:
                say("the file has changed meanwhile; beginning again")
                changes += 1
            finally:
                caller.close()
    except ProjectError as error:
        if error.code == "dialog_zip_not_zip":
            forget(path, and_file=True)
        raise


def _fetch_parts(
    link: Link, path: str, caller: Caller, parts: _Parts, say: Callable[[str], None], sleep: Callable[[float], None]
) -> Download:
    file = PartFile(path, link, etag=parts.etag, size=parts.size)
    try:
        if file.got:
            say("%d of %d bytes are here from an earlier try" % (file.got, file.size))
        sha256 = PartsDownload(link, file, parts.etag, say=say, sleep=sleep).run(caller)
    finally:
        file.close()
    file.finish()
    return Download(path, sha256, parts.etag)


def _ask(
    link: Link,
    path: str,
    caller: Caller,
    known_etag: Optional[str],
    may_split: bool,
    say: Callable[[str], None],
    sleep: Callable[[float], None],
) -> Union[Download, _Parts]:
    """Ask for one byte, or for all; a storage that answers with all of it has been downloaded then."""
    tries = Tries(sleep)
    headers = dict(HEADERS, Range="bytes=0-0") if may_split else dict(HEADERS)
    if known_etag is not None:
        headers["If-None-Match"] = known_etag
    while True:
        try:
            with caller.get(headers) as response:
                if response.status == 304 and known_etag is not None:
                    return Download(path, "", known_etag, is_known=True)
                if response.status == 206:
                    return _read_probe(response)
                if response.status == 416:
                    raise _NoParts
                if response.status != 200:
                    raise refusal_of(link, response)
                return _save(link, path, response)
        except (OSError, http.client.HTTPException, Cut) as error:
            if not tries.wait_for_another(error, has_new_bytes=False):
                raise failure_of(link, error) from error
            say("cut; trying again")


def _read_probe(response: http.client.HTTPResponse) -> _Parts:
    match = re.match(r"bytes 0-0/(\d+)$", response.getheader("Content-Range") or "")
    etag = response.getheader("ETag")
    if match is None or int(match.group(1)) == 0 or not etag or etag.startswith("W/"):
        raise _NoParts  # a weak ETag names no bytes (RFC 9110, 13.1.5)
    response.read()
    return _Parts(etag, int(match.group(1)))


def _save(link: Link, path: str, response: http.client.HTTPResponse) -> Download:
    """Write the body of an answer to `path`; raise Cut when its end did not come."""
    forget(path, and_file=True)
    length = response.getheader("Content-Length") or ""
    total = int(length) if length.isdigit() else None
    if total is not None:
        check_space(path, missing_bytes=total, whole_bytes=total)
    sha256, got = hashlib.sha256(), 0
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError as error:
        raise disk_error(path, error, needed_bytes=total or 0) from error
    try:
        while total is None or got < total:
            data = response.read1(_CHUNK_BYTES if total is None else min(_CHUNK_BYTES, total - got))
            if not data:
                break
            if got == 0:
                check_head(link, response, data[:4096])
            try:
                write_whole(fd, data, got)
            except OSError as error:
                raise disk_error(path, error, needed_bytes=(total or 0) - got) from error
            sha256.update(data)
            got += len(data)
    finally:
        os.close(fd)
    if total is not None and got != total:
        raise Cut("the connection was cut")
    if total is None and not response.chunked and not zipfile.is_zipfile(path):
        raise Cut("the connection was cut")  # only its end tells the end: the ZIP's own must have come
    return Download(path, sha256.hexdigest(), response.getheader("ETag"))
