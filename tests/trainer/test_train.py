"""The recipe page: what it refuses before anything heavy, and whole runs of one process on a tiny model."""

import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from corpus_builder.errors import ProjectError
from corpus_builder.frame import CHAT_TEMPLATE, load_frame, template_of
from tests.tiny_run import make_run, tiny_samples
from trainer.arguments import Schedule, learning_rate_at
from trainer.base_model import find_model_faults
from trainer.device import Place
from trainer.encode import encode_corpus
from trainer.final import point_version
from trainer.material import check_steps
from trainer.recipe import Recipe
from trainer.request import load_request, read_attempt
from trainer.result import link_output, repair_pointer
from trainer.run_paths import run_paths
from trainer.train import fail


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_dir):
    """A run of one process that nothing disturbs, and how it ended."""
    run = make_run(tmp_path_factory.mktemp("alone"), tiny_dir, tiny_samples(), gradient_accumulation_steps=2)
    return run, run.launch(alone=True)


class Said(list):
    """A voice that keeps what is said."""

    def say(self, line: str) -> None:
        self.append(line)


def recipe_of(**keys) -> Recipe:
    return Recipe.model_validate({"name": "t", "version": "t", "plan": "t", "base_model_dir": "/b"} | keys)


@pytest.mark.e2e
def test_a_run_ends_with_its_result(trained):
    run, ended = trained
    assert (ended.exit_code, ended.stderr.count("ZY_ERROR")) == (0, 0)
    assert find_model_faults(run.paths.final) == []
    assert ended.events == ["engine", "labels_checked", "precision", "started", "final_saved", "finished"]
    pointer = Path(run.data.version_final(run.recipe.version))
    assert pointer.resolve() == Path(run.paths.final).resolve()


@pytest.mark.e2e
def test_progress_is_the_promised_curve(trained, tiny_dir):
    run, ended = trained
    corpus = encode_corpus(tiny_samples(), load_frame(tiny_dir), max_seq_len=256)
    schedule = Schedule(run.recipe, rows=len(corpus.train), tokens=corpus.train.tokens, ranks=1)
    assert [point.step for point in ended.points] == list(range(1, schedule.steps + 1))
    for point in ended.points:
        assert point.lr == pytest.approx(learning_rate_at(point.step, run.recipe, schedule), rel=1e-5, abs=1e-12)
    assert ended.points[-1].loss < 0.7 * ended.points[0].loss


@pytest.mark.e2e
def test_the_result_loads_and_renders_the_frame(trained):
    from transformers import AutoModelForCausalLM

    run, _ = trained
    model = AutoModelForCausalLM.from_pretrained(run.paths.final)
    assert model.generation_config.eos_token_id == [load_frame(Path(run.paths.final)).im_end]
    assert template_of(Path(run.paths.final)) == CHAT_TEMPLATE


@pytest.mark.e2e
def test_the_first_batch_is_for_its_owner_only(trained):
    run, ended = trained
    path = Path(run.paths.first_batch)
    text = path.read_text("utf-8")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "⟦The " in text
    assert "晚安<|im_end|>⟧" in text
    assert "晚安" not in ended.stdout + ended.stderr


@pytest.mark.e2e
def test_folders_are_for_their_owner_only(trained):
    run, _ = trained
    assert stat.S_IMODE(Path(run.paths.final).stat().st_mode) == 0o700


