"""The whole build, from files to files, against the raw tokenizer on the very texts that came out (each once).

The build is a process: start, imports, loading the tokenizer, reading, splitting, counting, checking, writing. The raw
side has its texts in memory and its tokenizer loaded, and its ids are taken. Both in seconds of one processor. Checks
off: target 0.8; on: 0.5. Qwen's real vocabulary.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import ROOT, Claim, report, run_child
from benchmarks.world import CHECKS_OFF, contents_of, write_request, write_world

ROUNDS = 3


def build(folder: Path, request: Path) -> float:
    """Return the seconds of one build from nothing."""
    shutil.rmtree(folder / request.stem)
    (folder / request.stem).mkdir()
    return run_child([sys.executable, "-m", "corpus_builder.build", str(request)], threads=1).cpu_s


def raw(folder: Path, texts: Path) -> tuple[float, int, int]:
    """Return the seconds of the raw tokenizer, and how many characters and tokens the texts have."""
    command = [sys.executable, "-m", "benchmarks.raw_tokenizer", str(folder / "model/tokenizer.json"), str(texts)]
    environment = {**os.environ, "RAYON_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    seconds, characters, tokens = json.loads(done.stdout)
    return seconds, characters, tokens


def compare(folder: Path, name: str) -> tuple[dict[str, float], list[tuple[str, str]]]:
    """Return both ratios for the world in `folder`, and the numbers behind them."""
    off, on = write_request(folder, checks=CHECKS_OFF, out="off"), write_request(folder, out="on")
    build(folder, off)
    texts = folder / "texts.json"
    texts.write_text(json.dumps(list(dict.fromkeys(contents_of(folder / "off/samples")))), "utf-8")
    rounds = [(raw(folder, texts), build(folder, off), build(folder, on)) for _ in range(ROUNDS)]
    (raw_s, characters, tokens), off_s, on_s = (min(column) for column in zip(*rounds, strict=True))
    numbers = [
        (f"{name}: texts", f"{characters:,} characters, {tokens:,} tokens"),
        (f"{name}: raw tokenizer", f"{raw_s:.2f} s, {tokens / raw_s / 1e6:.2f} Mtok/s"),
        (f"{name}: build, checks off", f"{off_s:.2f} s, ratio {raw_s / off_s:.2f}"),
        (f"{name}: build, checks on", f"{on_s:.2f} s, ratio {raw_s / on_s:.2f}"),
    ]
    return {"off": raw_s / off_s, "on": raw_s / on_s}, numbers


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        mixed, documents = Path(scratch, "mixed"), Path(scratch, "documents")
        write_world(mixed, dialogs_bytes=24_000_000, documents=24, tools=1_000)
        write_world(documents, dialogs_bytes=0, documents=150)
        found, numbers = compare(mixed, "corpus")
        claims = [
            Claim("checks off", found["off"], 0.8),
            Claim("checks on", found["on"], 0.5),
        ]
        numbers += compare(documents, "documents alone")[1]
    about = (
        "24 MB of dialogs, 24 documents, 1,000 lines of tool JSONL; windows of 4096. Of the documents nearly every one "
        "is longer than a window; its text is encoded twice, once to find the borders. A corpus of a megabyte or more "
        "is counted by tiktoken, "
        "character by character proved equal (`corpus_builder/fast_tokens.py`)."
    )
    return report(
        "corpus_build",
        about=about,
        packages=("tokenizers", "tiktoken", "pydantic", "numpy"),
        claims=claims,
        numbers=numbers,
    )


if __name__ == "__main__":
    raise SystemExit(main())
