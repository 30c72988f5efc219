"""Rows -> the micro-batches of one rank: order, dealing, padding. Pure, after torch is imported.

One owner decides which rank sees which row: the order of an epoch follows from seed and epoch alone, an optimizer
step takes the next rows of that order, whatever the ranks, the micro-batch or the accumulation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from corpus_builder.frame import IGNORE_INDEX
from trainer.encode import Row

Batch = dict[str, Tensor]
#: Index of the row that teaches nothing: given to a rank for which an epoch's last micro-batch has no row left.
FILLER = -1


class Rows(Dataset[Row]):
    """The rows of a run; `FILLER` is a row of two tokens without label or weight."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._filler = Row(ids=rows[0].ids[:2], labels=(IGNORE_INDEX,) * 2, weight=0.0, class_index=0)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._filler if index == FILLER else self._rows[index]


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


def make_loader(rows: Rows, order: DealtOrder, *, pad_id: int) -> DataLoader[Row]:
    """Return the loader of one rank; it works in this process, so nothing forks after tokenizer threads started."""
    return DataLoader(rows, batch_sampler=order, collate_fn=Collator(pad_id), num_workers=0)


class Collator:
    """Pads rows on the right into one batch."""

    def __init__(self, pad_id: int) -> None:
        self._pad_id = pad_id

    def __call__(self, rows: Sequence[Row]) -> Batch:
        """Return one batch.

        Returns:
            `input_ids`, `attention_mask`, `labels`, int64 (B, T), T the longest row; `weights` float32 (B,) and
            `class_indices` int64 (B,); padding has label IGNORE_INDEX and no attention.
        """
        longest = max(len(row.ids) for row in rows)
        return {
            "input_ids": _padded([row.ids for row in rows], longest, self._pad_id),
            "attention_mask": _padded([(1,) * len(row.ids) for row in rows], longest, 0),
            "labels": _padded([row.labels for row in rows], longest, IGNORE_INDEX),
            "weights": torch.tensor([row.weight for row in rows], dtype=torch.float32),
            "class_indices": torch.tensor([row.class_index for row in rows], dtype=torch.int64),
        }


def _padded(parts: Sequence[Sequence[int]], length: int, fill: int) -> Tensor:
    return torch.tensor([[*part, *(fill,) * (length - len(part))] for part in parts], dtype=torch.int64)
