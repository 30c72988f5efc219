"""Packing at 4096 tokens: rows against the fewest that could hold the tokens, time against that of the preparation.

Chats of 1 to 8 rounds with Qwen's vocabulary, read from a file, encoded and labelled as in a training; then packed.
The bound is `ceil(tokens / 4096)`, which no packing can beat. Lengths of 20,000 chats are drawn besides, with the
medians and tails of chats, for a corpus of ten million tokens.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.generated import Writer
from benchmarks.measure import Claim, best_of, report
from corpus_builder.frame import load_frame
from corpus_builder.sample import Message, Sample, format_sample
from tests.tokenizers_real import QWEN_TEMPLATE, qwen_tokenizer_json, write_tokenizer_folder
from trainer.encode import check_samples, encode_corpus, read_samples
from trainer.packing import pack

CAPACITY = 4096
CHATS, DRAWN = 3_000, 20_000
ROUNDS = 3


def write_chats(path: Path) -> None:
    """Write samples of 1 to 8 rounds."""
    writer, draw = Writer(8), random.Random(8)
    with path.open("w", encoding="utf-8") as file:
        for number in range(CHATS):
            rounds = min(8, int(draw.expovariate(0.9)) + 1)
            turns = [
                message
                for _ in range(rounds)
                for message in (
                    Message("user", writer.paragraph(1, 3)),
                    Message("assistant", writer.answer()),
                )
            ]
            sample = Sample(messages=tuple(turns), source=f"chat:{number}", sample_class="soul", weight=1.0)
            file.write(format_sample(sample) + "\n")


def drawn_lengths(seed: int) -> NDArray[np.int64]:
    """Return lengths whose logarithm is normal, median 350 and a tenth above 1,080, none over the window."""
    lengths = np.random.default_rng(seed).lognormal(np.log(350), 0.88, DRAWN)
    return np.clip(lengths, 10, CAPACITY).astype(np.int64)


def bound(lengths: NDArray[np.int64]) -> int:
    """Return the fewest rows that hold so many tokens."""
    return -(-int(lengths.sum()) // CAPACITY)


def over_allowed(lengths: NDArray[np.int64]) -> float:
    """Return the rows made, of those that are allowed: the bound and one more, or 1 % more."""
    fewest = bound(lengths)
    return len(pack(lengths, CAPACITY)) / (fewest + max(1, fewest // 100))


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_tokenizer_folder(folder, qwen_tokenizer_json(), QWEN_TEMPLATE)
        write_chats(folder / "samples.jsonl")
        frame = load_frame(folder)

        def prepare() -> NDArray[np.int64]:
            file = check_samples(folder / "samples.jsonl", is_own=False)
            return encode_corpus(read_samples(file), frame, max_seq_len=8 * CAPACITY).train.lengths

        lengths = prepare()
        lengths = lengths[lengths <= CAPACITY]
        seconds = best_of({"prepare": prepare, "pack": lambda: pack(lengths, CAPACITY)}, ROUNDS)
    drawn = drawn_lengths(1)
    drawn_s = best_of({"pack": lambda: pack(drawn, CAPACITY)}, ROUNDS)["pack"]
    return report(
        "packing",
        about=(__doc__ or "").strip(),
        packages=("numpy", "tokenizers", "tiktoken"),
        claims=[
            Claim("rows of the chats, of those allowed", over_allowed(lengths), 1, at_most=True),
            Claim("rows of the drawn lengths, of those allowed", over_allowed(drawn), 1, at_most=True),
            Claim("time of packing, of preparing", seconds["pack"] / seconds["prepare"], 0.02, at_most=True),
        ],
        numbers=[
            ("chats", f"{len(lengths):,}, {lengths.sum():,} tokens, median {np.median(lengths):.0f}"),
            ("rows, and the bound", f"{len(pack(lengths, CAPACITY))}, {bound(lengths)}"),
            ("preparing", f"{seconds['prepare']:.2f} s"),
            ("packing", f"{1000 * seconds['pack']:.1f} ms"),
            ("drawn lengths", f"{DRAWN:,}, {drawn.sum():,} tokens, median {np.median(drawn):.0f}"),
            ("rows, and the bound", f"{len(pack(drawn, CAPACITY))}, {bound(drawn)}"),
            ("packing", f"{1000 * drawn_s:.1f} ms"),
        ],
    )


if __name__ == "__main__":
    raise SystemExit(main())
