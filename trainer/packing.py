"""Samples -> rows: which samples share a row of `max_seq_len` tokens. Pure.

Best fit decreasing over the whole corpus: the longest sample first, each into the fullest row that still takes it. At
the lengths of chats it stays within one row of the bound `ceil(tokens / capacity)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
