"""Answers that are cut where HTTP itself does not notice: within the head, and in a body whose length nobody told."""

from __future__ import annotations

import hashlib
import io
import os
import socketserver
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from controller.boxside.download import Link, download
from corpus_builder.errors import ProjectError


@contextmanager
def answering(*answers: bytes) -> Iterator[Link]:
    """A server that gives each connection the next of `answers`, the last one again and again, and hangs up."""
    left = list(answers)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline() not in (b"\r\n", b""):
                pass
            self.wfile.write(left.pop(0) if len(left) > 1 else left[0])

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        host = f"127.0.0.1:{server.server_address[1]}"
        yield Link(f"http://{host}/d.zip", [host])
        server.shutdown()
        thread.join()


def zip_bytes() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("one.md", "User: hello\n")
        archive.writestr("filler.bin", os.urandom(50_000))
    return buffer.getvalue()


BODY = zip_bytes()
HEAD = b'HTTP/1.1 200 OK\r\nETag: "a"\r\nConnection: close\r\nContent-Length: %d\r\n\r\n' % len(BODY)
NO_LENGTH = b"HTTP/1.0 200 OK\r\nConnection: close\r\n\r\n"


def fetched(link: Link, folder: Path) -> str:
    found = download(link, str(folder / "d/zip"), sleep=lambda seconds: None)
    assert hashlib.sha256((folder / "d/zip").read_bytes()).hexdigest() == found.sha256
    return found.sha256


@pytest.mark.parametrize("cut_at", [16, 17, 20, 40, HEAD.index(b"Content-Length") + 3, len(HEAD) - 3, len(HEAD) - 2])
def test_a_head_that_is_cut_anywhere_is_no_answer(tmp_path, cut_at):
    with answering(HEAD[:cut_at], HEAD + BODY) as link:
        assert fetched(link, tmp_path) == hashlib.sha256(BODY).hexdigest()


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_body_of_unknown_length_is_whole_with_the_end_of_its_zip(tmp_path, share):
    with answering(NO_LENGTH + BODY[: int(share * len(BODY))], NO_LENGTH + BODY) as link:
        assert fetched(link, tmp_path) == hashlib.sha256(BODY).hexdigest()


def test_a_redirect_whose_address_is_cut_is_not_followed(tmp_path):
    redirect = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/elsewh"
    with answering(redirect, HEAD + BODY) as link:
        assert fetched(link, tmp_path) == hashlib.sha256(BODY).hexdigest()


def test_what_is_cut_every_time_is_given_up(tmp_path):
    with answering(HEAD[:40]) as link, pytest.raises(ProjectError, match="storage_failed"):
        fetched(link, tmp_path)
