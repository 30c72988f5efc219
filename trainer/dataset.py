"""Rows -> the micro-batches of one rank: order, dealing, padding. Pure, after torch is imported.

One owner decides which rank sees which row: the order of an epoch follows from seed and epoch alone, an optimizer
step takes the next rows of that order, whatever the ranks, the micro-batch or the accumulation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from corpus_builder.frame import IGNORE_INDEX
from corpus_builder.sample import CLASSES
from trainer.encoded import EncodedSet
from trainer.packing import Packing

#: One micro-batch of B rows, T the longest; what is in it says `Collator`.
Batch = dict[str, Tensor]
#: Index of the row that teaches nothing: given to a rank for which an epoch's last micro-batch has no row left.
FILLER = -1


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One row of T tokens, samples one after another.

    `ids`, `labels` (IGNORE_INDEX where nothing is learned, not shifted), `weights` and `class_indices` of each
    token's sample, `positions` from 0 in each sample: all (T,). `taught`: samples of each class that teach something.
    """

    ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    weights: NDArray[np.float32]
    class_indices: NDArray[np.int64]
    positions: NDArray[np.int64]
    taught: NDArray[np.int64]


class Rows(Dataset[Row]):
    """The rows of one split; `FILLER` is a row of two tokens without label or weight."""

    def __init__(self, samples: EncodedSet, packing: Packing) -> None:
        self._samples, self._packing = samples, packing

    def __len__(self) -> int:
        return len(self._packing)

    def __getitem__(self, index: int) -> Row:
        if index == FILLER:
            return self._filler()
        members = self._packing.row(index)
        of_each = [self._samples.labels_of(sample) for sample in members]
        lengths = np.array([len(labels) for labels in of_each])
        classes = self._samples.class_indices[members].astype(np.int64)
        taught = [bool((labels != IGNORE_INDEX).any()) for labels in of_each]
        return Row(
            ids=np.concatenate([self._samples.ids_of(sample) for sample in members]).astype(np.int64),
            labels=np.concatenate(of_each).astype(np.int64),
            weights=np.repeat(self._samples.weights[members], lengths),
            class_indices=np.repeat(classes, lengths),
            positions=np.concatenate([np.arange(length) for length in lengths]),
            taught=np.bincount(classes[taught], minlength=len(CLASSES)),
        )

    def _filler(self) -> Row:
        nothing = np.zeros(2, dtype=np.int64)
        return Row(
            ids=self._samples.ids[:2].astype(np.int64),
            labels=np.full(2, IGNORE_INDEX),
            weights=np.zeros(2, dtype=np.float32),
            class_indices=nothing,
            positions=np.arange(2),
            taught=np.zeros(len(CLASSES), dtype=np.int64),
        )


class DealtOrder(Sampler[list[int]]):
    """The row indices of each micro-batch of one rank, for the epoch that `set_epoch` named."""

    def __init__(self, rows: int, *, ranks: int, rank: int, batch_size: int, seed: int) -> None:
        self._rows, self._ranks, self._rank = rows, ranks, rank
        self._batch_size, self._seed = batch_size, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is."""
        self._epoch = epoch

    def __len__(self) -> int:
        return -(-self._rows // (self._ranks * self._batch_size))

    def __iter__(self) -> Iterator[list[int]]:
        order = epoch_order(self._rows, seed=self._seed, epoch=self._epoch)
        block_size = self._ranks * self._batch_size
        for start in range(0, self._rows, block_size):
            yield order[start : start + block_size][self._rank :: self._ranks] or [FILLER]


def epoch_order(rows: int, *, seed: int, epoch: int) -> list[int]:
    """Return the row indices in the order of one epoch."""
    order = list(range(rows))
    random.Random(f"{seed} {epoch}").shuffle(order)
    return order


def make_loader(rows: Rows, order: Sampler[list[int]], *, collate: Collator) -> DataLoader[Row]:
    """Return the loader of one rank; it works in this process, so nothing forks after tokenizer threads started."""
    return DataLoader(rows, batch_sampler=order, collate_fn=collate, num_workers=0)


class Collator:
    """Puts rows into one batch, padded on the right.

    Where rows are packed, samples are told apart by `position_ids` alone, which begin anew in each sample, and the
    padding is a sample of its own. **No attention mask beside them**: transformers 5 then drops its mask between
    samples without a word, even if the mask is all ones.

    Flat: the rows of a packed batch lie one after another in a single row without padding, as FlashAttention wants
    them (its kernels for samples of unequal lengths are used for batches of one row only).
    """

    def __init__(self, pad_id: int, *, is_packed: bool, is_flat: bool = False) -> None:
        if is_flat and not is_packed:
            raise ValueError("flat rows are told apart by their positions: they must be packed")
        self._pad_id, self._is_packed, self._is_flat = pad_id, is_packed, is_flat

    def __call__(self, rows: Sequence[Row]) -> Batch:
        """Return one batch.

        Returns:
            `input_ids`, `labels`, `class_indices` int64 (B, T) and `weights` float32 (B, T), T the longest row;
            padding has label IGNORE_INDEX and weight 0. `taught` int64 (classes,). Packed: `position_ids`
            int64 (B, T); else, if there is padding, `attention_mask` int64 (B, T). Flat: B is 1, T all tokens.
        """
        if self._is_flat:
            rows = [_joined(rows)]
        longest = max(len(row.ids) for row in rows)
        batch = {
            "input_ids": _padded([row.ids for row in rows], longest, self._pad_id),
            "labels": _padded([row.labels for row in rows], longest, IGNORE_INDEX),
            "weights": _padded([row.weights for row in rows], longest, 0.0),
            "class_indices": _padded([row.class_indices for row in rows], longest, 0),
            "taught": torch.from_numpy(np.sum([row.taught for row in rows], axis=0)),
        }
        if self._is_packed:
            batch["position_ids"] = torch.stack(
                [torch.from_numpy(np.append(row.positions, np.arange(longest - len(row.ids)))) for row in rows]
            )
        elif any(len(row.ids) < longest for row in rows):
            batch["attention_mask"] = _padded([np.ones_like(row.ids) for row in rows], longest, 0)
        return batch


def _joined(rows: Sequence[Row]) -> Row:
    """Return all rows as one; the first token of a row is never learned, so no row predicts into the next."""
    return Row(
        ids=np.concatenate([row.ids for row in rows]),
        labels=np.concatenate([row.labels for row in rows]),
        weights=np.concatenate([row.weights for row in rows]),
        class_indices=np.concatenate([row.class_indices for row in rows]),
        positions=np.concatenate([row.positions for row in rows]),
        taught=np.sum([row.taught for row in rows], axis=0),
    )


def _padded(parts: Sequence[NDArray[Any]], length: int, fill: float) -> Tensor:
    whole = np.full((len(parts), length), fill, dtype=parts[0].dtype)
    for line, part in zip(whole, parts, strict=True):
        line[: len(part)] = part
    return torch.from_numpy(whole)
