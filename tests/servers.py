"""Servers of the tests' own, on loopback, each a context manager: sshd, S3 that checks nothing, S3 that checks all.

`DemoSshd` and `running_storage` are the demo's; here are nanio (checks signatures and expiry), a proxy that cuts
connections, and agents made of a few lines, for tests of the way to the box that need none of what the box can do.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.demo_sshd import DemoSshd, find_sshd
from controller.demo_storage import running_storage

__all__ = [
    "CuttingProxy",
    "DemoSshd",
    "Nanio",
    "agent_of",
    "find_sshd",
    "free_port",
    "running_nanio",
    "running_storage",
]

ROOT = Path(__file__).parents[1]
HOST = "127.0.0.1"
START_TIMEOUT_S = 30


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def agent_of(body: str) -> Callable[[], bytes]:
    """Return a bundle whose answers are what the function `answer(request, stream, out)` in `body` returns."""
    main = body + (
        "\n\nimport json\n"
        "def serve(request, stream, out):\n"
        "    text = json.dumps({'ok': answer(request, stream, out)})\n"
        "    lines = ('ZY_ANSWER_BEGIN ' + request['nonce'], text, 'ZY_ANSWER_END ' + request['nonce'], '')\n"
        "    out.write('\\n'.join(lines).encode())\n"
        "    out.flush()\n"
    )
    importer = (ROOT / "controller/boxside/importer.py").read_text("utf-8")
    modules = {"controller.boxside.importer": importer, "controller.boxside.__main__": main}
    return lambda: zlib.compress(json.dumps(modules).encode())


class CuttingProxy:
    """A TCP proxy that ends every connection once `cut_after` bytes have come back; None lets everything pass."""

    def __init__(self, target_port: int, *, cut_after: int | None = None) -> None:
        self.cut_after = cut_after
        self._target_port = target_port
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> CuttingProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        with client, socket.create_connection((HOST, self._target_port)) as server, suppress(OSError):
            came_back = 0
            while self.cut_after is None or came_back < self.cut_after:
                for ready in select.select([client, server], [], [])[0]:
                    if not (data := ready.recv(2**16)):
                        return
                    (server if ready is client else client).sendall(data)
                    came_back += len(data) if ready is server else 0


@dataclass(frozen=True)
class Nanio:
    """An S3 server that refuses wrong signatures and expired links."""

    endpoint: str
    key_id: str = "nanio-test-key"
    secret: str = "nanio-test-secret"

    def environment(self) -> dict[str, str]:
        """Return the settings that reach this server."""
        return {
            "AWS_ACCESS_KEY_ID": self.key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
        }

    def client(self) -> Any:
        """Return a boto3 client that may do everything."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            aws_access_key_id=self.key_id,
            aws_secret_access_key=self.secret,
            region_name="us-east-1",
            endpoint_url=self.endpoint,
            config=Config(signature_version="s3v4", s3={"addressing_style": "path"}, proxies={}),
        )


@contextmanager
def running_nanio(folder: Path) -> Iterator[Nanio]:
    """Serve S3 from `folder`."""
    port = free_port()
    nanio = Nanio(f"http://{HOST}:{port}")
    environment = {**os.environ, "NANIO_ACCESS_KEY": nanio.key_id, "NANIO_SECRET_KEY": nanio.secret}
    command = [str(Path(sys.executable).with_name("nanio")), "serve", "--host", HOST, "--port", str(port)]
    with (folder / "nanio.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--data-dir", str(folder / "data")], env=environment, stdout=log, stderr=log
        )
    try:
        _wait_for_port(port, process)
        yield nanio
    finally:
        process.terminate()
        process.wait()


def _wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < give_up:
        with suppress(OSError), socket.create_connection((HOST, port)):
            return
        time.sleep(0.02)
    raise AssertionError(f"the server on port {port} did not start (exit code {process.poll()})")
