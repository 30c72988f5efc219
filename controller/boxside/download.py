"""A link -> a file: resumed after a cut, hashed while it streams, its refusals told apart.

Runs on the box: standard library and Python 3.8 only. Side effects: network, files. The link is a secret: it is in
no message, and no body of a refusal is ever shown. Beside the partial file lies what it is part of:

    dialog.zip.partial.json   {"source": "<digest of scheme, host and path>", "etag": "\\"9be0…\\""}
"""

import datetime
import email.utils
import errno
import hashlib
import http.client
import os
import re
import shutil
import ssl
import time
import urllib.parse
from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional, Sequence

from controller.boxside.addresses import open_url
from controller.boxside.facts import GIB
from controller.boxside.work import read_json
from corpus_builder.archive import looks_like
from corpus_builder.errors import Named, ProjectError
from trainer.journal import save_json

#: Tries in a row without one new byte; the pauses between them double from a second.
MAX_TRIES = 5
RESERVE_BYTES = 64 << 20  # left free beside the ZIP and what it unpacks to
_CHUNK_BYTES = 1 << 20
_REFUSAL_BYTES = 16 * 1024  # of a refusal's body are read, to tell expired from denied
_EXPIRED = re.compile(rb"expired|ExpiredToken|RequestTimeTooSkewed", re.IGNORECASE)
#: Failures worth another try.
_PASSING = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Link:
    """A link and what may be said of it. `source` is the same for every signature of one object."""

    url: str
    allow: Sequence[str]

    @property
    def source(self) -> str:
        """The digest of scheme, host and path."""
        return hashlib.sha256(self.url.partition("?")[0].encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def shown(self) -> Named:
        """The host alone."""
        return Named(urllib.parse.urlsplit(self.url).hostname or "")

    def __repr__(self) -> str:
        return "Link(...)"


@dataclass(frozen=True)
class Download:
    """A whole file. `is_known` means that the storage said: the same as `known_etag`; then there is no file."""

    path: str
    sha256: str
    etag: Optional[str]
    is_known: bool = False


class Cut(Exception):
    """The connection ended early, or the storage asked us to come again."""


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
        ProjectError: `url_refused`, `storage_failed`, `storage_denied`, `storage_expired`, `dialog_zip_not_zip`,
            `box_disk_full`.
    """
    partial = Partial(path, link)
    tries = 0
    while True:
        before = partial.size
        try:
            return _fetch_once(link, partial, known_etag)
        except (OSError, http.client.HTTPException, Cut) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _disk_full(path, partial.size) from error
            tries = 1 if partial.size > before else tries + 1
            if isinstance(error, ssl.SSLCertVerificationError):
                tries = MAX_TRIES  # no later try finds another certificate
            if tries >= MAX_TRIES:
                reason = str(error) if isinstance(error, Cut) else type(error).__name__
                raise ProjectError("storage_failed", source=link.shown, reason=reason) from error
            say("cut after %d bytes; trying again" % partial.size)
            sleep(2.0 ** (tries - 1))


class Partial:
    """The file as far as it is there, with its running hash."""

    def __init__(self, path: str, link: Link) -> None:
        self.path = path
        self._about = path + ".json"
        self._source = link.source
        about = read_json(self._about) or {}
        self.etag: Optional[str] = about.get("etag") if about.get("source") == self._source else None
        self.sha256 = hashlib.sha256()
        self.size = 0
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        if self.etag is not None and os.path.exists(path):
            self._take_up()

    def _take_up(self) -> None:
        """Hash what is there already."""
        with open(self.path, "rb") as file:
            for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""):
                self.sha256.update(chunk)
                self.size += len(chunk)

    def begin(self, etag: Optional[str]) -> None:
        """Start from nothing; without an etag a later try cannot go on where this one stops."""
        self.etag, self.size, self.sha256 = etag, 0, hashlib.sha256()
        with open(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb"):
            pass
        save_json(self._about, {"source": self._source, "etag": etag})

    def append(self, source: Any) -> None:
        """Write what `source` still holds."""
        with open(self.path, "ab", buffering=0) as file:
            while True:
                chunk = source.read(_CHUNK_BYTES)
                if not chunk:
                    return
                file.write(chunk)
                self.sha256.update(chunk)
                self.size += len(chunk)

    def finish(self) -> None:
        """Forget what the whole file was part of."""
        if os.path.exists(self._about):
            os.unlink(self._about)


def _fetch_once(link: Link, partial: Partial, known_etag: Optional[str]) -> Download:
    """Ask once and read to the end; raise Cut when the end did not come."""
    headers: Dict[str, str] = {"Accept-Encoding": "identity", "User-Agent": "zyforge"}
    if partial.size:
        headers.update({"Range": "bytes=%d-" % partial.size, "If-Range": partial.etag or ""})
    elif known_etag is not None:
        headers["If-None-Match"] = known_etag
    with open_url(link.url, headers, link.allow) as response:
        if response.status == 304 and known_etag is not None:
            return Download(partial.path, "", known_etag, is_known=True)
        total = _begin(link, partial, response)
        if total is not None:
            _check_space(partial.path, total - partial.size)
        _append_checked(link, partial, response)
    if total is not None and partial.size != total:
        raise Cut("the connection was cut")
    partial.finish()
    return Download(partial.path, partial.sha256.hexdigest(), partial.etag)


def _begin(link: Link, partial: Partial, response: http.client.HTTPResponse) -> Optional[int]:
    """Return the size of the whole file by the answer's head, None where it does not say."""
    etag = response.getheader("ETag")
    if response.status == 206:
        match = re.match(r"bytes (\d+)-\d+/(\d+)$", response.getheader("Content-Range") or "")
        if match is None or int(match.group(1)) != partial.size or etag != partial.etag:
            partial.begin(None)
            raise Cut("the file has changed meanwhile")
        return int(match.group(2))
    if response.status == 416 and partial.size:
        partial.begin(None)
        raise Cut("the file has changed meanwhile")
    if response.status != 200:
        raise _refusal(link, response)
    partial.begin(etag)
    length = response.getheader("Content-Length")
    return int(length) if length is not None and length.isdigit() else None


def _append_checked(link: Link, partial: Partial, response: http.client.HTTPResponse) -> None:
    """Write the body; a page of words where a ZIP belongs is refused by its first bytes."""
    if partial.size == 0:
        head = response.read(4096)
        if head and not head.startswith(b"PK") and looks_like(head) in ("html", "xml", "json", "text"):
            raise ProjectError("dialog_zip_not_zip", path=link.shown, looks_like=looks_like(head))
        partial.append(_Head(head))
    partial.append(response)


class _Head:
    """Bytes that were read already, as something to read from."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, size: int) -> bytes:
        """Return everything once."""
        data, self._data = self._data, b""
        return data


def _refusal(link: Link, response: http.client.HTTPResponse) -> Exception:
    """Return why the storage did not deliver; its body decides between expired and denied and is forgotten."""
    body = response.read(_REFUSAL_BYTES)
    if response.status in _PASSING:
        return Cut("HTTP %d" % response.status)
    if response.status in (400, 401, 403):
        if _EXPIRED.search(body) or is_expired(link.url, _server_time(response)):
            return ProjectError("storage_expired", source=link.shown)
        if response.status != 400:
            return ProjectError("storage_denied", source=link.shown, reason="HTTP %d" % response.status)
    return ProjectError("storage_failed", source=link.shown, reason="HTTP %d" % response.status)


def _server_time(response: http.client.HTTPResponse) -> float:
    """Return the storage's own clock, ours where it does not say: the box's may be wrong."""
    try:
        return email.utils.parsedate_to_datetime(response.getheader("Date") or "").timestamp()
    except (TypeError, ValueError, IndexError):
        return time.time()


def is_expired(url: str, now: float) -> bool:
    """Whether a signed link says itself that its time is over: S3 (v4, v2) and COS."""
    query = {key.lower(): value for key, value in urllib.parse.parse_qsl(urllib.parse.urlsplit(url).query)}
    try:
        if "x-amz-date" in query:
            begin = datetime.datetime.strptime(query["x-amz-date"], "%Y%m%dT%H%M%SZ")
            began = begin.replace(tzinfo=datetime.timezone.utc).timestamp()
            return now > began + int(query.get("x-amz-expires", "0"))
        if "q-sign-time" in query:
            return now > int(query["q-sign-time"].partition(";")[2])
        return "expires" in query and now > int(query["expires"])
    except ValueError:
        return False


def _check_space(path: str, missing_bytes: int) -> None:
    """Raise `box_disk_full` unless the rest of the ZIP fits, and as much again once it is unpacked."""
    if shutil.disk_usage(os.path.dirname(path)).free < 2 * missing_bytes + RESERVE_BYTES:
        raise _disk_full(path, missing_bytes)


def _disk_full(path: str, missing_bytes: int) -> ProjectError:
    free = shutil.disk_usage(os.path.dirname(path)).free
    needed = 2 * missing_bytes + RESERVE_BYTES
    return ProjectError(
        "box_disk_full", path=os.path.dirname(path), free_gib=round(free / GIB, 2), needed_gib=round(needed / GIB, 2)
    )
