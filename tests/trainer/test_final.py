"""The result: whole by rename, with our template, pointed to in one rename; nothing old is deleted."""

import json
import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import GenerationConfig

from corpus_builder.errors import ProjectError
from corpus_builder.frame import CHAT_TEMPLATE, Frame, template_of
from tests.tokenizers_real import tiny_tokenizer_json
from trainer.final import (
    adapter_path,
    check_template,
    keep_base_config,
    name_base,
    partial_path,
    point_version,
    publish_final,
    stop_at_turn_end,
    wait_for_final,
    write_tokenizer,
)
from trainer.run_paths import DataPaths, run_paths


@dataclass
class Model:
    """A model as far as `stop_at_turn_end` looks at it."""

    generation_config: GenerationConfig


pytestmark = pytest.mark.filterwarnings("default")  # transformers' own
RUN = "20260101-000000-abcd"


@pytest.fixture
def paths(tmp_path):
    found = run_paths(str(tmp_path), "v1", RUN)
    Path(found.checkpoints).mkdir(parents=True)
    return found


def write_partial(paths, tiny_dir) -> Path:
    partial = partial_path(paths)
    shutil.copytree(tiny_dir, partial, ignore=shutil.ignore_patterns("tokenizer*"))
    (partial / "training_args.bin").write_bytes(b"a pickle")
    return partial


@pytest.mark.parametrize("name", ["qwen", "smollm2", "tiny"])
def test_hugging_face_renders_the_saved_template_to_the_frames_ids(name, request, tmp_path):
    folder = request.getfixturevalue(f"{name}_dir")
    write_tokenizer(folder, tmp_path / "tokenizer")
    check_template(tmp_path / "tokenizer", Frame((folder / "tokenizer.json").read_text("utf-8")))
    assert template_of(tmp_path / "tokenizer") == CHAT_TEMPLATE
    assert (tmp_path / "tokenizer/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_qwens_own_tokenizer_class_renders_the_same(qwen_dir, qwen_frame, tmp_path):
    """Published Qwen2.5 folders name this class; transformers 5 rebuilds the tokenizer by it."""
    write_tokenizer(qwen_dir, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "Qwen2Tokenizer"}))
    check_template(tmp_path, qwen_frame)


