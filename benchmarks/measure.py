"""Timing side by side, children with their memory, and the page of a result. Side effects: runs children, writes pages.

What is compared runs in turn, round after round, and the best of each counts: other work on the machine then
disturbs both sides or neither.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS_DIR = ROOT / "benchmarks" / "results"


def best_of(actions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the seconds of processor time of each action's best round, its threads included."""
    best = dict.fromkeys(actions, float("inf"))
    for _ in range(rounds):
        for name, action in actions.items():
            started = time.process_time()
            action()
            best[name] = min(best[name], time.process_time() - started)
    return best


def best_wall_of(actions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the seconds of each action's best round by the clock on the wall."""
    best = dict.fromkeys(actions, float("inf"))
    for _ in range(rounds):
        for name, action in actions.items():
            started = time.perf_counter()
            action()
            best[name] = min(best[name], time.perf_counter() - started)
    return best


@dataclass(frozen=True, slots=True)
class Child:
    """What a finished process took."""

    wall_s: float
    cpu_s: float
    peak_mb: float


def run_child(command: Sequence[str], *, threads: int | None = None, is_quiet: bool = True) -> Child:
    """Run `command` in the repository's root and return what it took; raise if it fails."""
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": search, "TOKENIZERS_PARALLELISM": "true"}
    if threads is not None:
        environment["RAYON_NUM_THREADS"] = str(threads)
    started = time.perf_counter()
    child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL if is_quiet else None)
    _, status, usage = os.wait4(child.pid, 0)
    wall_s = time.perf_counter() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise subprocess.CalledProcessError(child.returncode, list(command))
    return Child(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def versions(*packages: str) -> str:
    """Return Python's version and those of the packages that are installed."""
    found = [f"Python {platform.python_version()}"]
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)


@dataclass(frozen=True, slots=True)
class Claim:
    """One line of a result: a ratio and what it has to be. `at_most`: smaller is better."""

    what: str
    ratio: float
    limit: float
    at_most: bool = False

    @property
    def holds(self) -> bool:
        """Whether the limit is kept."""
        return self.ratio <= self.limit if self.at_most else self.ratio >= self.limit

    def row(self) -> str:
        sign = "≤" if self.at_most else "≥"
        return f"| {self.what} | {self.ratio:.3g} | {sign} {self.limit:g} | {'yes' if self.holds else 'NO'} |"


def report(
    name: str,
    *,
    about: str,
    packages: Sequence[str],
    claims: Sequence[Claim],
    numbers: Sequence[tuple[str, str]],
    is_kept: bool = True,
) -> int:
    """Print the result, write it to `results/<name>.md`, and return 1 if a claim does not hold."""
    command = f"python -m benchmarks.{name} {' '.join(sys.argv[1:])}".strip()
    page = [
        f"# {name}", "", about, "", f"    {command}", "", f"{versions(*packages)}; {os.cpu_count()} cores.", "",
        "| claim | ratio | target | holds |", "|---|---|---|---|", *(claim.row() for claim in claims), "",
        "| measured | |", "|---|---|", *(f"| {what} | {value} |" for what, value in numbers), "",
    ]  # fmt: skip
    print("\n".join(page))
    if is_kept:
        RESULTS_DIR.mkdir(exist_ok=True)
        (RESULTS_DIR / f"{name}.md").write_text("\n".join(page), "utf-8")
    return int(not all(claim.holds for claim in claims))
