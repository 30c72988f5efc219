"""ZeRO-3 with optimizer offload on two CPU ranks, for real, on a random model of two layers."""

from pathlib import Path

import pytest

from corpus_builder.frame import CHAT_TEMPLATE, load_frame, template_of
from tests.tiny_run import make_run, tiny_samples, write_base_model
from trainer.arguments import Schedule, learning_rate_at
from trainer.base_model import find_model_faults
from trainer.checkpoints import complete_checkpoints
from trainer.encode import encode_corpus
from trainer.remedies import find_remedy

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
#: Of a run that nothing disturbs, without held-out samples and checkpoints; others may come between.
KNOWN_EVENTS = ["labels_checked", "precision", "started", "final_saved", "finished"]
ROWS_PER_STEP = {"gradient_accumulation_steps": 1}  # two ranks x two rows


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory) -> Path:
    return write_base_model(tmp_path_factory.mktemp("base") / "base", tiny_samples())


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, base_dir):
    """A run of two ranks that nothing disturbs, and how it ended."""
    run = make_run(tmp_path_factory.mktemp("two"), base_dir, tiny_samples(), **ROWS_PER_STEP)
    return run, run.launch()


def test_two_ranks_train_to_a_result(two_ranks):
    run, ended = two_ranks
    assert ended.exit_code == 0, ended.stderr[-4000:]
    assert find_model_faults(run.paths.final) == []
    assert [name for name in ended.events if name in KNOWN_EVENTS] == KNOWN_EVENTS
    assert ended.points[-1].loss < 0.7 * ended.points[0].loss
    assert {"loss_soul", "loss_tool", "tok", "gnorm", "attempt"} <= set().union(*(p.extras for p in ended.points))


def test_the_log_of_a_run_that_went_well_shows_no_known_failure(two_ranks):
    _, ended = two_ranks
    assert find_remedy(ended.stdout + ended.stderr) is None


def test_the_learning_rate_is_the_cosine(two_ranks, base_dir):
    """DeepSpeed's own optimizer reports the rate, so no second owner of the schedule can hide."""
    run, ended = two_ranks
    corpus = encode_corpus(tiny_samples(), load_frame(base_dir), max_seq_len=256)
    schedule = Schedule(run.recipe, rows=len(corpus.train), tokens=corpus.train.tokens, ranks=2)
    assert schedule.steps == 24
    assert schedule.warmup_steps == 3
    assert [point.step for point in ended.points] == list(range(1, 25))
    for point in ended.points:
        assert point.lr == pytest.approx(learning_rate_at(point.step, run.recipe, schedule), rel=1e-5, abs=1e-12)


def test_the_result_loads_and_renders_the_frame(two_ranks):
    from transformers import AutoModelForCausalLM

    run, _ = two_ranks
    final = Path(run.paths.final)
    model = AutoModelForCausalLM.from_pretrained(final)
    assert model.generation_config.eos_token_id == [load_frame(final).im_end]
    assert template_of(final) == CHAT_TEMPLATE


def test_one_process_gives_the_same_curve(two_ranks, base_dir, tmp_path):
    _, ended = two_ranks
    alone = make_run(tmp_path, base_dir, tiny_samples(), gradient_accumulation_steps=2).launch(alone=True)
    assert alone.exit_code == 0, alone.stderr[-4000:]
    assert [point.loss for point in alone.points] == pytest.approx([point.loss for point in ended.points], abs=1e-4)


def test_a_stopped_run_goes_on_where_it_was(two_ranks, base_dir, tmp_path):
    _, undisturbed = two_ranks
    run = make_run(tmp_path, base_dir, tiny_samples(), **ROWS_PER_STEP)
    first = run.launch(stop_at=8)
    assert first.exit_code == 0, first.stderr[-4000:]
    assert first.events[-2:] == ["checkpoint_saved", "stop_requested"]
    assert not Path(run.paths.final).exists()
    stopped_at = first.points[-1].step
    assert 8 <= stopped_at < 24
    assert [path.name for path in complete_checkpoints(Path(run.paths.checkpoints))] == [f"checkpoint-{stopped_at}"]

    Path(run.paths.stop).unlink()
    second = run.launch()
    assert second.exit_code == 0, second.stderr[-4000:]
    assert "resumed" in second.events
    assert [point.step for point in first.points + second.points] == list(range(1, 25))
    losses = [point.loss for point in first.points + second.points]
    assert losses == pytest.approx([point.loss for point in undisturbed.points], abs=1e-6)
    assert find_model_faults(run.paths.final) == []


def test_an_error_of_all_ranks_is_told_once(tmp_path):
    ended = make_run(tmp_path, tmp_path / "none", tiny_samples()).launch()
    assert [error.code for error in ended.errors] == ["base_model_missing"]
    assert ended.exit_code == 2
