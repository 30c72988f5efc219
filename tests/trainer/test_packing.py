"""Packing: every sample once, rows that are full, and samples of a row that never see each other."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from corpus_builder.frame import IGNORE_INDEX, load_frame
from tests.tiny_run import tiny_samples
from tests.tiny_types import VOCAB_SIZE, tiny_model
from trainer.dataset import Batch, Collator, DealtOrder, Rows
from trainer.encode import encode_corpus
from trainer.encoded import EncodedSet
from trainer.loss import WeightedTrainer, token_losses
from trainer.model import load_weights
from trainer.packing import PROVEN_TYPES, one_each, pack, why_no_packing

pytestmark = pytest.mark.filterwarnings("default")  # transformers' own
PAD = 0
#: What a sample's loss may differ by for lying in a row with others: the mean, and that of any token, in nats.
MEAN_BOUND, TOKEN_BOUND = 1e-5, 5e-5


def numbers(lengths: list[int]) -> np.ndarray:
    return np.array(lengths, dtype=np.int64)


# --- rows -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 300).flatmap(lambda size: st.tuples(st.just(size), st.lists(st.integers(1, size), max_size=80))))
def test_every_sample_is_in_one_row_and_no_row_is_too_long(case):
    capacity, lengths = case
    packing = pack(numbers(lengths), capacity)
    assert sorted(sample for row in packing for sample in row.tolist()) == list(range(len(lengths)))
    assert all(1 <= numbers(lengths)[row].sum() <= capacity for row in packing)
    # Two rows that fit into one another would be a row too many.
    sizes = sorted(int(numbers(lengths)[row].sum()) for row in packing)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > capacity


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    samples=st.integers(200, 3000),
    median=st.integers(60, 700),
    spread=st.floats(0.6, 1.1),
)
def test_rows_of_chats_are_as_few_as_can_be(seed, samples, median, spread):
    """Chats have lengths whose logarithm is normal (facts of our corpora: median 250 to 350, a tail to the window)."""
    capacity = 4096
    drawn = np.random.default_rng(seed).lognormal(np.log(median), spread, samples)
    lengths = np.clip(drawn, 8, capacity).astype(np.int64)
    bound = -(-int(lengths.sum()) // capacity)
    assert len(pack(lengths, capacity)) <= bound + max(1, bound // 100)


def test_packing_is_the_same_every_time():
    lengths = numbers([5, 3, 5, 2, 7, 1, 5])
    first, second = pack(lengths, 10), pack(lengths, 10)
    assert first.samples.tolist() == second.samples.tolist()
    assert first.starts.tolist() == second.starts.tolist()


@pytest.mark.parametrize("lengths", [[0], [11], [3, 0], [3, 11]])
def test_a_sample_that_is_empty_or_too_long_is_refused(lengths):
    with pytest.raises(ValueError, match=r"do not fit into 1\.\.10"):
        pack(numbers(lengths), 10)


def test_no_samples_make_no_rows():
    assert len(pack(numbers([]), 10)) == 0


def test_one_each_is_a_row_per_sample():
    assert [row.tolist() for row in one_each(3)] == [[0], [1], [2]]


# --- packed = separate ------------------------------------------------------------------------------------------


def losses_of(model, ids: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    """Return the loss (T - 1,) of every token of one row but the first."""
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False, **inputs).logits[0, :-1].float()
    return functional.cross_entropy(logits, ids[1:], reduction="none")


def two_samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randint(3, VOCAB_SIZE, (length,), generator=generator) for length in (25, 31))


def packed_losses(model, first: torch.Tensor, second: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    """Return the losses of two samples in one row, without the token at their border."""
    positions = torch.cat([torch.arange(len(first)), torch.arange(len(second))])[None]
    losses = losses_of(model, torch.cat([first, second]), position_ids=positions, **inputs)
    return torch.cat([losses[: len(first) - 1], losses[len(first) :]])


@pytest.mark.parametrize("model_type", sorted(PROVEN_TYPES))
def test_proven_types_keep_samples_apart(model_type):
    attention = "eager" if model_type == "gemma2" else "sdpa"  # it has no other
    model, (first, second) = tiny_model(model_type, attention=attention), two_samples()
    separate = torch.cat([losses_of(model, first), losses_of(model, second)])
    packed = packed_losses(model, first, second)
    assert (packed - separate).abs().max() <= TOKEN_BOUND
    assert abs(packed.mean() - separate.mean()) <= MEAN_BOUND


@pytest.mark.parametrize("model_type", ["minimax", "opt"])
def test_types_that_do_not_are_not_on_the_list(model_type):
    """These two run without a word, and their samples see each other."""
    model, (first, second) = tiny_model(model_type), two_samples()
    separate = torch.cat([losses_of(model, first), losses_of(model, second)])
    assert (packed_losses(model, first, second) - separate).abs().max() > 0.1
    assert why_no_packing({"model_type": model_type}) is not None


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_attention_mask_beside_packed_rows_breaks_them(attention):
    """The trap: a mask of ones, which says nothing, switches the mask between samples off (transformers 5.24)."""
    model, (first, second) = tiny_model("qwen2", attention=attention), two_samples()
    separate = torch.cat([losses_of(model, first), losses_of(model, second)])
    ones = torch.ones(1, len(first) + len(second), dtype=torch.int64)
    wrong = (packed_losses(model, first, second, attention_mask=ones) - separate).abs()
    assert wrong[: len(first) - 1].max() <= TOKEN_BOUND  # the first sample stands before all others
    assert wrong[len(first) - 1 :].max() > 1.0
    with_mask_alone = losses_of(model, torch.cat([first, second]))
    assert (with_mask_alone[len(first) :] - separate[len(first) - 1 :]).abs().max() > 1.0


@pytest.fixture(scope="module")
def samples(tiny_dir) -> EncodedSet:
    return encode_corpus(tiny_samples(), load_frame(tiny_dir), max_seq_len=256).train


def packed_batch(samples: EncodedSet, **keys: bool) -> Batch:
    """Return all samples in one batch of packed rows."""
    packing = pack(samples.lengths, 256)
    rows = Rows(samples, packing)
    assert 2 <= len(packing) < len(samples)
    return Collator(PAD, is_packed=True, **keys)([rows[index] for index in range(len(packing))])


def in_order_of_samples(samples: EncodedSet, losses: torch.Tensor) -> torch.Tensor:
    """Return the losses of packed rows in the order of the samples, each token's."""
    packing = pack(samples.lengths, 256)
    trained = np.array([int(samples.is_trained[samples.span(index)].sum()) for index in packing.samples])
    parts = dict(zip(packing.samples.tolist(), losses.split(trained.tolist()), strict=True))
    return torch.cat([parts[index] for index in range(len(samples))])


