"""Held-out samples: what a recipe may ask for, exact means, when it is enough."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from corpus_builder.errors import ProjectError
from corpus_builder.frame import load_frame
from tests.tiny_run import tiny_samples
from trainer.checkpoints import Mark
from trainer.device import Place
from trainer.encode import encode_corpus
from trainer.encoded import EncodedSet
from trainer.looks import Looks, check_held_out, looks_of
from trainer.recipe import Recipe

ALONE, LAUNCHED = Place(0, 0, 1, False), Place(0, 0, 1, True)


@pytest.fixture(scope="module")
def held_out(tiny_dir) -> EncodedSet:
    samples = [replace(sample, split="validation") for sample in tiny_samples(9)]
    return encode_corpus(samples + tiny_samples(2), load_frame(tiny_dir), max_seq_len=256).validation


@pytest.fixture(scope="module")
def nothing(tiny_dir) -> EncodedSet:
    return encode_corpus(tiny_samples(2), load_frame(tiny_dir), max_seq_len=256).validation


def recipe_of(**keys) -> Recipe:
    values = {"name": "t", "version": "t", "plan": "t", "base_model_dir": "/b", "max_seq_len": 256}
    return Recipe.model_validate(values | keys)


def test_a_recipe_that_asks_for_nothing_needs_no_held_out_samples(nothing):
    check_held_out(nothing, recipe_of(), ALONE)
    check_held_out(nothing, recipe_of(eval_steps=5), ALONE)


@pytest.mark.parametrize(("key", "value"), [("load_best_model_at_end", True), ("early_stopping_patience", 1)])
def test_what_needs_held_out_samples_is_named(nothing, held_out, key, value):
    with pytest.raises(ProjectError, match="no_validation") as caught:
        check_held_out(nothing, recipe_of(**{key: value}), ALONE)
    assert caught.value.values == {"key": key}
    check_held_out(held_out, recipe_of(**{key: value}), ALONE)


def test_the_best_checkpoint_of_deepspeed_needs_its_optimizer(held_out):
    keys = {"load_best_model_at_end": True, "save_only_model": True}
    check_held_out(held_out, recipe_of(**keys), ALONE)
    with pytest.raises(ProjectError, match="method_unsupported"):
        check_held_out(held_out, recipe_of(**keys), LAUNCHED)


def test_the_best_look_is_remembered_and_the_others_are_counted():
    looks = Looks()
    for step, loss in ((10, 3.0), (20, 2.0), (30, 2.0), (40, 2.5)):
        looks = looks.after(loss, step, counts=True)
    assert looks == Looks(2.0, 20, 2)
    assert [looks.must_stop(patience) for patience in (None, 1, 2, 3)] == [False, True, True, False]
    assert looks.after(1.9, 50, counts=True) == Looks(1.9, 50, 0)


def test_a_look_by_the_clock_may_be_the_best_but_wears_nothing_out():
    looks = Looks(2.0, 20, 1)
    assert looks.after(3.0, 33, counts=False) == looks
    assert looks.after(1.0, 33, counts=False) == Looks(1.0, 33, 0)


def test_where_it_stood_comes_back_from_a_checkpoint():
    assert looks_of(Mark(step=30, ranks=1, best_loss=2.0, best_step=20, stale_looks=1)) == Looks(2.0, 20, 1)
    assert looks_of(Mark(step=30, ranks=1)) == looks_of(None) == Looks(math.inf, 0, 0)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 1), (1, 4), (2, 2), (4, 3)])
def test_every_sample_is_looked_at_once_and_all_ranks_look_equally_often(
    held_out, tiny_dir: Path, is_packed, ranks, batch_size
):
    """Of each rank its own sums; added up they are the whole, exactly, whatever the ranks."""
    import torch

    from trainer.dataset import Collator
    from trainer.held_out import find_held_out

    recipe = recipe_of(per_device_train_batch_size=batch_size)
    collate = Collator(0, is_packed=is_packed)
    seen: list[list[torch.Tensor]] = []
    for rank in range(ranks):
        place = Place(rank, rank, ranks, True)
        looks = find_held_out(held_out, recipe, place, collate=collate, is_packed=is_packed)
        assert looks is not None
        seen.append([batch["taught"] for batch in looks._loader])
    assert len({len(batches) for batches in seen}) == 1
    taught = sum(taught.sum() for batches in seen for taught in batches)
    assert taught == len(held_out)


def test_the_look_equals_a_plain_loop_and_leaves_the_model_as_it_was(held_out, tiny_dir):
    import torch
    from torch.nn import functional
    from transformers import AutoModelForCausalLM

    from trainer.dataset import Collator
    from trainer.held_out import find_held_out

    model = AutoModelForCausalLM.from_pretrained(tiny_dir).train()
    recipe = recipe_of(per_device_train_batch_size=3)
    looks = find_held_out(held_out, recipe, ALONE, collate=Collator(0, is_packed=True), is_packed=True)
    found = looks.look(model, torch.device("cpu"))
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    total, weight_sum = 0.0, 0.0
    for sample in range(len(held_out)):
        ids = torch.from_numpy(held_out.ids_of(sample).astype("int64"))
        labels = torch.from_numpy(held_out.labels_of(sample).astype("int64"))[1:]
        with torch.no_grad():
            losses = functional.cross_entropy(model(ids[None]).logits[0, :-1], labels, reduction="sum")
        total += float(held_out.weights[sample] * losses)
        weight_sum += float(held_out.weights[sample] * (labels != -100).sum())
    assert found["loss"] == pytest.approx(total / weight_sum, rel=1e-5)
    assert set(found) == {"loss", "loss_soul", "loss_tool"}


def test_samples_that_teach_nothing_are_nothing_to_look_at(nothing):
    from trainer.dataset import Collator
    from trainer.held_out import find_held_out

    assert find_held_out(nothing, recipe_of(), ALONE, collate=Collator(0, is_packed=False), is_packed=False) is None
