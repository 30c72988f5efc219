"""The loss is one weighted mean over a step's trained tokens, however the step is cut into micro-batches."""

import numpy as np
import pytest
import torch

from corpus_builder.frame import IGNORE_INDEX, load_frame
from corpus_builder.sample import CLASSES
from tests.tiny_run import tiny_samples
from trainer.dataset import FILLER, Collator, DealtOrder, Rows
from trainer.device import Place, Precision
from trainer.encode import encode_corpus
from trainer.encoded import EncodedSet
from trainer.loss import LossMeter, WeightedTrainer, trained_positions
from trainer.model import load_model
from trainer.packing import one_each, pack

pytestmark = pytest.mark.filterwarnings("default")  # transformers' own
ALONE = Place(rank=0, local_rank=0, ranks=1, is_launched=False)
FP32 = Precision("fp32", "cpu")
PAD = 0


@pytest.fixture(scope="module")
def rows(tiny_dir) -> EncodedSet:
    return encode_corpus(tiny_samples(8), load_frame(tiny_dir), max_seq_len=256).train


def make_trainer(
    tiny_dir, rows, tmp_path, *, batch_size: int, accumulation: int, takes_positions: bool = True, capacity: int = 0
):
    """Return a Trainer of one step; `capacity` > 0 packs rows of so many tokens."""
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulation,
        max_grad_norm=1e9, learning_rate=0.0, max_steps=1, save_strategy="no", report_to=[], use_cpu=True,
        disable_tqdm=True, logging_nan_inf_filter=False, remove_unused_columns=False,
    )  # fmt: skip
    packing = pack(rows.lengths, capacity) if capacity else one_each(len(rows))
    trainer = WeightedTrainer(
        model=load_model(tiny_dir, precision=FP32, place=ALONE),
        args=arguments,
        rows=Rows(rows, packing),
        order=DealtOrder(len(packing), ranks=1, rank=0, batch_size=batch_size, seed=1),
        collate=Collator(PAD, is_packed=capacity > 0),
    )
    trainer._takes_positions = takes_positions
    return trainer


def step_gradients(trainer) -> dict[str, torch.Tensor]:
    """Return the gradients of one optimizer step, by the Trainer's own loop."""
    kept: dict[str, torch.Tensor] = {}

    from transformers import TrainerCallback

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            kept.update({name: p.grad.clone() for name, p in model.named_parameters()})

    trainer.add_callback(Keep())
    trainer.train()
    return kept


def reference_gradients(tiny_dir, rows) -> dict[str, torch.Tensor]:
    """Return the gradients of sum(weight x CE) / sum(weight), row by row, in plain torch."""
    model = load_model(tiny_dir, precision=FP32, place=ALONE)
    total, weight_sum = torch.zeros(()), 0.0
    for sample, weight in enumerate(rows.weights.tolist()):
        logits = model(input_ids=torch.tensor([rows.ids_of(sample).tolist()])).logits[0, :-1].float()
        targets = torch.tensor(rows.labels_of(sample).tolist()[1:])
        total = total + weight * torch.nn.functional.cross_entropy(
            logits, targets, ignore_index=IGNORE_INDEX, reduction="sum"
        )
        weight_sum += weight * int((targets != IGNORE_INDEX).sum())
    (total / weight_sum).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "options"),
    [(8, 1, {}), (4, 2, {}), (1, 8, {}), (3, 3, {}), (4, 2, {"takes_positions": False}),
     (1, 8, {"capacity": 128}), (2, 4, {"capacity": 200})],
)  # fmt: skip
def test_gradient_is_the_weighted_mean_however_cut(tiny_dir, rows, tmp_path, batch_size, accumulation, options):
    trainer = make_trainer(tiny_dir, rows, tmp_path, batch_size=batch_size, accumulation=accumulation, **options)
    got, wanted = step_gradients(trainer), reference_gradients(tiny_dir, rows)
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_micro_batch_without_trained_tokens_contributes_nothing(tiny_dir, rows, tmp_path):
    first = rows.ids_of(0)
    with_silent = EncodedSet(
        ids=np.concatenate([rows.ids, first]),
        is_trained=np.concatenate([rows.is_trained, np.zeros(len(first), dtype=bool)]),
        starts=np.append(rows.starts, rows.tokens + len(first)),
        weights=np.append(rows.weights, np.float32(1)),
        class_indices=np.append(rows.class_indices, np.int8(0)),
    )
    got = step_gradients(make_trainer(tiny_dir, with_silent, tmp_path, batch_size=1, accumulation=9))
    for name, gradient in reference_gradients(tiny_dir, rows).items():
        assert torch.isfinite(got[name]).all()
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6)


def test_the_report_is_the_mean_per_trained_token(tiny_dir, rows, tmp_path):
    trainer = make_trainer(tiny_dir, rows, tmp_path, batch_size=4, accumulation=2)
    trainer.train()
    report = trainer.meter.take()
    assert report["rows"] == len(rows)
    assert report["tokens"] == rows.trained_tokens
    token_weights = np.repeat(rows.weights, rows.lengths) * rows.is_trained
    token_classes = np.repeat(rows.class_indices, rows.lengths)
    of_class = {name: token_weights[token_classes == CLASSES.index(name)].sum() for name in ("soul", "tool")}
    mean = sum(report[f"loss_{name}"] * weight for name, weight in of_class.items()) / sum(of_class.values())
    assert report["loss"] == pytest.approx(mean, rel=1e-6)
    assert trainer.state.log_history == [] or report["loss"] > 0
    assert trainer.meter.take() == {"tokens": 0.0, "rows": 0.0}


def test_the_meter_sees_a_loss_that_is_not_finite():
    meter = LossMeter(torch.device("cpu"))
    weights, classes = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    meter.add(torch.tensor([1.0, 2.0]), weights, classes, torch.zeros(len(CLASSES)))
    assert meter.is_finite
    meter.add(torch.tensor([1.0, float("nan")]), weights, classes, torch.zeros(len(CLASSES)))
    assert not meter.is_finite


def test_positions_are_those_before_a_learned_token():
    labels = torch.tensor([[IGNORE_INDEX, 5, IGNORE_INDEX, 6], [IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX, 7]])
    assert trained_positions(labels).tolist() == [0, 2]
    assert trained_positions(labels[:1, :1]).tolist() == [0]


def test_the_filler_row_has_loss_zero(tiny_dir, rows, tmp_path):
    trainer = make_trainer(tiny_dir, rows, tmp_path, batch_size=1, accumulation=1)
    loss = trainer.compute_loss(trainer.model, Collator(PAD, is_packed=False)([Rows(rows, one_each(8))[FILLER]]))
    assert loss.item() == 0.0
