"""Samples -> rows: which samples share a row of `max_seq_len` tokens. Pure, but that `why_no_packing` reads the
installed transformers.

Best fit decreasing over the whole corpus: the longest sample first, each into the fullest row that still takes it. At
the lengths of chats it stays within one row of the bound `ceil(tokens / capacity)`.

Samples of a row must not see each other. Position ids that begin anew tell a model where a sample begins, and not
every model listens: `why_no_packing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Types (`model_type` of config.json) that keep packed samples apart, each proven by tests/trainer/test_packing.py.
#: OPT and MiniMax were tried and don't; state-space and linear-attention models carry their state on.
PROVEN_TYPES = frozenset(
    {
        "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4",
        "granite", "helium", "hunyuan_v1_dense", "llama", "ministral", "mistral", "mixtral", "olmo", "olmo2",
        "olmo3", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm",
        "starcoder2",
    }
)  # fmt: skip
#: Kinds of layers (`layer_types` of config.json) whose attention obeys the mask between samples.
PROVEN_LAYERS = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """R rows of N samples.

    Attributes:
        samples: (N,) sample indices, row after row.
        starts: (R + 1,) where each row begins in `samples`.
    """

    samples: NDArray[np.int64]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, index: int) -> NDArray[np.int64]:
        """Return the samples of a row, in their order."""
        return self.samples[self.starts[index] : self.starts[index + 1]]

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return (self.row(index) for index in range(len(self)))


def one_each(samples: int) -> Packing:
    """Return rows of one sample each."""
    return Packing(np.arange(samples, dtype=np.int64), np.arange(samples + 1, dtype=np.int64))


def why_no_packing(model_config: Mapping[str, Any]) -> str | None:
    """Return why samples of one row would see each other on a model, None where they are kept apart.

    Args:
        model_config: What its config.json says.
    """
    model_type = model_config.get("model_type")
    if model_type not in PROVEN_TYPES:
        return f"models of type {model_type} are not proven to keep packed samples apart"
    other_layers = sorted(set(model_config.get("layer_types") or ()) - PROVEN_LAYERS)
    if other_layers:
        return f"layers of type {', '.join(other_layers)} are not proven to keep packed samples apart"
    if not _tells_samples_by_positions():
        return "this version of transformers does not tell packed samples apart by their positions"
    return None


def _tells_samples_by_positions() -> bool:
    """Return whether the installed transformers builds its mask from positions; read, for importing takes seconds."""
    package = find_spec("transformers")
    if package is None or package.origin is None:
        return False
    masking = Path(package.origin).parent / "masking_utils.py"
    return masking.is_file() and "def find_packed_sequence_indices" in masking.read_text("utf-8")


def pack(lengths: NDArray[np.int64], capacity: int) -> Packing:
    """Return rows of at most `capacity` tokens.

    Args:
        lengths: (N,) tokens of each sample, 1 to `capacity`.

    Raises:
        ValueError: a sample is empty or longer than a row.
    """
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= capacity:
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()} do not fit into 1..{capacity}")
    row_of = np.empty(len(lengths), dtype=np.int64)
    rows = 0
    free_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows by how many tokens they still take
    free_sizes = 0  # bit n is set where free_rows[n] is not empty
    order = np.argsort(-lengths, kind="stable")
    for sample, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = free_sizes >> length
        if fitting:
            size = length + (fitting & -fitting).bit_length() - 1
            row = free_rows[size].pop()
            if not free_rows[size]:
                free_sizes ^= 1 << size
        else:
            size, row, rows = capacity, rows, rows + 1
        row_of[sample] = row
        if size > length:
            free_rows[size - length].append(row)
            free_sizes |= 1 << (size - length)
    starts = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(row_of, minlength=rows), out=starts[1:])
    return Packing(np.argsort(row_of, kind="stable"), starts)