@pytest.mark.e2e
def test_a_finished_run_is_not_trained_again(trained):
    run, _ = trained
    before = (Path(run.paths.final) / "model.safetensors").stat().st_mtime_ns
    ended = run.launch(alone=True)
    assert (ended.exit_code, ended.points) == (0, [])
    assert (Path(run.paths.final) / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.e2e
def test_a_stopped_run_goes_on_to_the_same_weights(trained, tiny_dir, tmp_path):
    undisturbed, undisturbed_ended = trained
    run = make_run(tmp_path, tiny_dir, tiny_samples(), gradient_accumulation_steps=2)
    Path(run.paths.stop).write_text("checkpoint")
    first = run.launch(alone=True)
    assert (first.exit_code, first.events[-2:]) == (0, ["checkpoint_saved", "stop_requested"])
    assert [point.step for point in first.points] == [1]
    assert not Path(run.paths.final).exists()
    Path(run.paths.stop).unlink()
    second = run.launch(alone=True)
    assert "resumed" in second.events
    assert [point.loss for point in first.points + second.points] == [p.loss for p in undisturbed_ended.points]
    weights = [(Path(r.paths.final) / "model.safetensors").read_bytes() for r in (undisturbed, run)]
    assert weights[0] == weights[1]


@pytest.mark.e2e
def test_a_loss_that_is_not_finite_fails_the_run(tiny_dir, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_dir, tmp_path / "base")
    tensors = load_file(tmp_path / "base/model.safetensors")
    tensors["lm_head.weight"][0, 0] = torch.nan
    save_file(tensors, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    run = make_run(tmp_path / "data", tmp_path / "base", tiny_samples())
    ended = run.launch(alone=True)
    assert ended.exit_code == 6
    assert [error.code for error in ended.errors] == ["loss_not_finite"]
    assert ended.events[-1] == "nan_stopped"
    assert not Path(run.paths.final).exists()


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("keys", "code", "exit_code"),
    [
        ({"precision": "bf16"}, "precision_unsupported", 4),
        ({"allow_few_steps": False}, "few_steps", 2),
        ({"max_seq_len": 8}, "sample_too_long", 2),
        ({"data_path": "/no/such/file.jsonl"}, "config_unreadable", 2),
    ],
)
def test_what_is_refused_before_the_model_is_loaded(tiny_dir, tmp_path, keys, code, exit_code):
    run = make_run(tmp_path, tiny_dir, tiny_samples(), **keys)
    ended = run.launch(alone=True)
    assert ([error.code for error in ended.errors], ended.exit_code) == ([code], exit_code)
    assert "started" not in ended.events


@pytest.mark.e2e
def test_a_missing_base_model(tmp_path):
    ended = make_run(tmp_path, tmp_path / "none", tiny_samples()).launch(alone=True)
    assert ([error.code for error in ended.errors], ended.exit_code) == (["base_model_missing"], 2)


@pytest.mark.parametrize("text", ["", "{}", '{"recipe": 1, "data": "/d", "version": "v"}'])
def test_an_unreadable_request(tmp_path, text):
    (tmp_path / "recipe.json").write_text(text)
    with pytest.raises(ProjectError, match="config_unreadable"):
        load_request(tmp_path / "recipe.json")


def test_a_request_with_an_unknown_key(tmp_path, tiny_dir):
    run = make_run(tmp_path, tiny_dir, tiny_samples())
    packed = json.loads(Path(run.paths.recipe).read_text())
    packed["recipe"]["learning_rat"] = 1
    Path(run.paths.recipe).write_text(json.dumps(packed))
    with pytest.raises(ProjectError, match="config_invalid"):
        load_request(Path(run.paths.recipe))


@pytest.mark.parametrize(("steps", "is_said"), [(30, True), (99, True), (100, False)])
def test_few_steps_are_said(steps, is_said):
    said = Said()
    check_steps(steps, recipe_of(), said)
    assert bool(said) is is_said


def test_too_few_steps_are_refused_unless_allowed():
    with pytest.raises(ProjectError, match="few_steps"):
        check_steps(29, recipe_of(), Said())
    check_steps(29, recipe_of(allow_few_steps=True), Said())


def test_the_attempt_is_the_supervisors(tmp_path):
    assert read_attempt(tmp_path / "none.json") == 1
    (tmp_path / "supervisor.json").write_text(json.dumps({"attempts": [{"attempt": 1}, {"attempt": 2}]}))
    assert read_attempt(tmp_path / "supervisor.json") == 2


def test_an_output_folder_elsewhere_is_linked(tmp_path, tiny_dir):
    run = make_run(tmp_path / "data", tiny_dir, tiny_samples(), output_dir=str(tmp_path / "big-disk"))
    link_output(run.recipe, run.paths)
    link_output(run.recipe, run.paths)
    assert Path(run.paths.checkpoints).resolve() == tmp_path / "big-disk" / run.paths.run_id


@pytest.mark.parametrize(("numbers", "stays"), [((None, None), True), ((7, 8), False), ((8, 7), True)])
def test_the_pointer_of_a_newer_run_stays_whatever_the_clock_said(tmp_path, tiny_dir, numbers, stays):
    """The run that the pointer shows has the later id; the boxes' numbers, where there are any, know better."""
    run = make_run(tmp_path / "data", tiny_dir, tiny_samples())
    request = load_request(Path(run.paths.recipe))
    later = run_paths(request.data.data, request.version, "29991231-235959-ffff")
    for paths, number in zip((later, run.paths), numbers, strict=True):
        os.makedirs(paths.final)
        os.makedirs(paths.folder, exist_ok=True)
        if number is not None:
            Path(paths.supervisor_spec).write_text(json.dumps({"number": number}))
    point_version(later, request.data.version_final(request.version))
    repair_pointer(request, Said())
    shown = os.readlink(request.data.version_final(request.version))
    assert shown == f"{later.run_id if stays else run.paths.run_id}/final"


def test_a_failed_rank_tells_its_error(capsys):
    error = ProjectError("base_model_missing", path="/b")
    assert fail(error, Place(0, 0, 2, True)) == 2
    assert capsys.readouterr().err.startswith("ZY_ERROR ")
