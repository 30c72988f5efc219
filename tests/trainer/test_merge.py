"""Merging: the written model answers as base and adapter did, or is refused; sharded, tied and half models."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from corpus_builder.errors import ProjectError
from trainer import merge
from trainer.base_model import find_model_faults
from trainer.device import Place
from trainer.merge import Merged, child_environment, distance, merge_adapter, run_merge
from trainer.methods import add_adapters
from trainer.recipe import Lora

pytestmark = pytest.mark.filterwarnings("default")  # transformers' and PEFT's own
ALONE = Place(rank=0, local_rank=0, ranks=1, is_launched=False)
IDS = torch.arange(12).reshape(2, 6)
PROBE = list(range(40, 80))


def write_base(folder: Path, tiny_dir: Path, dtype=torch.float32, *, max_shard_size="5GB", is_tied=False) -> Path:
    shutil.copytree(tiny_dir, folder, ignore=shutil.ignore_patterns("model*", "config.json"))
    config = AutoConfig.from_pretrained(tiny_dir, tie_word_embeddings=is_tied)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def write_adapter(folder: Path, base_dir: Path, **keys) -> Path:
    """An adapter that moves the model: B is drawn, too."""
    model = AutoModelForCausalLM.from_pretrained(base_dir)
    model = add_adapters(model, Lora(r=4, **keys), seed=5, place=ALONE)
    for name, one in model.named_parameters():
        if one.requires_grad and "lora_A" not in name:
            one.data = one.data + 0.05 * torch.randn(one.shape)
    model.save_pretrained(folder)
    return folder


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        return model.eval()(input_ids=IDS, use_cache=False).logits.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_merged_model_answers_as_base_and_adapter(tmp_path, tiny_dir, dtype):
    base_dir = write_base(tmp_path / "base", tiny_dir, dtype)
    adapter_dir = write_adapter(tmp_path / "adapter", base_dir)
    found = merge_adapter(base_dir, adapter_dir, tmp_path / "out", probe_ids=PROBE)
    assert 0 < found.difference < found.tolerance < found.adapter
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert merged.dtype == dtype
    both = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_dir), adapter_dir)
    assert distance(logits(merged), logits(both)) < found.tolerance


def test_a_model_in_several_files(tmp_path, tiny_dir):
    base_dir = write_base(tmp_path / "base", tiny_dir, max_shard_size="50KB")
    assert len(list(base_dir.glob("model-*.safetensors"))) > 3
    adapter_dir = write_adapter(tmp_path / "adapter", base_dir)
    merge_adapter(base_dir, adapter_dir, tmp_path / "out", probe_ids=PROBE, max_shard_size="60KB")
    shards = list((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) > 3
    assert [fault.code for fault in find_model_faults(str(tmp_path / "out"))] == ["tokenizer_missing"]
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in shards}


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_trained_halves_of_tied_embeddings_are_both_written(tmp_path, tiny_dir, name):
    base_dir = write_base(tmp_path / "base", tiny_dir, is_tied=True)
    adapter_dir = write_adapter(tmp_path / "adapter", base_dir, modules_to_save=(name,))
    found = merge_adapter(base_dir, adapter_dir, tmp_path / "out", probe_ids=PROBE)
    assert found.is_faithful
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(file.keys())


def test_tied_embeddings_that_nobody_trained_stay_tied(tmp_path, tiny_dir):
    base_dir = write_base(tmp_path / "base", tiny_dir, is_tied=True)
    adapter_dir = write_adapter(tmp_path / "adapter", base_dir)
    merge_adapter(base_dir, adapter_dir, tmp_path / "out", probe_ids=PROBE)
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is True


def test_a_merge_that_differs_is_refused(tmp_path, tiny_dir):
    """In 8 bits of mantissa an adapter this small is rounded away: nobody would notice but by comparing."""
    base_dir = write_base(tmp_path / "base", tiny_dir, torch.bfloat16)
    adapter_dir = write_adapter(tmp_path / "adapter", base_dir)
    path = adapter_dir / "adapter_model.safetensors"
    small = {key: value * (1e-3 if "lora_B" in key else 1) for key, value in load_file(path).items()}
    save_file(small, path, metadata={"format": "pt"})
    with pytest.raises(ProjectError, match="merge_differs") as caught:
        merge_adapter(base_dir, adapter_dir, tmp_path / "out", probe_ids=PROBE)
    assert float(caught.value.values["difference"]) > 0
    assert caught.value.values["path"] == str(adapter_dir)


@pytest.mark.parametrize(
    ("difference", "adapter", "is_faithful"),
    [(1e-6, 0.3, True), (0.0, 0.0, True), (2e-4, 0.3, False), (5e-5, 9e-5, False), (float("inf"), 0.3, False)],
)
def test_what_counts_as_faithful(difference, adapter, is_faithful):
    found = Merged(difference=difference, adapter=adapter, tolerance=merge.TOLERANCE["float32"], dtype="float32")
    assert found.is_faithful is is_faithful


def test_logits_that_are_not_finite_are_infinitely_far():
    one = torch.ones(2, 3)
    assert distance(one * float("nan"), one) == float("inf")
    assert distance(one, one) == 0


def test_the_child_knows_of_no_other_rank():
    environment = child_environment(
        {"RANK": "1", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_DEEPSPEED": "true", "HOME": "/h"}
    )
    assert environment == {"HOME": "/h", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.e2e
def test_a_child_process_merges(tmp_path, tiny_dir):
    base_dir = write_base(tmp_path / "base", tiny_dir)
    adapter_dir = write_adapter(tmp_path / "adapter", base_dir)
    found = run_merge(base_dir, adapter_dir, tmp_path / "out", probe_ids=PROBE)
    assert found.is_faithful
    assert (tmp_path / "out/model.safetensors").is_file()


@pytest.mark.e2e
def test_a_childs_error_is_the_parents(tmp_path, tiny_dir):
    with pytest.raises(ProjectError, match="base_model_missing"):
        run_merge(tmp_path / "none", tmp_path / "adapter", tmp_path / "out", probe_ids=PROBE)


@pytest.mark.e2e
def test_a_child_that_dies_is_an_error_too(tmp_path, tiny_dir):
    """Without an adapter PEFT raises: a traceback on stderr, and no error line."""
    with pytest.raises(ProjectError, match="final_incomplete") as caught:
        run_merge(tiny_dir, tmp_path / "none", tmp_path / "out", probe_ids=PROBE)
    assert caught.value.values["missing"] == "merge (exit 1)"
