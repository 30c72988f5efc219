"""An S3 server on loopback that holds one ZIP, so that a demo and the tests sign and fetch a real link.

Side effects: a thread that serves HTTP on 127.0.0.1 and keeps the object in memory. Needs the `demo` extra (moto,
boto3). The server checks no signatures: it shows that links are made and fetched, not that they are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corpus_builder.errors import ProjectError

HOST = "127.0.0.1"
BUCKET = "zyforge-demo"
REGION = "us-east-1"
_KEY_ID = "demo-key-id"
_SECRET = "demo-secret-of-no-worth"


@dataclass(frozen=True, slots=True)
class Storage:
    """A server that runs, and the object in it."""

    endpoint: str
    key: str

    @property
    def uri(self) -> str:
        """What a person writes into `dialog_zip`."""
        return f"s3://{BUCKET}/{self.key}"

    def environment(self) -> dict[str, str]:
        """Return the settings that reach this server; the box must be allowed to fetch from it."""
        return {
            "AWS_ACCESS_KEY_ID": _KEY_ID,
            "AWS_SECRET_ACCESS_KEY": _SECRET,
            "AWS_REGION": REGION,
            "AWS_ENDPOINT_URL": self.endpoint,
            "ZY_FETCH_ALLOW": HOST,
        }

    def presigned_url(self, expires_s: int = 3600) -> str:
        """Return a link to the object that carries its own permission."""
        url: str = _client(self.endpoint).generate_presigned_url(
            "get_object", Params={"Bucket": BUCKET, "Key": self.key}, ExpiresIn=expires_s
        )
        return url


@contextmanager
def running_storage(path: Path, *, key: str) -> Iterator[Storage]:
    """Serve the file `path` as the object `key` until the block ends; raise `extra_missing` without moto."""
    try:
        from moto.server import ThreadedMotoServer
    except ImportError as error:
        raise ProjectError("extra_missing", package="moto", extra="demo") from error
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # one line per request otherwise
    server = ThreadedMotoServer(ip_address=HOST, port=0, verbose=False)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        client = _client(endpoint)
        client.create_bucket(Bucket=BUCKET)
        client.upload_file(str(path), BUCKET, key)
        client.close()
        yield Storage(endpoint, key)
    finally:
        server.stop()


@contextmanager
def serve_object(path: Path, *, key: str) -> Iterator[tuple[str, str]]:
    """Serve the file `path`: a presigned link, and the host that the box must be allowed to fetch from."""
    with running_storage(path, key=key) as storage:
        yield storage.presigned_url(), HOST


def _client(endpoint: str) -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        raise ProjectError("extra_missing", package="boto3", extra="demo") from error
    return boto3.client(
        "s3",
        aws_access_key_id=_KEY_ID,
        aws_secret_access_key=_SECRET,
        region_name=REGION,
        endpoint_url=endpoint,
        config=Config(signature_version="s3v4", s3={"addressing_style": "path"}, proxies={}),
    )
