"""Where the dialog ZIP comes from: a bucket, a link, a path on the box, or a file here -> what the box is asked for.

The box never sees a storage key: the runner signs a link that is good for an hour. Pure, but for the SDKs' own
arithmetic and a file of this machine, which is read and hashed; no request is made here. The SDKs are imported only
when a bucket is named.

    >>> resolve_dialog("~/dialogs.zip", Settings.from_environment({})).request()
    {'kind': 'path', 'path': '~/dialogs.zip'}
"""

from __future__ import annotations

import hashlib
import logging
import os
import posixpath
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import SecretStr

from controller.boxside.links import expires_at, source_of
from controller.settings import Settings, is_maskable
from corpus_builder.archive import looks_like
from corpus_builder.errors import Named, ProjectError

FIELD = "dialog_zip"
SECRET = "ZY_BINGSHUO_DIALOG_URL"
DEFAULT_PATH = "~/bingshuo-dialog.zip"
EXPIRES_S = 3600  # the download starts within minutes; a leaked link should be dead soon
_BUCKET_URI = re.compile(r"(s3|cos)://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/([^\x00-\x1f\x7f]+)\Z")
_LOCAL_FILE = re.compile(r"(?:file:(?://(?=/)|(?!//))|(?=\.\.?/))(.+)\Z")  # file:PATH, file:///PATH, ./PATH, ../PATH
_CHUNK_BYTES = 2**18
_COS_BUCKET = re.compile(r"[a-z0-9-]+-[0-9]+\Z")


@dataclass(frozen=True, slots=True)
class LocalZip:
    """A dialog ZIP on this machine: a laptop's, or a self-hosted runner's."""

    path: Path
    size: int
    sha256: str

    def stream(self, offset: int) -> Iterator[bytes]:
        """Yield the bytes from `offset` on; raise `dialog_zip_unreadable` when the file has another length by now."""
        left = self.size - offset
        with self.path.open("rb") as file:
            file.seek(offset)
            while left and (data := file.read(min(_CHUNK_BYTES, left))):
                left -= len(data)
                yield data
        if left:
            raise ProjectError("dialog_zip_unreadable", path=Named(str(self.path)), reason="reason.changed_while_sent")


@dataclass(frozen=True, slots=True)
class DialogSource:
    """What the box is asked to fetch, or gets. `shown` may be printed; `allow` are hosts that it may fetch from."""

    kind: Literal["url", "path", "upload"]
    shown: Literal["S3", "COS", "link", "path", "file"]
    path: str | None = None
    url: str | None = field(default=None, repr=False)
    allow: tuple[str, ...] = ()
    file: LocalZip | None = None

    def request(self) -> dict[str, str]:
        """Return the part of a request that may be logged; a link is not in it."""
        if self.file is not None:
            return {"kind": self.kind, "sha256": self.file.sha256}
        return {"kind": self.kind} if self.path is None else {"kind": self.kind, "path": self.path}

    def source_digest(self) -> str | None:
        """Return what the box knows an archive by that came from this link, however it was signed; None: no link."""
        return None if self.url is None else source_of(self.url)

    def check_expiry(self, *, has_archive: bool, now: float | None = None) -> None:
        """Raise `storage_expired` when the link says that its time is over, unless its archive is on the box already.

        By this machine's clock, before anything is sent; whether a storage agrees, the box finds out.
        """
        end = None if self.url is None else expires_at(self.url)
        if end is not None and end < (time.time() if now is None else now) and not has_archive:
            raise ProjectError("storage_expired", source=Named(urlsplit(self.url or "").hostname or ""))

    def secrets(self) -> dict[str, str]:
        """Return the part that travels as a secret."""
        return {} if self.url is None else {"ZY_DIALOG_URL": self.url}

    def masks(self) -> tuple[str, ...]:
        """Return what the runner must mask before it prints anything: the link, its query, each long value in it."""
        if self.url is None:
            return ()
        query = urlsplit(self.url).query
        values = (part.partition("=")[2] for part in query.split("&"))
        is_signed = [self.url, query, *values] if query else []
        return tuple(dict.fromkeys(text for text in is_signed if is_maskable(text)))


def is_hosted(environ: Mapping[str, str]) -> bool:
    """Whether this is a machine of GitHub's: nobody's own files lie there."""
    return environ.get("RUNNER_ENVIRONMENT") == "github-hosted"


def is_local_file(text: str) -> bool:
    """Whether an input names a file of this machine."""
    return _LOCAL_FILE.match(text) is not None


def resolve_dialog(dialog_zip: str | None, settings: Settings, *, is_on_hosted: bool = False) -> DialogSource:
    """Return where the dialog ZIP comes from: the input, else the secret link, else the default path on the box.

    A file of this machine is read once, for its sha256; on GitHub's own machines (`is_on_hosted`) it is refused.

    Raises:
        ProjectError: `input_invalid`, `setting_invalid`, `url_with_query` (a signed link belongs into the secret),
            `url_refused` (plain http), `setting_missing` (keys of the storage), `extra_missing` (its SDK);
            `dialog_zip_missing`, `dialog_zip_unreadable`, `dialog_zip_not_zip` for a file of this machine.
    """
    text = (dialog_zip or "").strip()
    if is_local_file(text):
        if is_on_hosted:
            raise _wrong(FIELD, "reason.file_on_hosted")
        return _local_file(text)
    if text:
        return _resolve(text, settings, name=FIELD)
    if settings.dialog_url is not None:
        return _resolve(settings.dialog_url.get_secret_value(), settings, name=SECRET)
    return DialogSource("path", "path", path=DEFAULT_PATH)