@pytest.mark.parametrize("is_flat", [False, True], ids=["padded", "flat"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_samples_lose_what_they_lose_alone(tiny_dir, samples, attention, is_flat):
    model = load_weights(tiny_dir, dtype=torch.float32, attn_implementation=attention).eval()
    alone = Collator(PAD, is_packed=False)
    separate = torch.cat(
        [token_losses(model, alone([row]))[0] for row in map(Rows(samples, one_each(len(samples))).__getitem__,
                                                            range(len(samples)))]
    )  # fmt: skip
    losses, weights, _ = token_losses(model, packed_batch(samples, is_flat=is_flat))
    packed = in_order_of_samples(samples, losses)
    assert (packed - separate).abs().max() <= TOKEN_BOUND
    assert abs(packed.mean() - separate.mean()) <= MEAN_BOUND
    assert weights.sum() == pytest.approx(
        float((np.repeat(samples.weights, samples.lengths) * samples.is_trained).sum())
    )


@pytest.mark.parametrize("is_flat", [False, True], ids=["padded", "flat"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_another_neighbour_changes_nothing(tiny_dir, samples, attention, is_flat):
    model = load_weights(tiny_dir, dtype=torch.float32, attn_implementation=attention).eval()
    before = in_order_of_samples(samples, token_losses(model, packed_batch(samples, is_flat=is_flat))[0])
    victim = int(pack(samples.lengths, 256).row(0)[0])  # the first sample of a row: all others stand behind it
    ids = samples.ids.copy()
    ids[samples.span(victim)] = (ids[samples.span(victim)] + 17) % 200 + 5
    other = EncodedSet(ids, samples.is_trained, samples.starts, samples.weights, samples.class_indices)
    after = in_order_of_samples(samples, token_losses(model, packed_batch(other, is_flat=is_flat))[0])
    trained = [int(samples.is_trained[samples.span(index)].sum()) for index in range(len(samples))]
    changed = [
        not torch.allclose(old, new, rtol=0, atol=1e-6)
        for old, new in zip(before.split(trained), after.split(trained), strict=True)
    ]
    assert [index for index, is_changed in enumerate(changed) if is_changed] == [victim]


def test_flat_rows_are_one_row_without_padding(samples):
    flat, padded = packed_batch(samples, is_flat=True), packed_batch(samples)
    assert flat["input_ids"].shape == (1, samples.tokens)
    assert padded["input_ids"].numel() > samples.tokens
    assert {name: values.dtype for name, values in flat.items()} == {n: v.dtype for n, v in padded.items()}
    begins = (flat["position_ids"][0] == 0).nonzero().flatten()
    assert len(begins) == len(samples)
    assert (flat["labels"][0, begins] == IGNORE_INDEX).all()  # nothing is predicted over a border
    assert flat["taught"].tolist() == padded["taught"].tolist()
    assert "attention_mask" not in flat


def test_rows_that_are_not_packed_cannot_be_flat():
    with pytest.raises(ValueError, match="must be packed"):
        Collator(PAD, is_packed=False, is_flat=True)


@pytest.mark.parametrize("is_flat", [False, True], ids=["padded", "flat"])
def test_no_forward_of_a_packed_training_sees_an_attention_mask(tiny_dir, samples, tmp_path, is_flat):
    """Watched where it counts: what the model and its inner model are really called with, in every micro-batch."""
    from transformers import TrainingArguments

    model, packing = load_weights(tiny_dir, dtype=torch.float32), pack(samples.lengths, 256)
    seen: list[dict[str, object]] = []
    for module in (model, model.model):
        module.register_forward_pre_hook(lambda _, __, given: seen.append(given), with_kwargs=True)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=2,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    trainer = WeightedTrainer(
        model=model,
        args=arguments,
        rows=Rows(samples, packing),
        order=DealtOrder(len(packing), ranks=1, rank=0, batch_size=2, seed=1),
        collate=Collator(PAD, is_packed=True, is_flat=is_flat),
    )
    trainer.train()
    assert len(seen) == 2 * 2 * -(-len(packing) // 2)
    for call in seen:
        assert call.get("attention_mask") is None
        assert call["position_ids"].shape[1] > 1


def test_a_packed_report_counts_samples_and_not_rows(tiny_dir, samples, tmp_path):
    from transformers import TrainingArguments

    packing = pack(samples.lengths, 256)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=1, per_device_train_batch_size=2, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    trainer = WeightedTrainer(
        model=load_weights(tiny_dir, dtype=torch.float32),
        args=arguments,
        rows=Rows(samples, packing),
        order=DealtOrder(len(packing), ranks=1, rank=0, batch_size=2, seed=1),
        collate=Collator(PAD, is_packed=True),
    )
    trainer.train()
    report = trainer.meter.take()
    assert report["rows"] == len(samples) > len(packing)
    assert report["tokens"] == samples.trained_tokens


# --- why not ----------------------------------------------------------------------------------------------------


def test_a_proven_type_may_be_packed():
    assert why_no_packing({"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]}) is None


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": "qwen3_next"}, "qwen3_next"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({}, "None"),
    ],
)
def test_another_is_named(config, named):
    reason = why_no_packing(config)
    assert reason is not None
    assert named in reason


@pytest.mark.parametrize("masking", [None, "def create_causal_mask(): ..."])
def test_a_transformers_that_does_not_look_at_positions_is_named(monkeypatch, tmp_path, masking):
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    if masking is not None:
        (package / "masking_utils.py").write_text(masking)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert "version of transformers" in (why_no_packing({"model_type": "qwen2"}) or "")
