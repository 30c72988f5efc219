"""What `corpus_build.py` compares with, as a process of its own: the tokenizer alone on texts that are in memory.

python -m benchmarks.raw_tokenizer TOKENIZER.JSON TEXTS.JSON     prints seconds, characters, tokens
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tokenizers import Tokenizer

AT_ONCE = 1_000


def main(tokenizer_path: str, texts_path: str) -> None:
    """Encode each text once, a thousand in a call, and take the ids."""
    tokenizer = Tokenizer.from_file(tokenizer_path)
    texts: list[str] = json.loads(Path(texts_path).read_text("utf-8"))
    tokenizer.encode_batch_fast(texts[:20])
    started = time.process_time()
    tokens = 0
    for at in range(0, len(texts), AT_ONCE):
        found = tokenizer.encode_batch_fast(texts[at : at + AT_ONCE], add_special_tokens=False)
        tokens += sum(len(encoding.ids) for encoding in found)
    print(json.dumps([time.process_time() - started, sum(map(len, texts)), tokens]))


if __name__ == "__main__":
    main(*sys.argv[1:])