def _resolve(text: str, settings: Settings, *, name: str) -> DialogSource:
    if re.search(r"[\x00-\x1f\x7f]", text):
        raise _wrong(name, "reason.line_break")
    if match := _BUCKET_URI.match(text):
        scheme, bucket, key = match.groups()
        return _presign_s3(bucket, key, settings) if scheme == "s3" else _presign_cos(bucket, key, settings, name)
    if text.startswith(("s3://", "cos://")):
        raise _wrong(name, "reason.bucket_uri")
    if re.match(r"https?://", text, re.IGNORECASE):
        return _link(text, settings, name=name)
    if re.match(r"(~?/)[^/]", text):
        return DialogSource("path", "path", path=_box_path(text, name))
    raise _wrong(name, "reason.dialog_source")


def _local_file(text: str) -> DialogSource:
    match = _LOCAL_FILE.match(text)
    if match is None or re.search(r"[\x00-\x1f\x7f]", text):
        raise _wrong(FIELD, "reason.line_break")
    path = Path(match[1]).expanduser()
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while data := file.read(_CHUNK_BYTES):
                if not size and not data.startswith(b"PK"):
                    raise ProjectError("dialog_zip_not_zip", path=Named(str(path)), looks_like=looks_like(data[:512]))
                digest.update(data)
                size += len(data)
    except FileNotFoundError as error:
        raise ProjectError("dialog_zip_missing", path=Named(str(path))) from error
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ProjectError("dialog_zip_unreadable", path=Named(str(path)), reason=reason) from error
    if not size:
        raise ProjectError("dialog_zip_not_zip", path=Named(str(path)), looks_like="empty")
    return DialogSource("upload", "file", file=LocalZip(path, size, digest.hexdigest()))


def _link(text: str, settings: Settings, *, name: str) -> DialogSource:
    try:
        parts = urlsplit(text)
        host, has_port = parts.hostname or "", parts.port
    except ValueError:
        raise _wrong(name, "reason.no_address") from None
    if not re.fullmatch(r"[\w.:-]+", host) or re.search(r"\s", text) or has_port == 0:
        raise _wrong(name, "reason.no_address")
    if (parts.query or parts.username or parts.password) and name == FIELD:
        raise ProjectError("url_with_query", name=name)
    if parts.username or parts.password:
        raise _wrong(name, "reason.address_login")
    if parts.scheme.lower() == "http" and host not in settings.fetch_allow:
        raise ProjectError("url_refused", host=Named(host), reason="reason.plain_http")
    return DialogSource("url", "link", url=text.partition("#")[0])


def _box_path(text: str, name: str) -> str:
    if ".." in text.split("/") or posixpath.normpath(text) != text:
        raise _wrong(name, "reason.path_dots")
    return text


def _presign_s3(bucket: str, key: str, settings: Settings) -> DialogSource:
    key_id, secret = _needed(
        AWS_ACCESS_KEY_ID=settings.aws_access_key_id, AWS_SECRET_ACCESS_KEY=settings.aws_secret_access_key
    )
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        raise ProjectError("extra_missing", package="boto3", extra="objects") from error
    endpoint = settings.aws_endpoint_url
    client = boto3.client(
        "s3",
        aws_access_key_id=key_id,
        aws_secret_access_key=secret,
        aws_session_token=settings.aws_session_token.get_secret_value() if settings.aws_session_token else None,
        region_name=settings.aws_region or "us-east-1",
        endpoint_url=endpoint,
        # SigV4 everywhere; a server of one's own has no name per bucket, Amazon redirects whoever leaves it out
        config=Config(signature_version="s3v4", s3={"addressing_style": "path" if endpoint else "virtual"}),
    )
    url = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": key}, ExpiresIn=EXPIRES_S)
    allow = (urlsplit(endpoint).hostname or "",) if endpoint else ()
    return DialogSource("url", "S3", url=url, allow=allow)


def _presign_cos(bucket: str, key: str, settings: Settings, name: str) -> DialogSource:
    if not _COS_BUCKET.match(bucket):
        raise _wrong(name, "reason.cos_bucket")
    key_id, secret = _needed(ZY_COS_SECRET_ID=settings.cos_secret_id, ZY_COS_SECRET_KEY=settings.cos_secret_key)
    if settings.cos_region is None:
        raise ProjectError("setting_missing", name="ZY_COS_REGION")
    try:
        from qcloud_cos import CosConfig, CosS3Client
    except ImportError as error:
        raise ProjectError("extra_missing", package="cos-python-sdk-v5", extra="objects") from error
    logging.getLogger("qcloud_cos").setLevel(logging.WARNING)  # it logs signing keys at DEBUG
    client = CosS3Client(CosConfig(Region=settings.cos_region, SecretId=key_id, SecretKey=secret, Scheme="https"))
    url: str = client.get_presigned_url(Bucket=bucket, Key=key, Method="GET", Expired=EXPIRES_S)
    return DialogSource("url", "COS", url=url)


def _needed(**secrets: SecretStr | None) -> list[str]:
    missing = [name for name, secret in secrets.items() if secret is None]
    if missing:
        raise ProjectError("setting_missing", name=", ".join(missing))
    return [secret.get_secret_value() for secret in secrets.values() if secret is not None]


def _wrong(name: str, reason: str) -> ProjectError:
    return ProjectError("setting_invalid" if name == SECRET else "input_invalid", name=name, reason=reason)
