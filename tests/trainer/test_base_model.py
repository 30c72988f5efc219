"""Faults of a model folder: each one found, named, and told as its own error."""

import json
import struct
from pathlib import Path

import pytest

from corpus_builder.errors import ProjectError
from trainer.base_model import Fault, check_base_model, find_model_faults


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
