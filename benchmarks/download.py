"""The dialog ZIP's download beside `curl | sha256sum`: on loopback, through 60 ms, and after a cut.

Both are whole processes and end with the file's sha256; ours writes the file too, and its record. The server sends by
`sendfile` from a process of its own. Through the proxy (which ends TCP itself and holds at most 4 MB of a connection
on the way) curl has one connection, we have four. Side effects: a server and a proxy on loopback, a temporary folder.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from benchmarks.measure import ROOT, Claim, best_wall_of, report
from controller.boxside.parts import BLOCK_BYTES
from tests.tcp_proxy import TcpProxy

SIZE_MB = 768
FAR_SIZE_MB = 192
ROUNDS = 5
RTT_S = 0.060
NEAR_LIMIT = 0.8
FAR_LIMIT = 1.0
CUT_LIMIT = 1.1  # bytes on the line after a cut at the middle, of what was missing: one block per stream, and the probe
DOWNLOADER = (
    "import sys\n"
    "from controller.boxside.download import Link, download\n"
    "print(download(Link(sys.argv[1], [sys.argv[1].split('/')[2]]), sys.argv[2]).sha256)\n"
)


def main() -> int:
    """Measure, print and write the page."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        near = measure(folder, make_file(folder / "near.zip", SIZE_MB), delay_s=0.0)
        far = measure(folder, make_file(folder / "far.zip", FAR_SIZE_MB), delay_s=RTT_S / 2)
        again_mb, missing_mb = resume(folder, folder / "far.zip")
    claims = [
        Claim("speed of `curl \\| sha256sum`, loopback", near["curl"] / near["ours"], NEAR_LIMIT),
        Claim("speed of `curl \\| sha256sum`, 60 ms round trip", far["curl"] / far["ours"], FAR_LIMIT),
        Claim("bytes fetched after a kill, of those that were missing", again_mb / missing_mb, CUT_LIMIT, at_most=True),
    ]
    rows = (("loopback", near, SIZE_MB), ("60 ms", far, FAR_SIZE_MB))
    numbers = [
        (f"{who}, {size} MB, {where}", f"{times[key]:.2f} s, {size / times[key]:.0f} MB/s")
        for where, times, size in rows
        for key, who in (("ours", "download"), ("curl", "`curl \\| sha256sum`"))
    ]
    numbers += [("missing after the kill, and sent then", f"{missing_mb:.0f} MB, {again_mb:.0f} MB")]
    numbers += [("beside", curl_version())]
    about = f"Whole processes, best of {ROUNDS} rounds in turn, file and download in the temporary folder."
    return report("download", about=about, packages=(), claims=claims, numbers=numbers)


def make_file(path: Path, size_mb: int) -> Path:
    """Write a file that begins as a ZIP does and holds seeded noise."""
    block = b"PK\x03\x04" + hashlib.shake_256(b"benchmark").digest((1 << 20) - 4)
    with path.open("wb") as file:
        for number in range(size_mb):
            file.write(block if not number else number.to_bytes(4, "big") + block[4:])
    return path


@contextmanager
def serving(path: Path) -> Iterator[int]:
    """Serve `path` from a process of its own; yield the port."""
    command = [sys.executable, "-m", "benchmarks.range_server", str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        yield int(server.stdout.readline())
        assert server.stdin
        server.stdin.close()


def measure(folder: Path, path: Path, *, delay_s: float) -> dict[str, float]:
    """Return the seconds of each side's best round; both must find the file's sha256."""
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    with serving(path) as port:
        if not delay_s:
            return timed(folder, port, sha256)
        with TcpProxy(port, delay_s=delay_s) as proxy:
            return timed(folder, proxy.port, sha256)


def timed(folder: Path, port: int, sha256: str) -> dict[str, float]:
    url, target = f"http://127.0.0.1:{port}/dialog.zip", folder / "download" / "dialog.zip.partial"

    def ours() -> None:
        target.unlink(missing_ok=True)
        assert run([sys.executable, "-IS", "-c", with_path(DOWNLOADER), url, str(target)]) == sha256

    def curl() -> None:
        assert run(["bash", "-c", 'set -o pipefail; curl --noproxy "*" -sSf "$1" | sha256sum', "-", url]) == sha256

    return best_wall_of({"ours": ours, "curl": curl}, ROUNDS)


def with_path(code: str) -> str:
    """Return `code` with our modules in reach, for a Python that looks nowhere else."""
    return f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"


def run(command: list[str]) -> str:
    """Return the first word that a command prints."""
    environment = {"PATH": os.environ["PATH"]}
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split()[0]


def resume(folder: Path, path: Path) -> tuple[float, float]:
    """Kill a download about half-way and run it again; return the MB sent then, and those that were missing."""
    target = folder / "resumed" / "dialog.zip.partial"
    size, command = path.stat().st_size, [sys.executable, "-IS", "-c", with_path(DOWNLOADER)]
    with serving(path) as port, TcpProxy(port, delay_s=RTT_S / 2) as proxy:
        url = f"http://127.0.0.1:{proxy.port}/dialog.zip"
        with subprocess.Popen([*command, url, str(target)], stdout=subprocess.DEVNULL) as child:
            while whole_bytes(target, size) < size // 2 and child.poll() is None:
                time.sleep(0.005)
            child.kill()
        proxy.drop_all()
        missing, before = size - whole_bytes(target, size), bytes_sent(port)
        assert run([*command, url, str(target)]) == hashlib.sha256(path.read_bytes()).hexdigest()
        return (bytes_sent(port) - before) / 1e6, missing / 1e6


def bytes_sent(port: int) -> int:
    """Return what the server has sent so far."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    with closing(connection):
        connection.request("GET", "/sent")
        return int(connection.getresponse().read())


def whole_bytes(target: Path, size: int) -> int:
    """Return how many bytes the record beside a partial file vouches for."""
    try:
        blocks = json.loads(Path(f"{target}.json").read_text("utf-8"))["crc32"]
    except FileNotFoundError:
        return 0
    return sum(min(BLOCK_BYTES, size - BLOCK_BYTES * int(index)) for index in blocks)


def curl_version() -> str:
    """Return which curl this is."""
    return " ".join(
        subprocess.run(["curl", "--version"], check=True, capture_output=True, text=True).stdout.split()[:2]
    )


if __name__ == "__main__":
    sys.exit(main())
