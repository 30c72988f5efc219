"""One side of `prepare.py`, as a process: the raw tokenizer, or our preparation.

    python -m benchmarks.prepare_side raw|tokenizers|tiktoken|whole MODEL SAMPLES THREADS     prints JSON

`raw` has the rendered conversations in memory and takes the ids that `encode_batch_fast` gives. Ours begins with the
samples' file and ends with the proved arrays, mapped from their file, and packed. What encodes is loaded beforehand on
both sides; what our second engine costs to build is told by itself (`load_s`). That it is proved on every character
and on a sample of the texts is part of the preparation. `whole`: ours once, engine and all, as it chooses by itself; it
fails if anything heavy was imported.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

WINDOW = 16_384  # the longest sample fits, so no token is lost
AT_ONCE = 1_000
ROUNDS = 2
HEAVY = {"torch", "transformers", "datasets", "pandas"}


def rendered(samples: Path) -> list[str]:
    """Return every conversation as ChatML."""
    with samples.open("rb") as file:
        lines = [json.loads(line)["messages"] for line in file]
    return [
        "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in messages) for messages in lines
    ]


def raw(model: Path, samples: Path, threads: int) -> Callable[[], Callable[[], int]]:
    """Return what gives what encodes all conversations and counts their ids."""
    from tokenizers import Tokenizer

    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = rendered(samples)

    def encode() -> int:
        parts = (texts[at : at + AT_ONCE] for at in range(0, len(texts), AT_ONCE))
        return sum(
            len(one.ids) for part in parts for one in tokenizer.encode_batch_fast(part, add_special_tokens=False)
        )

    return lambda: encode


def ours(engine: str, model: Path, samples: Path, threads: int) -> Callable[[], Callable[[], int]]:
    """Return what loads what prepares the samples and counts the tokens that are in rows (none is left out)."""
    from corpus_builder.fast_tokens import FastTokens
    from corpus_builder.frame import WORTH_IT, load_frame
    from trainer.corpus_cache import open_corpus
    from trainer.device import Place
    from trainer.encode import check_samples
    from trainer.packing import pack
    from trainer.voice import Voice

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    worth_it = {"tiktoken": -1, "tokenizers": sys.maxsize, "whole": WORTH_IT}[engine]
    place = Place(0, 0, 1, False)
    frame = load_frame(model)

    def load() -> Callable[[], int]:
        tokens = FastTokens(frame, worth_it=worth_it, threads=threads)
        tokens.encode_texts([])  # builds the engine, if it is wanted whatever the texts
        return lambda: prepare(tokens)

    def prepare(tokens: FastTokens) -> int:
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
            corpus = open_corpus(
                check_samples(samples, is_own=False), frame, Path(folder), tokens=tokens, max_seq_len=WINDOW,
                place=place, voice=Voice(place),
            )  # fmt: skip
            assert (engine in (corpus.engine, "whole"), corpus.left_out) == (True, ())
            lengths = corpus.train.lengths
            return int(lengths[pack(lengths, WINDOW).samples].sum())

    return load


def main(side: str, model: str, samples: str, threads: str) -> None:
    places = Path(model), Path(samples), int(threads)
    load = raw(*places) if side == "raw" else ours(side, *places)
    best_wall_s = best_cpu_s = load_s = float("inf")
    for _ in range(1 if side == "whole" else ROUNDS):
        started_s = time.process_time()
        prepare = load()
        load_s = min(load_s, time.process_time() - started_s)
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        tokens = prepare()
        best_wall_s = min(best_wall_s, time.perf_counter() - wall_s)
        best_cpu_s = min(best_cpu_s, time.process_time() - cpu_s)
    assert not HEAVY & set(sys.modules), HEAVY & set(sys.modules)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    took = {"wall_s": best_wall_s, "cpu_s": best_cpu_s, "load_s": load_s, "tokens": tokens, "peak_mb": peak_mb}
    print(json.dumps(took))


if __name__ == "__main__":
    main(*sys.argv[1:])
