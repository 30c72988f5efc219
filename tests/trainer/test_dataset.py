"""The order of rows, how they are dealt to ranks, and padding."""

import numpy as np
import pytest

from corpus_builder.frame import IGNORE_INDEX
from trainer.dataset import FILLER, Collator, DealtOrder, Rows, epoch_order, make_loader
from trainer.encoded import EncodedSet
from trainer.packing import Packing, one_each

SAMPLES = EncodedSet(
    ids=np.array([1, 2, 3, 4, 5, 6], dtype=np.int32),
    is_trained=np.array([False, True, True, False, False, True]),
    starts=np.array([0, 3, 4, 6]),
    weights=np.array([1.0, 0.5, 2.0], dtype=np.float32),
    class_indices=np.array([0, 2, 2], dtype=np.int8),
)
NOTHING = IGNORE_INDEX


def dealt(rows: int, *, ranks: int, batch_size: int, epoch: int = 0) -> list[list[list[int]]]:
    """Return the micro-batches of every rank."""
    orders = [DealtOrder(rows, ranks=ranks, rank=rank, batch_size=batch_size, seed=1) for rank in range(ranks)]
    for order in orders:
        order.set_epoch(epoch)
    return [list(order) for order in orders]


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 22])
@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 1), (1, 4), (2, 2), (3, 1), (4, 2)])
def test_every_row_is_dealt_once_and_all_ranks_get_equally_many(rows, ranks, batch_size):
    by_rank = dealt(rows, ranks=ranks, batch_size=batch_size)
    assert len({len(batches) for batches in by_rank}) == 1
    given = [index for batches in by_rank for batch in batches for index in batch if index != FILLER]
    assert sorted(given) == list(range(rows))
    assert all(1 <= len(batch) <= batch_size for batches in by_rank for batch in batches)


@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 4), (2, 2), (4, 1), (2, 1)])
def test_a_step_takes_the_same_rows_however_they_are_cut(ranks, batch_size):
    micro_batches = 8 // (ranks * batch_size)
    by_rank = dealt(24, ranks=ranks, batch_size=batch_size)
    steps = [
        {index for batches in by_rank for batch in batches[at : at + micro_batches] for index in batch}
        for at in range(0, len(by_rank[0]), micro_batches)
    ]
    order = epoch_order(24, seed=1, epoch=0)
    assert steps == [set(order[at : at + 8]) for at in (0, 8, 16)]


def test_epochs_differ_and_repeat_exactly():
    assert dealt(22, ranks=1, batch_size=1) != dealt(22, ranks=1, batch_size=1, epoch=1)
    assert dealt(22, ranks=1, batch_size=1, epoch=1) == dealt(22, ranks=1, batch_size=1, epoch=1)


def test_length_is_the_number_of_micro_batches():
    assert len(DealtOrder(22, ranks=2, rank=0, batch_size=4, seed=1)) == 3


def test_padding_is_on_the_right_and_silent():
    rows = Rows(SAMPLES, one_each(3))
    batch = Collator(9, is_packed=False)([rows[0], rows[1]])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[NOTHING, 2, 3], [NOTHING] * 3]
    assert batch["weights"].tolist() == [[1.0] * 3, [0.5, 0.0, 0.0]]
    assert batch["class_indices"].tolist() == [[0] * 3, [2, 0, 0]]
    assert batch["taught"].tolist() == [1, 0, 0, 0]


def test_rows_of_one_length_need_no_mask():
    rows = Rows(SAMPLES, one_each(3))
    assert "attention_mask" not in Collator(9, is_packed=False)([rows[0]])


def test_packed_samples_are_told_apart_by_positions_and_never_by_a_mask():
    rows = Rows(SAMPLES, Packing(np.array([2, 0, 1]), np.array([0, 2, 3])))
    batch = Collator(9, is_packed=True)([rows[0], rows[1]])
    assert batch["input_ids"].tolist() == [[5, 6, 1, 2, 3], [4, 9, 9, 9, 9]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2], [0, 0, 1, 2, 3]]
    assert batch["labels"].tolist() == [[NOTHING, 6, NOTHING, 2, 3], [NOTHING] * 5]
    assert batch["weights"].tolist() == [[2.0, 2.0, 1.0, 1.0, 1.0], [0.5, 0.0, 0.0, 0.0, 0.0]]
    assert batch["taught"].tolist() == [1, 0, 1, 0]
    assert "attention_mask" not in batch


def test_the_filler_row_teaches_nothing():
    order = DealtOrder(1, ranks=2, rank=1, batch_size=1, seed=1)
    (batch,) = make_loader(Rows(SAMPLES, one_each(1)), order, collate=Collator(9, is_packed=False))
    assert batch["input_ids"].shape == (1, 2)
    assert (batch["labels"] == IGNORE_INDEX).all()
    assert (batch["weights"] == 0).all()
    assert batch["taught"].sum() == 0
