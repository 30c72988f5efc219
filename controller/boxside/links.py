"""A link to the storage: what may be said of it, how long it is good, and why it was refused.

Runs on the box, and on the runner: standard library and Python 3.8 only. Pure, but for the body of a refusal, which is
read and forgotten: of its words only those in `CODE_WORDS` are ever repeated. The link itself is a secret.
"""

import datetime
import email.utils
import hashlib
import http.client
import re
import time
import urllib.parse
from dataclasses import dataclass
from typing import Dict, Optional, Sequence

from corpus_builder.archive import looks_like
from corpus_builder.errors import Named, ProjectError

_REFUSAL_BYTES = 16 * 1024  # of a refusal's body are read, to tell expired from denied
_EXPIRED = re.compile(rb"expired|ExpiredToken", re.IGNORECASE)
_CODE = re.compile(rb"(?:<Code>|\"[Cc]ode\"\s*:\s*\")\s*([A-Za-z]{1,60})")
#: What S3 and COS call a refusal, as they spell it; nothing else of a body is repeated.
CODE_WORDS = frozenset(
    {
        "AccessDenied", "AllAccessDisabled", "AuthorizationHeaderMalformed", "AuthorizationQueryParametersError",
        "ExpiredToken", "InternalError", "InvalidAccessKeyId", "InvalidArgument", "InvalidBucketName",
        "InvalidObjectState", "InvalidRange", "InvalidRequest", "InvalidToken", "InvalidURI", "MethodNotAllowed",
        "NoSuchBucket", "NoSuchKey", "NoSuchVersion", "PermanentRedirect", "PreconditionFailed", "RequestTimeout",
        "RequestTimeTooSkewed", "ServiceUnavailable", "SignatureDoesNotMatch", "SlowDown", "TokenRefreshRequired",
    }
)  # fmt: skip
#: Failures worth another try.
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_TOO_SKEWED = "RequestTimeTooSkewed"
_TICK_S = 5.0  # a Date header is whole seconds, and was written before it arrived


@dataclass(frozen=True)
class Link:
    """A link and what may be said of it. `source` is the same for every signature of one object."""

    url: str
    allow: Sequence[str]

    @property
    def source(self) -> str:
        """The digest of scheme, host and path."""
        return source_of(self.url)

    @property
    def shown(self) -> Named:
        """The host alone."""
        return Named(urllib.parse.urlsplit(self.url).hostname or "")

    def __repr__(self) -> str:
        return "Link(...)"


class Cut(Exception):
    """The connection ended early, or the storage asked us to come again."""


def source_of(url: str) -> str:
    """Return the digest of a link without its signature."""
    return hashlib.sha256(url.partition("?")[0].encode("utf-8", "surrogatepass")).hexdigest()


def refusal_of(link: Link, response: http.client.HTTPResponse) -> Exception:
    """Return why the storage did not deliver: Cut where another try may help, else a ProjectError."""
    body = response.read(_REFUSAL_BYTES)
    found = _CODE.search(body)
    word = found.group(1).decode("ascii") if found else ""
    reason = "HTTP %d" % response.status + (" " + word if word in CODE_WORDS else "")
    if response.status in _PASSING:
        return Cut(reason)
    if response.status in (400, 401, 403):
        now = server_time(response)
        begin = begins_at(link.url)
        if begin is not None and begin > now + _TICK_S:
            return ProjectError("storage_clock_skew", source=link.shown, reason=reason)
        if _EXPIRED.search(body) or is_expired(link.url, now):
            return ProjectError("storage_expired", source=link.shown)
        if word == _TOO_SKEWED:  # some say that of an expired link too
            return ProjectError("storage_clock_skew", source=link.shown, reason=reason)
        if response.status != 400:
            return ProjectError("storage_denied", source=link.shown, reason=reason)
    if response.status in (404, 410):
        return ProjectError("storage_missing", source=link.shown, reason=reason)
    return ProjectError("storage_failed", source=link.shown, reason=reason)


def check_head(link: Link, response: http.client.HTTPResponse, head: bytes) -> None:
    """Raise when a file begins like a page of words instead of a ZIP: some say so that a link has expired."""
    if head.startswith(b"PK") or looks_like(head) not in ("html", "xml", "json", "text"):
        return
    if is_expired(link.url, server_time(response)):
        raise ProjectError("storage_expired", source=link.shown)
    raise ProjectError("dialog_zip_not_zip", path=link.shown, looks_like=looks_like(head))


def server_time(response: http.client.HTTPResponse) -> float:
    """Return the storage's own clock (Unix time), ours where it does not say: the box's may be wrong."""
    try:
        return email.utils.parsedate_to_datetime(response.getheader("Date") or "").timestamp()
    except (TypeError, ValueError, IndexError):
        return time.time()


def is_expired(url: str, now: float) -> bool:
    """Whether a signed link says itself that its time is over."""
    end = expires_at(url)
    return end is not None and now > end


def expires_at(url: str) -> Optional[float]:
    """Return until when (Unix time) a signed link says that it is good: S3 (v4, v2) and COS; None: it does not say."""
    query = _query(url)
    try:
        if "x-amz-date" in query:
            return _amazon_time(query["x-amz-date"]) + int(query.get("x-amz-expires", "0"))
        if "q-sign-time" in query:
            return float(int(query["q-sign-time"].partition(";")[2]))
        return float(int(query["expires"])) if "expires" in query else None
    except ValueError:
        return None


def begins_at(url: str) -> Optional[float]:
    """Return from when on (Unix time) a signed link says that it is good; None: it does not say."""
    query = _query(url)
    try:
        if "x-amz-date" in query:
            return _amazon_time(query["x-amz-date"])
        return float(int(query["q-sign-time"].partition(";")[0])) if "q-sign-time" in query else None
    except ValueError:
        return None


def _query(url: str) -> Dict[str, str]:
    return {key.lower(): value for key, value in urllib.parse.parse_qsl(urllib.parse.urlsplit(url).query)}


def _amazon_time(text: str) -> float:
    moment = datetime.datetime.strptime(text, "%Y%m%dT%H%M%SZ")
    return moment.replace(tzinfo=datetime.timezone.utc).timestamp()
