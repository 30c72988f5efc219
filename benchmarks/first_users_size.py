"""The first user's corpus, whole commands as processes, from their start to their end (target: a sixth of TRL's).

11 documents with 74 sections, five wordings each, and 46 lines of tool JSONL: 471 questions with an answer. Ours
begins with the documents, the peers with the samples that ours has made of them. TRL is no dependency of ours: it
lives in an environment of its own (`peers.py`), as does `datasets`, which the first pipeline's way needs.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.generated import Writer
from benchmarks.measure import Child, Claim, report, run_child
from benchmarks.peers import trl_python
from benchmarks.world import write_request, write_world

SECTIONS = (7, 7, 7, 7, 7, 7, 7, 7, 6, 6, 6)
ROUNDS = 3
BUILD, ENCODE = "python -m corpus_builder.build", "the same, then ids and labels of every sample"


def write_first_users(folder: Path) -> Path:
    """Write documents of the first user's number and lengths; return the request."""
    write_world(folder, dialogs_bytes=0, tools=46)
    writer = Writer(3)
    for number, sections in enumerate(SECTIONS):
        (folder / f"sources/docs/{number:02d}.md").write_text(writer.document(sections, most_answers=2), "utf-8")
    return write_request(folder, replicas=5)


def fastest(command: list[str], fresh: Path | None = None) -> Child:
    """Return the fastest of some runs of one command; `fresh`: a folder that is emptied before each."""
    runs = []
    for _ in range(ROUNDS):
        if fresh is not None:
            shutil.rmtree(fresh)
            fresh.mkdir()
        runs.append(run_child(command))
    return min(runs, key=lambda run: run.wall_s)


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        request = write_first_users(folder)
        ours = {
            BUILD: [sys.executable, "-m", "corpus_builder.build", str(request)],
            ENCODE: [sys.executable, "-m", "benchmarks.build_and_encode", str(request)],
        }
        found = {name: fastest(command, fresh=folder / "out") for name, command in ours.items()}
        samples = sum(1 for _ in (folder / "out/samples").open("rb"))
        peers = ["original", "trl"]
        for peer in peers:
            arguments = [peer, str(folder / "model"), str(folder / "out/samples")]
            found[peer] = fastest([trl_python(), "-m", "benchmarks.peer_prepare", *arguments])
    theirs = found[peers[-1]].wall_s
    return report(
        "first_users_size",
        about=(__doc__ or "").strip(),
        packages=("tokenizers", "trl", "transformers", "datasets", "torch"),
        claims=[Claim(f"{peers[-1]}'s time, of our build's", theirs / found[BUILD].wall_s, 6)],
        numbers=[
            ("samples", str(samples)),
            *((name, f"{run.wall_s:.2f} s, {run.peak_mb:.0f} MB at most") for name, run in found.items()),
            (f"{peers[-1]}'s time, of build and encoding", f"{theirs / found[ENCODE].wall_s:.1f}"),
        ],
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
