"""Precision follows from the device; what it can't do is refused."""

import pytest

from corpus_builder.errors import ProjectError
from trainer.device import (
    Device,
    Place,
    Precision,
    choose_attention,
    choose_precision,
    find_device,
    find_place,
    is_installed,
)

V100 = Device("cuda", "Tesla V100-SXM2-32GB", (7, 0))
T4 = Device("cuda", "Tesla T4", (7, 5))
A100 = Device("cuda", "NVIDIA A100", (8, 0))
H200 = Device("cuda", "NVIDIA H200", (9, 0))
CPU = Device("cpu", "cpu")


@pytest.mark.parametrize(
    ("device", "name", "reason"),
    [
        (V100, "fp16", "compute_capability_7.0_has_no_bf16"),
        (T4, "fp16", "compute_capability_7.5_has_no_bf16"),
        (A100, "bf16", "compute_capability_8.0"),
        (H200, "bf16", "compute_capability_9.0"),
        (CPU, "fp32", "cpu"),
    ],
)
def test_auto_takes_the_best_the_device_has(device, name, reason):
    chosen = choose_precision("auto", device)
    assert (chosen.name, chosen.reason) == (name, reason)


@pytest.mark.parametrize(("device", "wanted"), [(V100, "bf16"), (T4, "bf16"), (CPU, "fp16"), (CPU, "bf16")])
def test_what_the_device_cannot_is_refused(device, wanted):
    with pytest.raises(ProjectError, match="precision_unsupported") as caught:
        choose_precision(wanted, device)
    assert caught.value.values == {"precision": wanted, "device": device.name}


@pytest.mark.parametrize(("device", "wanted"), [(V100, "fp32"), (A100, "fp16"), (A100, "fp32"), (CPU, "fp32")])
def test_what_the_device_can_is_taken_from_the_recipe(device, wanted):
    assert choose_precision(wanted, device).name == wanted


def test_place_of_one_plain_process(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert find_place() == Place(rank=0, local_rank=0, ranks=1, is_launched=False)


def test_place_under_a_launcher(monkeypatch):
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert find_place() == Place(rank=3, local_rank=1, ranks=4, is_launched=True)


def test_gpus_that_are_not_there():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ProjectError, match="gpus_missing"):
        find_device("cuda", Place(0, 0, 4, True))
    assert find_device("auto", Place(0, 0, 4, True)) == CPU


FP16, FP32 = Precision("fp16", "recipe"), Precision("fp32", "recipe")


@pytest.mark.parametrize(
    ("device", "precision", "packages", "name", "reason"),
    [
        (A100, FP16, {"flash_attn"}, "flash_attention_2", "installed"),
        (A100, FP16, set(), "sdpa", "the_package_flash_attn_is_not_installed"),
        (A100, FP32, {"flash_attn"}, "sdpa", "precision_is_fp32"),
        (T4, FP16, {"flash_attn"}, "sdpa", "compute_capability_7.5_is_below_8.0"),
        (V100, FP16, {"flash_attn"}, "sdpa", "compute_capability_7.0_is_below_8.0"),
        (CPU, FP32, {"flash_attn"}, "sdpa", "no_CUDA_GPU"),
    ],
)
def test_auto_takes_flash_attention_where_it_works(device, precision, packages, name, reason):
    chosen = choose_attention("auto", device, precision, has=packages.__contains__)
    assert (chosen.name, chosen.reason) == (name, reason)


@pytest.mark.parametrize(
    ("device", "packages", "reason"),
    [
        (V100, {"flash_attn"}, "compute capability 7.0 is below 8.0"),
        (A100, set(), "the package flash_attn is not installed"),
        (CPU, {"flash_attn"}, "no CUDA GPU"),
    ],
)
def test_flash_attention_that_cannot_work_is_refused(device, packages, reason):
    with pytest.raises(ProjectError, match="method_unsupported") as caught:
        choose_attention("flash_attention_2", device, FP16, has=packages.__contains__)
    assert caught.value.values == {"method": "attn_implementation: flash_attention_2", "reason": reason}


@pytest.mark.parametrize("wanted", ["sdpa", "eager"])
def test_attention_that_works_everywhere_is_taken_from_the_recipe(wanted):
    assert choose_attention(wanted, CPU, FP32, has=set().__contains__).name == wanted


def test_flash_attention_is_taken_from_the_recipe_where_it_works():
    assert choose_attention("flash_attention_2", H200, FP16, has={"flash_attn"}.__contains__).reason == "recipe"


def test_what_is_installed():
    assert is_installed("torch")
    assert not is_installed("no_such_package_of_anybody")
