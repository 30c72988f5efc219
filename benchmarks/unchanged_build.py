"""A build after another: nothing changed against `stat` of all files (target 3), and one changed file against all.

In one process: what a start of Python and the imports take is the same for both sides of nothing.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.generated import ASSISTANT, USER
from benchmarks.measure import Claim, best_wall_of, report
from benchmarks.world import write_request, write_world
from corpus_builder.build import build, find_unchanged
from corpus_builder.cache import TICK_NS
from corpus_builder.request import load_request

FILES = 10_000
ROUNDS = 7


def write_small_dialogs(folder: Path) -> list[str]:
    """Write `FILES` dialogs in a hundred folders and return their paths."""
    paths = []
    for number in range(FILES):
        path = folder / f"{number % 100:02}" / f"{number:06}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{USER[0]}：{number}?\n{ASSISTANT[0]}：{number * 7919}, {number * 104729}.\n", "utf-8")
        paths.append(str(path))
    return paths


def quietly(action: Callable[[], object]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        action()


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_world(folder, dialogs_bytes=0, documents=2, tools=10)
        paths = write_small_dialogs(folder / "dialogs")
        time.sleep(2 * TICK_NS / 1e9)
        request = load_request(write_request(folder))
        started = time.perf_counter()
        quietly(lambda: build(request))
        full_s = time.perf_counter() - started

        def rebuild() -> None:
            quietly(lambda: find_unchanged(request) or sys.exit("something changed"))

        best = best_wall_of({"stat": lambda: [os.stat(path) for path in paths], "unchanged": rebuild}, ROUNDS)
        Path(paths[0]).write_text(f"{USER[0]}：?\n{ASSISTANT[0]}：!\n", "utf-8")
        started = time.perf_counter()
        quietly(lambda: build(request))
        changed_s = time.perf_counter() - started
    numbers = [
        ("stat of all files", f"{best['stat'] * 1e3:.1f} ms"),
        ("build where nothing changed", f"{best['unchanged'] * 1e3:.1f} ms"),
        ("build from nothing", f"{full_s:.2f} s"),
        ("build where one file changed", f"{changed_s:.2f} s, {changed_s / full_s:.2f} of it"),
    ]
    return report(
        "unchanged_build",
        about=f"{FILES:,} dialogs of two turns in a hundred folders; checks on.",
        packages=("tokenizers", "pydantic"),
        claims=[Claim("unchanged build to stat", best["unchanged"] / best["stat"], 3, at_most=True)],
        numbers=numbers,
    )


if __name__ == "__main__":
    raise SystemExit(main())
