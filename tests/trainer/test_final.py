"""The result: whole by rename, with our template, pointed to in one rename; nothing old is deleted."""

import json
import os
import shutil
from pathlib import Path

import pytest

from corpus_builder.errors import ProjectError
from corpus_builder.frame import CHAT_TEMPLATE, Frame, template_of
from tests.tokenizers_real import tiny_tokenizer_json
from trainer.final import check_template, partial_path, point_version, publish_final, stop_at_turn_end, write_tokenizer
from trainer.run_paths import DataPaths, run_paths

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
    class Config:
        eos_token_id = before

    class Model:
        generation_config = Config()

    frame = Frame((tiny_dir / "tokenizer.json").read_text("utf-8"))
    assert frame.im_end == 2
    stop_at_turn_end(Model(), frame)
    assert Model.generation_config.eos_token_id == after


def test_the_result_names_no_class_that_only_transformers_5_knows(smollm2_dir, tmp_path):
    write_tokenizer(smollm2_dir, tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_the_template_is_in_both_places_that_readers_look(tiny_dir, tmp_path):
    write_tokenizer(tiny_dir, tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE
