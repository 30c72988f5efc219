"""The loss is one weighted mean over a step's trained tokens, however the step is cut into micro-batches."""

import pytest
import torch

from corpus_builder.frame import IGNORE_INDEX, load_frame
from corpus_builder.sample import CLASSES
from tests.tiny_run import tiny_samples
from trainer.dataset import FILLER, Collator, DealtOrder, Rows
from trainer.device import Place, Precision
from trainer.encode import Row, encode_corpus
from trainer.loss import LossMeter, WeightedTrainer, trained_positions
from trainer.model import load_model

pytestmark = pytest.mark.filterwarnings("default")  # transformers' own
ALONE = Place(rank=0, local_rank=0, ranks=1, is_launched=False)
FP32 = Precision("fp32", "cpu")
PAD = 0


@pytest.fixture(scope="module")
def rows(tiny_dir) -> list[Row]:
    return list(encode_corpus(tiny_samples(8), load_frame(tiny_dir), max_seq_len=256).rows)


def make_trainer(tiny_dir, rows, tmp_path, *, batch_size: int, accumulation: int, takes_positions: bool = True):
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulation,
        max_grad_norm=1e9, learning_rate=0.0, max_steps=1, save_strategy="no", report_to=[], use_cpu=True,
        disable_tqdm=True, logging_nan_inf_filter=False, remove_unused_columns=False,
    )  # fmt: skip
    trainer = WeightedTrainer(
        model=load_model(tiny_dir, precision=FP32, place=ALONE),
        args=arguments,
        rows=Rows(rows),
        order=DealtOrder(len(rows), ranks=1, rank=0, batch_size=batch_size, seed=1),
        pad_id=PAD,
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
    for row in rows:
        logits = model(input_ids=torch.tensor([row.ids])).logits[0, :-1].float()
        targets = torch.tensor(row.labels[1:])
        total = total + row.weight * torch.nn.functional.cross_entropy(
            logits, targets, ignore_index=IGNORE_INDEX, reduction="sum"
        )
        weight_sum += row.weight * row.trained
    (total / weight_sum).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "takes_positions"),
    [(8, 1, True), (4, 2, True), (1, 8, True), (3, 3, True), (4, 2, False)],
)
def test_gradient_is_the_weighted_mean_however_cut(tiny_dir, rows, tmp_path, batch_size, accumulation, takes_positions):
    trainer = make_trainer(
        tiny_dir, rows, tmp_path, batch_size=batch_size, accumulation=accumulation, takes_positions=takes_positions
    )
    got, wanted = step_gradients(trainer), reference_gradients(tiny_dir, rows)
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_micro_batch_without_trained_tokens_contributes_nothing(tiny_dir, rows, tmp_path):
    silent = Row(ids=rows[0].ids, labels=(IGNORE_INDEX,) * len(rows[0].ids), weight=1.0, class_index=0)
    got = step_gradients(make_trainer(tiny_dir, [*rows, silent], tmp_path, batch_size=1, accumulation=9))
    for name, gradient in reference_gradients(tiny_dir, rows).items():
        assert torch.isfinite(got[name]).all()
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6)


def test_the_report_is_the_mean_per_trained_token(tiny_dir, rows, tmp_path):
    trainer = make_trainer(tiny_dir, rows, tmp_path, batch_size=4, accumulation=2)
    trainer.train()
    report = trainer.meter.take()
    assert report["rows"] == len(rows)
    assert report["tokens"] == sum(row.trained for row in rows)
    of_class = {
        name: sum(r.weight * r.trained for r in rows if CLASSES[r.class_index] == name) for name in ("soul", "tool")
    }
    mean = sum(report[f"loss_{name}"] * weight for name, weight in of_class.items()) / sum(of_class.values())
    assert report["loss"] == pytest.approx(mean, rel=1e-6)
    assert trainer.state.log_history == [] or report["loss"] > 0
    assert trainer.meter.take() == {"tokens": 0.0, "rows": 0.0}


def test_the_meter_sees_a_loss_that_is_not_finite():
    meter = LossMeter(torch.device("cpu"))
    weights, classes = torch.ones(1, 2), torch.zeros(1, dtype=torch.int64)
    meter.add(torch.tensor([[1.0, 2.0]]), weights, classes)
    assert meter.is_finite
    meter.add(torch.tensor([[1.0, float("nan")]]), weights, classes)
    assert not meter.is_finite


def test_positions_are_those_before_a_learned_token():
    labels = torch.tensor([[IGNORE_INDEX, 5, IGNORE_INDEX, 6], [IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX, 7]])
    assert trained_positions(labels).tolist() == [0, 2]
    assert trained_positions(labels[:1, :1]).tolist() == [0]


def test_the_filler_row_has_loss_zero(tiny_dir, rows, tmp_path):
    trainer = make_trainer(tiny_dir, rows, tmp_path, batch_size=1, accumulation=1)
    loss = trainer.compute_loss(trainer.model, Collator(PAD)([Rows(rows)[FILLER]]))
    assert loss.item() == 0.0
