"""One file by HTTP/1.1 with Range and ETag, by `sendfile`, a thread per connection: one side of benchmarks/download.py.

    python -m benchmarks.range_server <file>      prints its port, serves until its stdin ends

`/sent` answers how many bytes of the file have been sent so far.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from pathlib import Path
from typing import BinaryIO

ETAG = '"benchmark"'
_PIECE = 1 << 20
_SENT = [0]
_COUNTING = threading.Lock()


def serve(client: socket.socket, fd: int, size: int) -> None:
    """Answer one connection until it ends."""
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with client, client.makefile("rb") as lines:
        while head := read_head(lines):
            if head.startswith(b"GET /sent "):
                text = str(_SENT[0])
                client.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
                continue
            match = re.search(rb"^range: bytes=(\d+)-(\d*)", head, re.IGNORECASE | re.MULTILINE)
            begin, end = (int(match[1]), min(int(match[2] or size - 1), size - 1)) if match else (0, size - 1)
            status = "206 Partial Content" if match else "200 OK"
            answer = [f"HTTP/1.1 {status}", f"Content-Length: {end - begin + 1}", f"ETag: {ETAG}"]
            answer += [f"Content-Range: bytes {begin}-{end}/{size}"] if match else []
            client.sendall("\r\n".join([*answer, "", ""]).encode())
            while begin <= end:
                count = os.sendfile(client.fileno(), fd, begin, min(_PIECE, end + 1 - begin))
                begin += count
                with _COUNTING:
                    _SENT[0] += count


def read_head(lines: BinaryIO) -> bytes:
    """Return the lines of one request, empty at the end of the connection."""
    head = b""
    while line := lines.readline():
        head += line
        if line in (b"\r\n", b"\n"):
            return head
    return b""


def quietly(client: socket.socket, fd: int, size: int) -> None:
    """Serve a client that may leave at any time."""
    try:
        serve(client, fd, size)
    except OSError:
        return


def main() -> int:
    """Listen, tell the port, and go on until stdin ends."""
    path = Path(sys.argv[1])
    fd, size = os.open(path, os.O_RDONLY), path.stat().st_size
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)

    def accept() -> None:
        while True:
            client, _ = listener.accept()
            threading.Thread(target=quietly, args=(client, fd, size), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
