"""Whether a link to the dialog ZIP opens: one byte is asked for, from here; nothing is kept. Side effects: network.

A GET with `Range: bytes=0-0`, never a HEAD: only GET is signed. The link is a secret and is in no message.
"""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from controller.boxside.addresses import open_url
from controller.boxside.download import Cut, Link, expires_at, refusal_of
from corpus_builder.archive import looks_like
from corpus_builder.errors import ProjectError

_HEAD_BYTES = 512


@dataclass(frozen=True, slots=True)
class Opened:
    """A link that opens. `size` in bytes and `left_s`, how long the link is good for: None where nobody says."""

    size: int | None
    left_s: float | None


def probe(url: str, allow: Sequence[str]) -> Opened:
    """Return what is behind `url`.

    Raises:
        ProjectError: `storage_expired`, `storage_denied`, `storage_failed`, `storage_missing`,
            `storage_clock_skew`, `url_refused`, `dialog_zip_not_zip`.
    """
    link, end = Link(url, allow), expires_at(url)
    if end is not None and end < time.time():
        raise ProjectError("storage_expired", source=link.shown)
    headers = {"Range": "bytes=0-0", "Accept-Encoding": "identity", "User-Agent": "zyforge"}
    try:
        with open_url(url, headers, allow) as response:
            if response.status not in (200, 206):
                raise refusal_of(link, response)
            head = response.read(_HEAD_BYTES)
            size = _size(response)
    except (OSError, http.client.HTTPException, Cut) as error:
        reason = str(error) if isinstance(error, Cut) else type(error).__name__
        raise ProjectError("storage_failed", source=link.shown, reason=reason) from error
    if not b"PK".startswith(head[:2]) and looks_like(head) in ("html", "xml", "json", "text"):
        raise ProjectError("dialog_zip_not_zip", path=link.shown, looks_like=looks_like(head))
    return Opened(size, None if end is None else end - time.time())


def _size(response: http.client.HTTPResponse) -> int | None:
    whole = re.match(r"bytes \d+-\d+/(\d+)$", response.getheader("Content-Range") or "")
    if whole is not None:
        return int(whole[1])
    length = response.getheader("Content-Length") or ""
    return int(length) if response.status == 200 and length.isdigit() else None
