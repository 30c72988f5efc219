"""A dialog ZIP on a server that checks signatures, behind a network that cuts, fetched by processes that are killed.

Side effects: servers and processes on loopback; what they write lies in the folders that are given.
"""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from controller.boxside.download import Link, download
from controller.objects import resolve_dialog
from controller.settings import Settings
from corpus_builder.errors import ProjectError
from tests.servers import ROOT, Nanio, running_nanio
from tests.tcp_proxy import TcpProxy

KEY = "dialogs/五月 (copy)+&=.zip"
BLOCK = 128 * 1024
SIZE = 6_000_000
DOWNLOADER = """
import json, sys
from controller.boxside import parts
from controller.boxside.download import Link, download
parts.BLOCK_BYTES = int(sys.argv[2])
print(json.dumps(download(Link(sys.stdin.readline(), ["127.0.0.1:" + sys.argv[3]]), sys.argv[1]).sha256))
"""


def make_zip(path: Path, draw: random.Random, size: int = SIZE) -> str:
    """Write a ZIP of about `size` bytes and return its sha256."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("dialogs/one.md", "User: Is the lamp lit?\nAssistant: It is. 灯亮着。\n")
        archive.writestr("filler.bin", draw.randbytes(size))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def serving_zip(folder: Path) -> Iterator[tuple[Nanio, str]]:
    """Serve a ZIP of a few MB as `KEY` in the bucket `dialogs`; yield the server and the ZIP's sha256."""
    sha256 = make_zip(folder / "d.zip", random.Random(1))
    with running_nanio(folder) as server:
        client = server.client()
        client.create_bucket(Bucket="dialogs")
        client.upload_file(str(folder / "d.zip"), "dialogs", KEY)
        client.close()
        yield server, sha256


@contextmanager
def before(server: Nanio, **options: Any) -> Iterator[tuple[TcpProxy, Link]]:
    """A proxy before the server, and a link that is signed for the proxy's address."""
    with TcpProxy(int(server.endpoint.rpartition(":")[2]), **options) as proxy:
        endpoint = f"http://127.0.0.1:{proxy.port}"
        environment = {**server.environment(), "AWS_ENDPOINT_URL": endpoint}
        url = resolve_dialog(f"s3://dialogs/{KEY}", Settings.from_environment(environment)).url
        assert url is not None
        yield proxy, Link(url, [f"127.0.0.1:{proxy.port}"])


def cut_again_and_again(server: Nanio, sha256: str, path: Path, draw: random.Random) -> int:
    """Download while every connection is cut after a number of bytes that is drawn anew; return the connections."""
    with before(server) as (proxy, link):

        def cut_elsewhere(_: object = None) -> None:
            proxy.drop_after(draw.choice([draw.randrange(1, 2000), draw.randrange(2000, 400_000)]))

        cut_elsewhere()
        for _ in range(200):
            try:
                found = download(link, str(path), sleep=cut_elsewhere)
            except ProjectError as error:
                if error.code != "storage_failed":
                    raise
                cut_elsewhere()  # and a later process goes on
            else:
                break
        else:
            raise AssertionError("it never came to an end")
        assert found.sha256 == sha256
        assert hashlib.sha256(path.read_bytes()).hexdigest() == sha256
        assert list(path.parent.iterdir()) == [path]
        return proxy.accepted


def kill_again_and_again(
    server: Nanio, sha256: str, path: Path, draw: random.Random, *, most: int, python: str = sys.executable
) -> int:
    """Kill the downloading process at `most` moments, each a few blocks later; return how often it was killed."""
    killed = 0
    with before(server, delay_s=0.005) as (proxy, link):
        while True:
            child = subprocess.Popen(
                [python, "-c", DOWNLOADER, str(path), str(BLOCK), str(proxy.port)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            )  # fmt: skip
            assert child.stdin
            child.stdin.write(link.url + "\n")
            child.stdin.flush()
            goal = whole_blocks(path) + draw.randrange(1, 8) if killed < most else 10**6
            while child.poll() is None and whole_blocks(path) < goal:
                time.sleep(0.001)
            if child.poll() is None:
                child.send_signal(signal.SIGKILL)
                killed += 1
            out, errors = child.communicate()
            if child.returncode == 0:
                assert json.loads(out) == sha256
                assert hashlib.sha256(path.read_bytes()).hexdigest() == sha256
                return killed
            assert child.returncode == -signal.SIGKILL, errors


def whole_blocks(path: Path) -> int:
    """Return how many blocks the record beside a partial file names."""
    try:
        return len(json.loads(Path(f"{path}.json").read_text())["crc32"])
    except (OSError, ValueError):
        return 0
