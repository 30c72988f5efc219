"""Faults of a model folder: each one found, named, and told as its own error."""

import json
import shutil
import struct
from pathlib import Path

import pytest

from corpus_builder.errors import ProjectError
from trainer.base_model import Fault, check_base_model, find_adapter_faults, find_model_faults, is_adapter


def write_weights(path: Path, *, tensor_bytes: int = 16, cut: int = 0) -> None:
    header = json.dumps(
        {"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [4], "data_offsets": [0, tensor_bytes]}}
    ).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(tensor_bytes)
    path.write_bytes(data[: len(data) - cut])


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    write_weights(tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(folder) -> Path:
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    for name in names:
        write_weights(folder / name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {f"w{at}": name for at, name in enumerate(names)}})
    )
    return folder


def test_whole_folders_have_no_fault(folder):
    assert find_model_faults(str(folder)) == []
    check_base_model(str(folder))


def test_whole_shards_have_no_fault(sharded):
    assert find_model_faults(str(sharded)) == []


def test_real_model_has_no_fault(tiny_dir):
    assert find_model_faults(str(tiny_dir)) == []


def test_missing_folder(tmp_path):
    assert find_model_faults(str(tmp_path / "no")) == [Fault("base_model_missing", "")]
    with pytest.raises(ProjectError, match="base_model_missing"):
        check_base_model(str(tmp_path / "no"))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("config.json", "base_model_no_config"),
        ("tokenizer.json", "tokenizer_missing"),
        ("model.safetensors", "base_model_incomplete"),
    ],
)
def test_missing_file(folder, name, code):
    (folder / name).unlink()
    assert find_model_faults(str(folder)) == [Fault(code, name)]


@pytest.mark.parametrize(
    ("name", "code"), [("config.json", "base_model_no_config"), ("tokenizer.json", "tokenizer_missing")]
)
def test_broken_json(folder, name, code):
    (folder / name).write_text('{"half": ')
    assert find_model_faults(str(folder)) == [Fault(code, name)]


def test_shards_that_are_missing_or_cut_are_named_together(sharded):
    (sharded / "model-00001-of-00003.safetensors").unlink()
    write_weights(sharded / "model-00003-of-00003.safetensors", cut=1)
    with pytest.raises(ProjectError) as caught:
        check_base_model(str(sharded))
    assert caught.value.values["missing"] == "model-00001-of-00003.safetensors, model-00003-of-00003.safetensors"


@pytest.mark.parametrize("content", [b"", b"short", b"version https://git-lfs.github.com/spec/v1\n", bytes(64)])
def test_weights_that_are_no_safetensors(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    assert find_model_faults(str(folder)) == [Fault("base_model_incomplete", "model.safetensors")]


def test_index_that_names_nothing(sharded):
    (sharded / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert find_model_faults(str(sharded)) == [Fault("base_model_incomplete", "model.safetensors.index.json")]


def test_the_gravest_fault_comes_first(folder):
    for path in folder.iterdir():
        path.unlink()
    codes = [fault.code for fault in find_model_faults(str(folder))]
    assert codes == ["base_model_no_config", "base_model_incomplete", "tokenizer_missing"]


@pytest.fixture
def adapter(tmp_path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    write_weights(folder / "adapter_model.safetensors")
    return folder


def test_a_whole_adapter_has_no_fault(adapter):
    assert is_adapter(str(adapter))
    assert find_model_faults(str(adapter)) == []


def test_a_model_is_no_adapter(folder):
    (folder / "adapter_config.json").write_text("{}")  # beside a whole model it says where the model came from
    assert not is_adapter(str(folder))
    assert find_model_faults(str(folder)) == []


@pytest.mark.parametrize(
    ("name", "code"), [("adapter_model.safetensors", "base_model_incomplete"), ("tokenizer.json", "tokenizer_missing")]
)
def test_what_an_adapter_lacks_is_named(adapter, name, code):
    (adapter / name).unlink()
    assert find_model_faults(str(adapter)) == [Fault(code, name)]


def test_a_cut_adapter_is_named(adapter):
    write_weights(adapter / "adapter_model.safetensors", cut=1)
    (adapter / "adapter_config.json").write_text("{")
    faults = [Fault("base_model_no_config", "adapter_config.json")]
    assert find_adapter_faults(str(adapter)) == [*faults, Fault("base_model_incomplete", "adapter_model.safetensors")]


def test_a_pickled_adapter(adapter):
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    assert find_model_faults(str(adapter)) == []


def test_an_adapter_is_no_base_model(adapter):
    with pytest.raises(ProjectError, match="base_model_is_adapter"):
        check_base_model(str(adapter))


def write_pickled(folder: Path, *, is_sharded: bool, weights: object) -> None:
    """Replace a model's weights by `.bin` files, the last of which holds `weights`."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if not is_sharded:
        torch.save(weights or tensors, folder / "pytorch_model.bin")
        return
    halves = [dict(list(tensors.items())[at::2]) for at in (0, 1)]
    names = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    for name, half in zip(names, [halves[0], weights or halves[1]], strict=True):
        torch.save(half, folder / name)
    weight_map = {key: name for name, half in zip(names, halves, strict=True) for key in half}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


class Malice:
    """What runs code where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.filterwarnings("default")  # transformers' own
@pytest.mark.parametrize("is_sharded", [False, True])
def test_pickled_weights_are_loaded(tiny_dir, tmp_path, is_sharded):
    import torch

    from trainer.model import load_weights

    shutil.copytree(tiny_dir, tmp_path / "base")
    write_pickled(tmp_path / "base", is_sharded=is_sharded, weights=None)
    assert find_model_faults(str(tmp_path / "base")) == []
    pairs = zip(
        load_weights(tmp_path / "base", dtype="auto").parameters(),
        load_weights(tiny_dir, dtype="auto").parameters(),
        strict=True,
    )
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_pickle_that_holds_code_is_refused_and_not_run(tiny_dir, tmp_path, is_sharded):
    from trainer.model import load_weights

    shutil.copytree(tiny_dir, tmp_path / "base")
    trace = tmp_path / "it-ran"
    write_pickled(tmp_path / "base", is_sharded=is_sharded, weights={"lm_head.weight": Malice(trace)})
    with pytest.raises(ProjectError, match="base_model_unsafe"):
        load_weights(tmp_path / "base", dtype="auto")
    assert not trace.exists()


def test_a_missing_pickled_shard_is_named(tiny_dir, tmp_path):
    shutil.copytree(tiny_dir, tmp_path / "base")
    write_pickled(tmp_path / "base", is_sharded=True, weights=None)
    (tmp_path / "base/pytorch_model-00002-of-00002.bin").unlink()
    fault = Fault("base_model_incomplete", "pytorch_model-00002-of-00002.bin")
    assert find_model_faults(str(tmp_path / "base")) == [fault]
