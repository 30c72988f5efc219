"""Samples as token ids: the flat arrays that encoding makes, packing cuts into rows and training reads. Pure.

Arrays may be memory-mapped and are never written to.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from corpus_builder.frame import IGNORE_INDEX


@dataclass(frozen=True, slots=True, eq=False)
class EncodedSet:
    """N samples of one split, T tokens in all.

    Attributes:
        ids: (T,) token ids, sample after sample.
        is_trained: (T,) whether a token is learned; never the first one of a sample, which nothing stands before.
        starts: (N + 1,) where each sample begins in `ids`; the last entry is T.
        weights: (N,) what multiplies the loss of a sample's tokens.
        class_indices: (N,) counted in `corpus_builder.sample.CLASSES`.
    """

    ids: NDArray[np.int32]
    is_trained: NDArray[np.bool_]
    starts: NDArray[np.int64]
    weights: NDArray[np.float32]
    class_indices: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(N,) tokens of each sample."""
        return np.diff(self.starts)

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return int(self.starts[-1])

    @property
    def trained_tokens(self) -> int:
        """Tokens that are learned."""
        return int(np.count_nonzero(self.is_trained))

    def span(self, sample: int) -> slice:
        """Return where the tokens of a sample lie."""
        return slice(int(self.starts[sample]), int(self.starts[sample + 1]))

    def ids_of(self, sample: int) -> NDArray[np.int32]:
        """Return the ids (t,) of a sample."""
        return self.ids[self.span(sample)]

    def labels_of(self, sample: int) -> NDArray[np.int32]:
        """Return the labels (t,) of a sample, IGNORE_INDEX where nothing is learned. Not shifted."""
        here = self.span(sample)
        return np.where(self.is_trained[here], self.ids[here], np.int32(IGNORE_INDEX))


@dataclass(frozen=True, slots=True, eq=False)
class EncodedCorpus:
    """What will be trained and what is held out.

    Attributes:
        left_out: (sample id, reason) of every sample that is in neither set.
        read: Samples of the file.
        engine: What encoded: `tokenizers` or `tiktoken`.
    """

    train: EncodedSet
    validation: EncodedSet
    left_out: tuple[tuple[str, str], ...]
    read: int
    engine: str
