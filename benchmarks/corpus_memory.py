"""Peak memory of a build by the size of its dialogs: 1 GB in less than 1 GB.

Sizes are in MB (`python -m benchmarks.corpus_memory 100 300`); the slope between the first and the last tells what a
larger corpus would take.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.measure import Child, Claim, report, run_child
from benchmarks.world import write_request, write_world

LIMIT_MB = 1_000
GIGABYTE = 1_000


def build(size_mb: int) -> Child:
    """Return what the build of dialogs of this size takes, checks on."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_world(folder, dialogs_bytes=size_mb * 1_000_000)
        return run_child([sys.executable, "-m", "corpus_builder.build", str(write_request(folder))])


def main(sizes_mb: list[int]) -> int:
    runs = {size_mb: build(size_mb) for size_mb in sizes_mb}
    first, last = runs[sizes_mb[0]], runs[sizes_mb[-1]]
    span_mb = sizes_mb[-1] - sizes_mb[0]
    slope = (last.peak_mb - first.peak_mb) / span_mb if span_mb else 0.0
    at_1_gb = last.peak_mb + slope * max(0, GIGABYTE - sizes_mb[-1])
    told = "measured" if sizes_mb[-1] >= GIGABYTE else "by the slope"
    return report(
        "corpus_memory",
        about=(__doc__ or "").strip(),
        packages=("tokenizers",),
        claims=[Claim(f"peak for 1 GB of dialogs ({told}), of 1 GB", at_1_gb / LIMIT_MB, 1, at_most=True)],
        numbers=[
            *(
                (f"{size} MB of dialogs", f"peak {run.peak_mb:.0f} MB, {run.wall_s:.0f} s")
                for size, run in runs.items()
            ),
            ("slope", f"{slope:.2f} MB of memory per MB of dialogs"),
        ],
    )


if __name__ == "__main__":
    raise SystemExit(main([int(size) for size in sys.argv[1:]] or [100, 300]))
