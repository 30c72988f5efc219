"""The loss in the head: the value and the gradients of plain logits, whatever the model, the type and the chunk."""

import copy

import pytest
import torch
from torch.nn import functional

from tests.tiny_types import VOCAB_SIZE, tiny_model
from trainer import head_loss
from trainer.head_loss import HeadLoss, Targets, head_loss_of, why_no_head_loss
from trainer.head_types import PLAIN_HEADS

pytestmark = pytest.mark.filterwarnings("default")  # transformers' own
ROWS, TOKENS = 2, 24


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks and a last one that is not full, at the size of a test."""
    monkeypatch.setattr(head_loss, "CHUNK_TOKENS", 5)


def make_batch(*, trained_share: float = 0.5) -> tuple[torch.Tensor, Targets]:
    """Return input ids (ROWS, TOKENS) and random targets; every row its own positions."""
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(3, VOCAB_SIZE, (ROWS, TOKENS), generator=generator)
    mask = torch.rand(ROWS, TOKENS, generator=generator) < trained_share
    mask[:, -1] = False
    weights = torch.rand(int(mask.sum()), generator=generator) + 0.5
    return ids, Targets(mask, ids.roll(-1, dims=1)[mask], weights)


def plain_loss(model, ids: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the head must compute, from whole logits by torch's own functions."""
    logits = model(input_ids=ids, use_cache=False).logits[targets.mask].float()
    losses = functional.cross_entropy(logits, targets.token_ids, reduction="none")
    return (losses * targets.weights).sum(), losses


def gradients(model, total: torch.Tensor, *, factor: float = 1.0) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (total * factor).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], **tolerance: float) -> None:
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", sorted(PLAIN_HEADS))
def test_value_and_gradients_are_those_of_plain_logits(model_type, is_tied):
    model = tiny_model(model_type, is_tied=is_tied)
    ids, targets = make_batch()
    wanted_total, wanted_losses = plain_loss(model, ids, targets)
    wanted = gradients(model, wanted_total)
    head = head_loss_of(model)
    assert head is not None, why_no_head_loss(model)
    total, losses = head.score(model, targets, input_ids=ids, use_cache=False)
    torch.testing.assert_close(losses, wanted_losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total, wanted_total, rtol=1e-5, atol=1e-5)
    assert_same(gradients(model, total), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["cohere", "gemma2", "phi"])
def test_a_head_that_is_not_plain_is_left_alone(model_type):
    model = tiny_model(model_type, attention="eager")
    assert head_loss_of(model) is None
    assert why_no_head_loss(model)
    assert "forward" not in vars(model.get_output_embeddings())


def test_a_head_with_a_bias_is_named(monkeypatch):
    monkeypatch.setattr(head_loss, "PLAIN_HEADS", PLAIN_HEADS | {"phi"})
    assert why_no_head_loss(tiny_model("phi")) == "its head has a bias"


def test_a_scaled_head_would_be_wrong(monkeypatch):
    """Why there is a list: on a model that scales its logits behind the head the loss is far off."""
    monkeypatch.setattr(head_loss, "PLAIN_HEADS", PLAIN_HEADS | {"cohere"})
    model = tiny_model("cohere")
    ids, targets = make_batch()
    _, wanted = plain_loss(model, ids, targets)
    _, losses = head_loss_of(model).score(model, targets, input_ids=ids, use_cache=False)
    assert (losses - wanted).abs().max() > 0.1


def test_without_targets_the_head_is_what_it_was():
    model = tiny_model("qwen2")
    ids, targets = make_batch()
    before = model(input_ids=ids, use_cache=False).logits
    head_loss_of(model).score(model, targets, input_ids=ids, use_cache=False)
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)
    generated = model.generate(ids[:1, :4], max_new_tokens=3, do_sample=False)
    assert generated.shape[1] >= 5


def test_a_failed_forward_leaves_no_targets_behind():
    model = tiny_model("qwen2")
    ids, targets = make_batch()
    with pytest.raises(TypeError):
        head_loss_of(model).score(model, targets, no_such_argument_of_the_model=1, input_ids=3)
    assert model(input_ids=ids, use_cache=False).logits.shape == (ROWS, TOKENS, VOCAB_SIZE)


def test_the_loss_is_put_into_a_head_once():
    model = tiny_model("qwen2")
    assert head_loss_of(model) is head_loss_of(model)


