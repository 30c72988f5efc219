"""The recipe's sections decide what is trained: all weights, LoRA or QLoRA; what cannot be is refused beforehand."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from corpus_builder.errors import ProjectError
from trainer.device import Attention, Device, Place, Precision
from trainer.methods import add_adapters, check_methods, check_targets, count_parameters, missing_modules, quantization
from trainer.model import load_model, weights_dtype
from trainer.recipe import Lora, Recipe

pytestmark = pytest.mark.filterwarnings("default")  # transformers' and PEFT's own
ALONE = Place(rank=0, local_rank=0, ranks=1, is_launched=False)
LAUNCHED = Place(rank=0, local_rank=0, ranks=2, is_launched=True)
CPU, V100 = Device("cpu", "cpu"), Device("cuda", "Tesla V100-SXM2-32GB", (7, 0))
FP32, FP16 = Precision("fp32", "cpu"), Precision("fp16", "recipe")
SDPA = Attention("sdpa", "recipe")
IDS = torch.arange(12).reshape(2, 6)


def recipe_of(**keys) -> Recipe:
    return Recipe.model_validate({"name": "t", "version": "t", "plan": "t", "base_model_dir": "/b"} | keys)


def has_all(_: str) -> bool:
    return True


def has_none(_: str) -> bool:
    return False


@pytest.fixture
def base(tiny_dir):
    return AutoModelForCausalLM.from_pretrained(tiny_dir)


QLORA, LIGER = {"lora": {"load_in_4bit": True}}, {"use_liger_kernel": True}


@pytest.mark.parametrize(
    ("keys", "device", "precision", "has", "method", "reason"),
    [
        (QLORA, CPU, FP32, has_all, "lora.load_in_4bit", "no CUDA GPU"),
        (QLORA, V100, FP16, has_none, "lora.load_in_4bit", "not installed: bitsandbytes"),
        (QLORA, V100, FP32, has_all, "lora.load_in_4bit", "precision is fp32"),
        (LIGER, CPU, FP32, has_all, "use_liger_kernel", "no CUDA GPU"),
        (LIGER, V100, FP16, has_none, "use_liger_kernel", "not installed: triton, liger_kernel"),
    ],
)
def test_what_cannot_work_is_refused_with_its_reason(keys, device, precision, has, method, reason):
    with pytest.raises(ProjectError) as caught:
        check_methods(recipe_of(**keys), device, precision, has=has)
    assert (caught.value.code, caught.value.values) == ("method_unsupported", {"method": method, "reason": reason})


@pytest.mark.parametrize("keys", [{}, {"lora": {}}, QLORA, LIGER])
def test_what_works_passes(keys):
    check_methods(recipe_of(**keys), V100, FP16, has=has_all)


def test_full_and_lora_need_no_package():
    check_methods(recipe_of(lora={}), CPU, FP32, has=has_none)


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"target_modules": ["q_proj", "qproj", "w1"]}, "qproj, w1"),
        ({"target_modules": ["proj"]}, "proj"),  # the end of a name is not a name
        ({"target_modules": ["norm"]}, "norm"),  # a module, but none that LoRA can adapt
        ({"modules_to_save": ["lm_head", "head"]}, "head"),
    ],
)
def test_unknown_modules_are_named(tiny_dir, keys, names):
    with pytest.raises(ProjectError, match="lora_no_targets") as caught:
        check_targets(tiny_dir, Lora(**keys))
    assert caught.value.values == {"names": names}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"target_modules": ["q_proj", "layers.0.mlp.up_proj", "embed_tokens"]},
        {"modules_to_save": ["norm", "lm_head"]},
    ],
)
def test_known_modules_pass(tiny_dir, base, keys):
    check_targets(tiny_dir, Lora(**keys))
    assert missing_modules(base, Lora(**keys)) == []


def test_adapters_are_trained_and_nothing_else(base):
    model = add_adapters(base, Lora(r=4), seed=1, place=ALONE)
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert len(trained) == 2 * 7 * 2  # A and B of seven linear layers in two blocks
    assert all("lora_" in name for name in trained)


def test_rank_scale_and_dropout_are_the_recipes(base):
    lora = Lora(r=4, lora_alpha=20, lora_dropout=0.25, target_modules=("v_proj",))
    model = add_adapters(base, lora, seed=1, place=ALONE)
    layer = model.get_base_model().model.layers[0].self_attn.v_proj
    assert (layer.r["default"], layer.scaling["default"], layer.lora_dropout["default"].p) == (4, 5.0, 0.25)
    assert not hasattr(model.get_base_model().model.layers[0].self_attn.q_proj, "lora_A")


def test_modules_to_save_are_trained_whole(base):
    model = add_adapters(base, Lora(modules_to_save=("lm_head",)), seed=1, place=ALONE)
    whole = [name for name, one in model.named_parameters() if one.requires_grad and "lora_" not in name]
    assert whole == ["base_model.model.lm_head.modules_to_save.default.weight"]


def test_every_rank_draws_the_same_adapters(base):
    torch.manual_seed(7)
    one = add_adapters(copy.deepcopy(base), Lora(), seed=3, place=LAUNCHED)
    torch.manual_seed(8)
    other = add_adapters(base, Lora(), seed=3, place=LAUNCHED)
    pairs = zip(one.named_parameters(), other.named_parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in pairs)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_frozen_base_with_checkpointing_still_gives_gradients(base, use_reentrant):
    model = add_adapters(base, Lora(lora_dropout=0), seed=1, place=ALONE).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model(input_ids=IDS, use_cache=False).logits.sum().backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if "lora_B" in name}
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients.values())


@pytest.mark.parametrize(
    ("place", "adapters"), [(ALONE, torch.float32), (LAUNCHED, torch.float16)], ids=["alone", "deepspeed"]
)
def test_fp16_lora_holds_a_half_base_and_adapters_by_who_keeps_masters(tiny_dir, place, adapters):
    lora = Lora(modules_to_save=("lm_head",))
    model = load_model(tiny_dir, precision=FP16, place=place, attention=SDPA, lora=lora, seed=1)
    types = {one.requires_grad: one.dtype for one in model.parameters()}
    assert types == {False: torch.float16, True: adapters}
    assert len({(one.requires_grad, one.dtype) for one in model.parameters()}) == 2


@pytest.mark.parametrize(
    ("precision", "place", "is_frozen", "dtype"),
    [
        ("fp32", ALONE, False, torch.float32),
        ("fp32", LAUNCHED, True, torch.float32),
        ("fp16", ALONE, False, torch.float32),  # autocast and a GradScaler
        ("bf16", ALONE, False, torch.float32),
        ("fp16", ALONE, True, torch.float16),
        ("fp16", LAUNCHED, False, torch.float16),  # DeepSpeed keeps 32-bit masters
        ("bf16", LAUNCHED, True, torch.bfloat16),
    ],
)
def test_the_type_that_the_base_is_loaded_in(precision, place, is_frozen, dtype):
    assert weights_dtype(Precision(precision, "recipe"), place, is_frozen=is_frozen) == dtype


def test_the_grad_scaler_refuses_half_gradients():
    """Why trained weights are 32 bits where DeepSpeed keeps no masters."""
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    weight.grad = torch.ones_like(weight)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(torch.optim.SGD([weight]))


def test_parameters_are_counted(base):
    before = sum(one.numel() for one in base.parameters())
    assert count_parameters(base) == (before, before)
    model = add_adapters(base, Lora(r=4, target_modules=("q_proj",)), seed=1, place=ALONE)
    assert count_parameters(model) == (2 * 4 * (64 + 64), before + 2 * 4 * (64 + 64))


def test_nothing_is_quantised_unless_asked():
    assert quantization(None, FP16, ALONE) == {}
    assert quantization(Lora(), FP16, ALONE) == {}
