"""Our own whole way from documents to rows of ids, as a process.

python -m benchmarks.build_and_encode REQUEST.json
"""

from __future__ import annotations

import sys
from pathlib import Path

from corpus_builder.build import build
from corpus_builder.frame import load_frame
from corpus_builder.request import load_request
from trainer.encode import check_samples, encode_corpus, read_samples


def main(path: str) -> int:
    """Build, then encode and label every sample; fail if anything heavy was imported on the way."""
    request = load_request(Path(path))
    build(request)
    frame = load_frame(request.base_model_dir)
    samples = check_samples(request.samples, is_own=False)
    encode_corpus(read_samples(samples), frame, max_seq_len=request.max_seq_len)
    return int(bool({"torch", "transformers", "datasets"} & set(sys.modules)))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