def test_a_copied_model_gets_a_loss_of_its_own():
    model = tiny_model("qwen2")
    first = head_loss_of(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    ids, targets = make_batch()
    assert head_loss_of(twin) is not first
    _, losses = head_loss_of(twin).score(twin, targets, input_ids=ids, use_cache=False)
    torch.testing.assert_close(losses, torch.full_like(losses, VOCAB_SIZE).log())


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_without_targets_the_loss_is_zero_and_so_is_every_gradient(is_tied):
    model = tiny_model("qwen2", is_tied=is_tied)
    ids, targets = make_batch(trained_share=0.0)
    total, losses = head_loss_of(model).score(model, targets, input_ids=ids, use_cache=False)
    assert total.item() == 0.0
    assert losses.shape == (0,)
    got = gradients(model, total)
    assert got.keys() == {name for name, _ in model.named_parameters()}
    assert all((gradient == 0).all() for gradient in got.values())


def test_a_frozen_head_gets_no_gradient_and_no_buffer():
    """As with LoRA: what lies before the head learns, the head's own gradient is never made."""
    model = tiny_model("qwen2")
    ids, targets = make_batch()
    wanted = gradients(model, plain_loss(model, ids, targets)[0])
    model.zero_grad()
    model.lm_head.weight.requires_grad_(False)
    total, _ = head_loss_of(model).score(model, targets, input_ids=ids, use_cache=False)
    kept = total.grad_fn.gradients
    assert [gradient is None for gradient in kept] == [False, True]
    got = gradients(model, total)
    del wanted["lm_head.weight"]
    assert_same(got, wanted, rtol=1e-4, atol=1e-5)


def test_without_gradients_only_losses_are_made(monkeypatch):
    def refuse(*_):
        raise AssertionError("a gradient was made that nobody takes")

    monkeypatch.setattr(head_loss, "_add_product", refuse)
    model = tiny_model("qwen2")
    ids, targets = make_batch()
    _, wanted = plain_loss(model, ids, targets)
    with torch.no_grad():
        total, losses = head_loss_of(model).score(model, targets, input_ids=ids, use_cache=False)
    assert not total.requires_grad
    assert not losses.requires_grad
    torch.testing.assert_close(losses, wanted.detach(), rtol=1e-5, atol=1e-5)


def test_kept_losses_hold_no_graph():
    model = tiny_model("qwen2")
    ids, targets = make_batch()
    total, losses = head_loss_of(model).score(model, targets, input_ids=ids, use_cache=False)
    assert total.requires_grad
    assert not losses.requires_grad


def test_a_second_backward_pass_is_refused():
    model = tiny_model("qwen2")
    ids, targets = make_batch()
    total, _ = head_loss_of(model).score(model, targets, input_ids=ids, use_cache=False)
    total.backward(retain_graph=True)
    with pytest.raises(TypeError):
        total.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_takes_the_cross_entropy_in_32_bits(dtype):
    model = tiny_model("qwen2").to(dtype)
    ids, targets = make_batch()
    wanted_total, wanted_losses = plain_loss(model, ids, targets)
    wanted = gradients(model, wanted_total)
    total, losses = head_loss_of(model).score(model, targets, input_ids=ids, use_cache=False)
    assert total.dtype == losses.dtype == torch.float32
    torch.testing.assert_close(losses, wanted_losses, rtol=1e-5, atol=1e-5)
    # The gradients are as good as those of plain logits: both are rounded to `dtype` on their way through the model.
    got, bound = gradients(model, total), {torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
    for name, gradient in wanted.items():
        assert got[name].dtype == dtype
        assert (got[name] - gradient).float().norm() <= bound * gradient.float().norm(), name


def test_half_precision_heads_are_nearer_to_the_truth_than_plain_ones():
    """The head's own gradient is summed over chunks in 32 bits."""
    exact = tiny_model("qwen2").to(torch.bfloat16)
    truth_model = copy.deepcopy(exact).float()
    ids, targets = make_batch()
    truth = gradients(truth_model, plain_loss(truth_model, ids, targets)[0])["lm_head.weight"]
    total, _ = head_loss_of(exact).score(exact, targets, input_ids=ids, use_cache=False)
    got = gradients(exact, total)["lm_head.weight"].float()
    assert (got - truth).norm() <= 0.05 * truth.norm()


def test_autocast_multiplies_in_half_and_sums_in_32_bits():
    model = tiny_model("qwen2")
    ids, targets = make_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted_total, wanted_losses = plain_loss(model, ids, targets)
    wanted = gradients(model, wanted_total)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, losses = head_loss_of(model).score(model, targets, input_ids=ids, use_cache=False)
    torch.testing.assert_close(losses, wanted_losses, rtol=1e-4, atol=1e-4)
    got = gradients(model, total)
    for name, gradient in wanted.items():
        assert got[name].dtype == torch.float32
        assert (got[name] - gradient).norm() <= 0.05 * gradient.norm(), name


def test_a_loss_divided_and_scaled_as_in_fp16_loses_nothing():
    """The step's tokens and the loss scale come in with the gradient: 1e-6 of a loss, times 2^16, is exact."""
    model = tiny_model("qwen2")
    ids, targets = make_batch()
    factor = 65536.0 * 1e-6
    wanted = gradients(model, plain_loss(model, ids, targets)[0], factor=factor)
    total, _ = head_loss_of(model).score(model, targets, input_ids=ids, use_cache=False)
    assert_same(gradients(model, total, factor=factor), wanted, rtol=1e-4, atol=1e-6)


def test_gradient_checkpointing_runs_the_head_once():
    model = tiny_model("qwen2").train()
    ids, targets = make_batch()
    wanted = gradients(model, plain_loss(model, ids, targets)[0])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    total, _ = head_loss_of(model).score(model, targets, input_ids=ids, use_cache=False)
    assert_same(gradients(model, total), wanted, rtol=1e-4, atol=1e-5)


def lora_model(**keys):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(tiny_model("qwen2"), LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, **keys))


@pytest.mark.parametrize("keys", [{"target_modules": "all-linear"}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_adapters_learn_as_with_plain_logits(keys):
    model = lora_model(**keys).eval()
    ids, targets = make_batch()
    wanted = gradients(model, plain_loss(model, ids, targets)[0])
    head = head_loss_of(model)
    assert isinstance(head, HeadLoss)
    total, _ = head.score(model, targets, input_ids=ids, use_cache=False)
    assert_same(gradients(model, total), wanted, rtol=1e-4, atol=1e-4)


def test_an_adapter_on_the_head_itself_needs_whole_logits():
    model = lora_model(target_modules=["q_proj", "lm_head"])
    assert why_no_head_loss(model) == "its head is a peft.tuners.lora.layer.Linear, more than a linear layer"
