"""The first rows of a run, decoded, the trained part marked: for a person's eye. Side effects: writes one 0600 file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from corpus_builder.frame import IGNORE_INDEX
from trainer.encoded import EncodedSet

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OPEN, CLOSE = "⟦", "⟧"


def write_first_batch(corpus: EncodedSet, samples: Sequence[int], tokenizer: Tokenizer, path: Path) -> None:
    """Write `samples` of a corpus to `path`, each trained part between ⟦ and ⟧; only the owner can read it."""
    text = "\n----\n".join(_marked(corpus, sample, tokenizer) for sample in samples)
    partial = path.with_name(path.name + ".partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text + "\n")
    os.replace(partial, path)


def _marked(corpus: EncodedSet, sample: int, tokenizer: Tokenizer) -> str:
    parts = []
    tokens = zip(corpus.ids_of(sample).tolist(), corpus.labels_of(sample).tolist(), strict=True)
    for is_trained, pairs in groupby(tokens, key=lambda pair: pair[1] != IGNORE_INDEX):
        text = tokenizer.decode([token for token, _ in pairs], skip_special_tokens=False)
        parts.append(f"{OPEN}{text}{CLOSE}" if is_trained else text)
    return "".join(parts)