def test_another_template_is_refused(tiny_dir, tmp_path):
    write_tokenizer(tiny_dir, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    with pytest.raises(ProjectError, match="template_mismatch"):
        check_template(tmp_path, Frame((tiny_dir / "tokenizer.json").read_text("utf-8")))


def test_another_tokenizer_is_refused(tiny_dir, tmp_path):
    write_tokenizer(tiny_dir, tmp_path)
    with pytest.raises(ProjectError, match="template_mismatch"):
        check_template(tmp_path, Frame(tiny_tokenizer_json(["Hello lighthouse"], vocab_size=300)))


def test_final_appears_whole(paths, tiny_dir, tmp_path):
    write_partial(paths, tiny_dir)
    write_tokenizer(tiny_dir, tmp_path / "tokenizer")
    publish_final(paths, tmp_path / "tokenizer")
    names = {path.name for path in Path(paths.final).iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert "training_args.bin" not in names
    assert not partial_path(paths).exists()


def test_a_cut_result_is_not_published(paths, tiny_dir, tmp_path):
    weights = write_partial(paths, tiny_dir) / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    write_tokenizer(tiny_dir, tmp_path / "tokenizer")
    with pytest.raises(ProjectError, match="final_incomplete"):
        publish_final(paths, tmp_path / "tokenizer")
    assert not Path(paths.final).exists()


def test_the_pointer_follows_the_newest_run(paths, tmp_path):
    pointer = Path(DataPaths(str(tmp_path)).version_final("v1"))
    pointer.symlink_to("20250101-000000-0000/final")
    Path(paths.final).mkdir()
    assert point_version(paths, str(pointer)) is None
    assert os.readlink(pointer) == f"{RUN}/final"
    assert pointer.resolve() == Path(paths.final).resolve()


def test_a_real_folder_in_the_pointers_place_is_moved_aside(paths, tmp_path):
    pointer = Path(DataPaths(str(tmp_path)).version_final("v1"))
    pointer.mkdir()
    (pointer / "weights").write_text("old")
    aside = point_version(paths, str(pointer))
    assert aside is not None
    assert (Path(aside) / "weights").read_text() == "old"
    assert pointer.is_symlink()


@pytest.mark.parametrize(
    ("before", "after"), [(None, [2]), (2, [2]), (0, [2, 0]), ([2, 0], [2, 0]), ([0, 7], [2, 0, 7])]
)
def test_generation_ends_where_the_frame_ends_a_turn(tiny_dir, before, after):
    model = Model(GenerationConfig(eos_token_id=before))
    frame = Frame((tiny_dir / "tokenizer.json").read_text("utf-8"))
    assert frame.im_end == 2
    stop_at_turn_end(model, frame)
    assert model.generation_config.eos_token_id == after


def test_published_settings_that_contradict_themselves_can_still_be_saved(tiny_dir, tmp_path):
    """A temperature without sampling, as some published folders have it, fails a strict save after training."""
    model = Model(GenerationConfig(temperature=0.6, top_p=0.9, eos_token_id=0))
    stop_at_turn_end(model, Frame((tiny_dir / "tokenizer.json").read_text("utf-8")))
    model.generation_config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert (saved["do_sample"], saved["temperature"], saved["eos_token_id"]) == (True, 0.6, [2, 0])


def test_the_result_names_no_class_that_only_transformers_5_knows(smollm2_dir, tmp_path):
    write_tokenizer(smollm2_dir, tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_the_template_is_in_both_places_that_readers_look(tiny_dir, tmp_path):
    write_tokenizer(tiny_dir, tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE


def write_adapter(folder: Path, tiny_dir: Path) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_dir)
    get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM")).save_pretrained(folder)
    (folder / "training_args.bin").write_bytes(b"a pickle")
    return folder


def test_an_adapter_alone_is_a_result(paths, tiny_dir, tmp_path):
    write_adapter(adapter_path(paths, is_merged=False), tiny_dir)
    write_tokenizer(tiny_dir, tmp_path / "tokenizer")
    publish_final(paths, tmp_path / "tokenizer")
    names = {path.name for path in Path(paths.final).iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not {"training_args.bin", "README.md", "config.json"} & names


def test_a_merged_result_holds_its_adapter(paths, tiny_dir, tmp_path):
    write_partial(paths, tiny_dir)
    adapter = write_adapter(adapter_path(paths, is_merged=True), tiny_dir)
    write_tokenizer(tiny_dir, tmp_path / "tokenizer")
    os.truncate(adapter / "adapter_model.safetensors", 100)
    with pytest.raises(ProjectError, match="final_incomplete") as caught:
        publish_final(paths, tmp_path / "tokenizer")
    assert caught.value.values["missing"] == "adapter/adapter_model.safetensors"
    shutil.rmtree(adapter)
    write_adapter(adapter, tiny_dir)
    publish_final(paths, tmp_path / "tokenizer")
    names = {path.name for path in (Path(paths.final) / "adapter").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize(
    ("told", "name"),
    [
        (None, "mother-model"),
        ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
        ("/data/mother-model", "mother-model"),
        ("", "mother-model"),
    ],
)
def test_an_adapter_names_its_base_by_no_path(tiny_dir, tmp_path, told, name):
    base = tmp_path / "mother-model"
    shutil.copytree(tiny_dir, base)
    config = json.loads((base / "config.json").read_text()) | ({} if told is None else {"_name_or_path": told})
    (base / "config.json").write_text(json.dumps(config))
    adapter = write_adapter(tmp_path / "adapter", base)
    name_base(base, adapter)
    saved = json.loads((adapter / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == name
    assert saved["target_modules"] == ["q_proj", "v_proj"]


def test_the_results_config_is_the_bases_own(tiny_dir, tmp_path):
    """With the keys of the version that wrote the base, which a server built on that version looks for."""
    base = {"model_type": "qwen2", "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "tie_word_embeddings": True}
    saved = {"model_type": "qwen2", "rope_parameters": {"rope_theta": 1e6}, "dtype": "float16", "use_cache": False}
    for folder, config in ((tmp_path / "base", base), (tmp_path / "final", saved)):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    keep_base_config(tmp_path / "base", tmp_path / "final")
    assert json.loads((tmp_path / "final/config.json").read_text()) == base | {"torch_dtype": "float16"}


def test_embeddings_that_training_untied_are_told(tmp_path):
    for name, is_tied in (("base", True), ("final", False)):
        (tmp_path / name).mkdir()
        config = {"tie_word_embeddings": is_tied, "dtype": "float32"}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    keep_base_config(tmp_path / "base", tmp_path / "final")
    saved = json.loads((tmp_path / "final/config.json").read_text())
    assert saved == {"tie_word_embeddings": False, "dtype": "float32", "torch_dtype": "float32"}


def test_other_ranks_wait_for_the_result(paths):
    wait_for_final(paths, deadline_s=0)  # it isn't there: the deadline ends the wait
    assert not Path(paths.final).exists()
    rank_0 = threading.Timer(0.3, Path(paths.final).mkdir)
    rank_0.start()
    wait_for_final(paths, deadline_s=float("inf"))
    assert Path(paths.final).is_dir()
    rank_0.join()
