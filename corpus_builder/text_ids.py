"""The ids of many texts as two flat arrays. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class TextIds:
    """The ids of N texts, T in all: `ids` (T,) text after text; `lengths` (N,), ids of each."""

    ids: NDArray[np.int32]
    lengths: NDArray[np.int64]


def flatten(lists: Sequence[Sequence[int]]) -> TextIds:
    """Return the ids of N texts, a sequence each, as flat arrays."""
    lengths = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
    return TextIds(np.fromiter(chain.from_iterable(lists), dtype=np.int32, count=int(lengths.sum())), lengths)


def join(parts: Sequence[TextIds]) -> TextIds:
    """Return the texts of all parts, in order."""
    return TextIds(
        np.concatenate([np.empty(0, dtype=np.int32), *(part.ids for part in parts)]),
        np.concatenate([np.empty(0, dtype=np.int64), *(part.lengths for part in parts)]),
    )


def split(texts: TextIds) -> list[NDArray[np.int32]]:
    """Return the ids of each text, N arrays (t,): views, not copies."""
    ends = np.cumsum(texts.lengths).tolist()
    return [texts.ids[start:end] for start, end in pairwise([0, *ends])]
