"""The loss is one weighted mean over a step's trained tokens, however the step is cut into micro-batches."""

from itertools import islice

import numpy as np
import pytest
import torch

from corpus_builder.frame import IGNORE_INDEX, load_frame
from corpus_builder.sample import CLASSES
from tests.tiny_run import tiny_samples
from trainer import head_loss
from trainer.dataset import FILLER, Collator, DealtOrder, Rows
from trainer.encode import encode_corpus
from trainer.encoded import EncodedSet
from trainer.loss import LossMeter, WeightedTrainer, score_tokens, token_losses
from trainer.model import load_weights
from trainer.packing import one_each, pack

pytestmark = pytest.mark.filterwarnings("default")  # transformers' own
PAD = 0


@pytest.fixture(scope="module")
def rows(tiny_dir) -> EncodedSet:
    return encode_corpus(tiny_samples(8), load_frame(tiny_dir), max_seq_len=256).train


def make_trainer(tiny_dir, rows, tmp_path, *, batch_size: int, accumulation: int, capacity: int = 0, **options):
    """Return a Trainer of one step; `capacity` > 0 packs rows of so many tokens."""
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulation,
        max_grad_norm=1e9, save_strategy="no", report_to=[], use_cpu=True,
        disable_tqdm=True, logging_nan_inf_filter=False, remove_unused_columns=False,
        **{"learning_rate": 0.0, "max_steps": 1} | options,
    )  # fmt: skip
    packing = pack(rows.lengths, capacity) if capacity else one_each(len(rows))
    return WeightedTrainer(
        model=load_weights(tiny_dir, dtype=torch.float32),
        args=arguments,
        rows=Rows(rows, packing),
        order=DealtOrder(len(packing), ranks=1, rank=0, batch_size=batch_size, seed=1),
        collate=Collator(PAD, is_packed=capacity > 0),
    )


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
    model = load_weights(tiny_dir, dtype=torch.float32)
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
    [(8, 1, {}), (4, 2, {}), (1, 8, {}), (3, 3, {}), (1, 8, {"capacity": 128}), (2, 4, {"capacity": 200})],
)  # fmt: skip
def test_gradient_is_the_weighted_mean_however_cut(tiny_dir, rows, tmp_path, batch_size, accumulation, options):
    trainer = make_trainer(tiny_dir, rows, tmp_path, batch_size=batch_size, accumulation=accumulation, **options)
    got, wanted = step_gradients(trainer), reference_gradients(tiny_dir, rows)
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.fixture
def no_plain_heads(monkeypatch):
    """Have every model treated as one that changes its logits behind the head."""
    monkeypatch.setattr(head_loss, "PLAIN_HEADS", frozenset())


@pytest.mark.parametrize(("batch_size", "accumulation"), [(4, 2), (1, 8)])
def test_whole_logits_give_the_same_gradient(no_plain_heads, tiny_dir, rows, tmp_path, batch_size, accumulation):
    trainer = make_trainer(tiny_dir, rows, tmp_path, batch_size=batch_size, accumulation=accumulation)
    assert head_loss.head_loss_of(trainer.model) is None
    got = step_gradients(trainer)
    for name, gradient in reference_gradients(tiny_dir, rows).items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6)


def test_whole_logits_of_a_silent_batch_contribute_nothing(no_plain_heads, tiny_dir, rows):
    model = load_weights(tiny_dir, dtype=torch.float32)
    scores = score_tokens(model, Collator(PAD, is_packed=False)([Rows(rows, one_each(8))[FILLER]]))
    scores.total.backward()
    assert scores.total.item() == 0.0
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


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


def test_each_reader_of_the_meter_takes_for_itself():
    meter = LossMeter(torch.device("cpu"))
    weights, classes, taught = torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.tensor([1] + [0] * 3)
    meter.add(torch.tensor([1.0, 2.0]), weights, classes, taught[: len(CLASSES)])
    first = meter.take(LossMeter.TRACKERS)
    meter.add(torch.tensor([3.0, 3.0]), weights, classes, taught[: len(CLASSES)])
    assert first["loss"] == 1.5
    assert meter.take(LossMeter.TRACKERS)["loss"] == 3.0
    assert meter.take()["loss"] == 2.25


def test_the_log_holds_the_mean_per_trained_token(tiny_dir, rows, tmp_path):
    """Two steps of very unequal rows: the mean over tokens is not the mean over steps, which Hugging Face logs."""
    trainer = make_trainer(
        tiny_dir, rows, tmp_path, batch_size=1, accumulation=1, logging_steps=2, learning_rate=0.0, max_steps=2
    )
    trainer.train()
    report, logged = trainer.meter.take(), trainer.state.log_history[0]
    steps = [score_tokens(trainer.model, batch) for batch in islice(trainer.get_train_dataloader(), 2)]
    mean_of_steps = sum((step.total / step.weights.sum()).item() for step in steps) / 2
    assert logged["loss"] == report["loss"]
    assert logged["loss"] == pytest.approx(
        sum(step.total.item() for step in steps) / sum(step.weights.sum().item() for step in steps), rel=1e-6
    )
    assert abs(logged["loss"] - mean_of_steps) > 1e-4
    assert {"loss_raw", "tok", "grad_norm", "learning_rate", "epoch"} <= logged.keys()
    assert {key for key in logged if key.startswith("loss_")} == {key for key in report if key.startswith("loss_")}


def test_a_log_without_a_trained_token_says_nan_and_not_zero(tiny_dir, rows, tmp_path):
    trainer = make_trainer(tiny_dir, rows, tmp_path, batch_size=1, accumulation=1)
    trainer.log({"loss": 0.0})
    assert np.isnan(trainer.state.log_history[-1]["loss"])


def test_weights_keep_their_32_bits_under_deepspeed(tiny_dir, rows, tmp_path):
    """transformers casts what is real in a batch to the model's type: 0.3 would no longer be what the sum counted."""
    trainer = make_trainer(tiny_dir, rows, tmp_path, batch_size=1, accumulation=1)
    trainer.is_deepspeed_enabled = True
    weights = torch.tensor([[0.3, 0.7]])
    assert trainer._prepare_inputs({"weights": weights})["weights"].tolist() == weights.tolist()


def test_token_losses_are_those_of_plain_logits(tiny_dir, rows):
    model = load_weights(tiny_dir, dtype=torch.float32)
    batch = Collator(PAD, is_packed=False)([Rows(rows, one_each(8))[index] for index in range(8)])
    losses, weights, class_indices = token_losses(model, batch)
    assert not losses.requires_grad
    wanted = []
    for sample in range(8):
        logits = model(input_ids=torch.tensor([rows.ids_of(sample).tolist()])).logits[0, :-1]
        targets = torch.tensor(rows.labels_of(sample).tolist()[1:])
        of_tokens = torch.nn.functional.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORE_INDEX)
        wanted.append(of_tokens[targets != IGNORE_INDEX].detach())
    torch.testing.assert_close(losses, torch.cat(wanted), rtol=1e-5, atol=1e-5)
    trained = [int(rows.is_trained[rows.span(sample)].sum()) for sample in range(8)]
    assert weights.tolist() == np.repeat(rows.weights, trained).tolist()
    assert class_indices.tolist() == np.repeat(rows.class_indices, trained).tolist()


def test_the_filler_row_has_loss_zero(tiny_dir, rows, tmp_path):
    trainer = make_trainer(tiny_dir, rows, tmp_path, batch_size=1, accumulation=1)
    loss = trainer.compute_loss(trainer.model, Collator(PAD, is_packed=False)([Rows(rows, one_each(8))[FILLER]]))
    assert loss.item() == 0.0
