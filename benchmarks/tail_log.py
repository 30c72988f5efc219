"""`zy tail-log` of a log of 10 GB, beside one of 10 KB: time and memory must not grow with the log.

    python -m benchmarks.tail_log

The long log is sparse: a hole, then the very lines of the short one. Both are read over SSH from a private sshd by the
whole command, and by the agent alone, which says its own peak memory; from the end, and from a cursor. Side effects:
an sshd on loopback, a temporary folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import Claim, best_wall_of, report
from controller import exchange
from controller.demo_sshd import DemoSshd
from controller.release import agent_bundle
from trainer.run_paths import setup_paths

ROUNDS = 25
LIMIT = 1.1
LONG_BYTES = 10 << 30
SHORT_BYTES = 10 << 10
SETUP_ID = "20260503-101500-3fa1"
#: The agent's loader; at its end it says what it took (proc(5): VmHWM is the peak of this program alone).
AGENT = exchange.LOADER + ';sys.stderr.write(open("/proc/self/status").read())'


def main() -> int:
    """Measure, print and write the page."""
    with tempfile.TemporaryDirectory() as name, DemoSshd(Path(name) / "ssh") as sshd:
        folder = Path(name)
        data = {"10 GB": write_log(folder / "long", LONG_BYTES), "10 KB": write_log(folder / "short", SHORT_BYTES)}
        data["0 bytes"] = write_log(folder / "empty", 0)
        whole = best_wall_of({size: command(sshd, folder, path) for size, path in data.items()}, ROUNDS)
        alone = best_wall_of({size: agent(path) for size, path in data.items()}, ROUNDS)
        on = best_wall_of({size: agent(data[size], cursor_of(size)) for size in ("10 GB", "10 KB")}, ROUNDS)
        peaks = {size: min(peak_kb(path) for _ in range(5)) for size, path in data.items()}
    claims = [
        Claim("time of `zy tail-log` over SSH, 10 GB / 10 KB", whole["10 GB"] / whole["10 KB"], LIMIT, at_most=True),
        Claim("time of the agent, 10 GB / 10 KB", alone["10 GB"] / alone["10 KB"], LIMIT, at_most=True),
        Claim("time of the agent from a cursor, 10 GB / 10 KB", on["10 GB"] / on["10 KB"], LIMIT, at_most=True),
        Claim("peak memory of the agent, 10 GB / 10 KB", peaks["10 GB"] / peaks["10 KB"], LIMIT, at_most=True),
    ]
    numbers = [(f"`zy tail-log`, {size}", f"{1000 * seconds:.0f} ms") for size, seconds in whole.items()]
    numbers += [(f"the agent, {size}", f"{1000 * alone[size]:.0f} ms, {peaks[size] / 1024:.1f} MB") for size in data]
    about = f"Whole processes, best of {ROUNDS} rounds in turn; memory: the least peak of 5."
    return report("tail_log", about=about, packages=("paramiko",), claims=claims, numbers=numbers)


def write_log(data: Path, size: int) -> Path:
    """Write a data folder whose newest log has `size` bytes, the last ones as the supervisor writes them."""
    paths = setup_paths(str(data), SETUP_ID)
    for folder in (paths.folder, os.path.dirname(paths.log)):
        os.makedirs(folder)
    attempt = {"attempt": 1, "process": {"pid": 1, "start_ticks": 1, "boot_id": "another"}, "child": None}
    outcome = {"state": "succeeded", "exit_code": 0, "signal": None, "reason": "", "last_step": 0, "ended_at": ""}
    files = {paths.supervisor_spec: {}, paths.supervisor: {"attempts": [attempt]}, paths.outcome: outcome}
    for path, values in files.items():
        Path(path).write_text(json.dumps(values))
    text = "".join(f"[fetch] {number} bytes of a dialog archive have come\n" for number in range(1000))
    with open(paths.log, "wb") as file:
        if size:
            tail = text.encode()[:SHORT_BYTES]
            file.truncate(size)
            file.seek(size - len(tail))
            file.write(tail)
    return data


def cursor_of(size: str) -> int:
    """Return a place in a log that has some 5 KB after it."""
    return (LONG_BYTES if size == "10 GB" else SHORT_BYTES) - SHORT_BYTES // 2


def command(sshd: DemoSshd, folder: Path, data: Path) -> Callable[[], object]:
    """Return a function that runs the whole command."""
    places = {"ZY_CODING_TRAIN_DATA": str(data), "ZY_CODING_TRAIN_ROOT": str(folder / "root")}
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": os.getcwd(), "ZY_LANG": "en"}
    environment |= {**sshd.settings(), **places}
    words = [sys.executable, "-m", "controller.cli", "tail-log"]
    return lambda: subprocess.run(words, env=environment, check=True, capture_output=True)


def agent(data: Path, cursor: int | None = None) -> Callable[[], object]:
    """Return a function that asks the agent on this machine."""
    return lambda: ask(data, cursor)


def ask(data: Path, cursor: int | None = None) -> str:
    """Ask the agent for the tail, as the public sees it, and return what it says of its process."""
    args = {
        "data": str(data),
        "root": str(data),
        "which": "auto",
        "see": "public",
        "bytes": 12_000,
        "from_offset": cursor,
    }
    request = exchange.make_request("tail_log", args, agent_bundle())
    words = ["python3", *exchange.PYTHON_OPTIONS, AGENT]
    done = subprocess.run(words, input=request.payload, check=True, capture_output=True)
    assert b'{"ok"' in done.stdout, done.stdout
    return done.stderr.decode()


def peak_kb(data: Path) -> int:
    """Return the agent's peak memory in KiB."""
    return next(int(line.split()[1]) for line in ask(data).splitlines() if line.startswith("VmHWM"))


if __name__ == "__main__":
    sys.exit(main())
