"""Step borders: stop files, checkpoints that are due, a loss that is not finite, progress lines."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from corpus_builder.errors import ProjectError
from corpus_builder.sample import CLASSES
from trainer.callbacks import Border, Report, read_stop
from trainer.device import Place
from trainer.loss import LossMeter
from trainer.progress import Progress, parse_line
from trainer.recipe import Recipe
from trainer.run_paths import CHECKPOINT_COMPLETE, run_paths
from trainer.voice import Voice

FIRST, SECOND = Place(0, 0, 1, False), Place(1, 1, 2, True)
ARGS = SimpleNamespace(device=torch.device("cpu"))


@dataclass
class Control:
    should_save: bool = False
    should_log: bool = False
    should_training_stop: bool = False


@dataclass
class Order:
    epochs: list[int] = field(default_factory=list)

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def make_recipe(**keys) -> Recipe:
    values = {
        "name": "t",
        "version": "t",
        "plan": "t",
        "base_model_dir": "/b",
        "save_steps": 10,
        "report_every_steps": 5,
    }
    return Recipe.model_validate(values | keys)


@pytest.fixture
def paths(tmp_path):
    found = run_paths(str(tmp_path), "t", "20260101-000000-abcd")
    Path(found.folder).mkdir(parents=True)
    return found


@pytest.fixture
def border(paths) -> Border:
    made = Border(make_recipe(), paths, FIRST, Voice(FIRST))
    made.trainer = SimpleNamespace(meter=LossMeter(torch.device("cpu")))
    return made


def end_step(border: Border, step: int, *, total: int = 100) -> Control:
    control = Control()
    border.on_step_end(ARGS, SimpleNamespace(global_step=step, max_steps=total), control)
    return control


@pytest.mark.parametrize(
    ("text", "wanted"), [("checkpoint", "checkpoint"), ("now\n", "now"), ("", "checkpoint"), ("please", "checkpoint")]
)
def test_stop_files(tmp_path, text, wanted):
    (tmp_path / "stop").write_text(text)
    assert read_stop(tmp_path / "stop") == wanted


def test_no_stop_file(tmp_path):
    assert read_stop(tmp_path / "stop") is None


def test_an_ordinary_step_changes_nothing(border):
    assert end_step(border, 7) == Control()


def test_a_checkpoint_is_due_by_steps(border):
    assert end_step(border, 10) == Control(should_save=True)


def test_a_checkpoint_is_due_by_minutes(border):
    border._saved_at_s -= 30 * 60
    assert end_step(border, 7) == Control(should_save=True)


def test_the_last_step_leaves_the_saving_to_final(border):
    assert end_step(border, 100) == Control()


def test_stop_with_a_checkpoint(border, paths):
    Path(paths.stop).write_text("checkpoint")
    assert end_step(border, 7) == Control(should_save=True, should_training_stop=True)
    assert border.stopped == "checkpoint"


def test_stop_now_saves_nothing(border, paths):
    Path(paths.stop).write_text("now")
    assert end_step(border, 10) == Control(should_training_stop=True)
    assert border.stopped == "now"


def test_a_stop_at_the_last_step_lets_the_run_finish(border, paths):
    Path(paths.stop).write_text("checkpoint")
    assert end_step(border, 100) == Control()
    assert border.stopped is None


def test_a_loss_that_is_not_finite_stops_the_run(border, capsys):
    one_class = torch.zeros(1, dtype=torch.int64)
    border.trainer.meter.add(torch.tensor([float("nan")]), torch.ones(1), one_class, torch.zeros(len(CLASSES)))
    with pytest.raises(ProjectError, match="loss_not_finite") as caught:
        end_step(border, 7)
    assert caught.value.values == {"loss": "nan", "step": 7}
    assert capsys.readouterr().out == "ZY_EVENT name=nan_stopped step=7\n"


def test_a_checkpoint_is_marked_and_old_ones_go(border, paths, capsys):
    for step in (1, 2, 3, 4):
        Path(paths.checkpoint(step)).mkdir(parents=True)
        border.on_save(ARGS, SimpleNamespace(global_step=step), Control())
    left = sorted(path.name for path in Path(paths.checkpoints).iterdir())
    assert left == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]
    assert (Path(paths.checkpoint(4)) / CHECKPOINT_COMPLETE).is_file()
    assert capsys.readouterr().out.splitlines()[-1] == "ZY_EVENT name=checkpoint_saved step=4"


def test_other_ranks_are_silent(capsys):
    Voice(SECOND).event("started", ranks=2)
    assert capsys.readouterr().out == ""


def make_report() -> Report:
    report = Report(make_recipe(), Voice(FIRST), attempt=2)
    report.trainer = SimpleNamespace(meter=LossMeter(torch.device("cpu")), order=Order())
    return report


def test_a_line_carries_what_happened_since_the_last(capsys):
    report, state, control = make_report(), SimpleNamespace(global_step=5, max_steps=9, epoch=0.5), Control()
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.001}])
    taught = torch.tensor([0, 0, 1, 0])
    report.trainer.meter.add(torch.tensor([2.0, 4.0]), torch.tensor([0.5, 0.5]), torch.tensor([2, 2]), taught)
    report.on_pre_optimizer_step(ARGS, state, control, optimizer=optimizer)
    report.on_step_end(ARGS, state, control)
    assert control.should_log
    report.on_log(ARGS, state, control, logs={"loss": 99.0, "grad_norm": 1.5})
    (point,) = parse_line(capsys.readouterr().out)
    assert isinstance(point, Progress)
    assert (point.step, point.total, point.loss, point.lr, point.epoch, point.total_epochs) == (
        5,
        9,
        3.0,
        0.001,
        0.5,
        5.0,
    )
    assert point.extras["loss_tool"] == 3.0
    assert (point.extras["gnorm"], point.extras["attempt"]) == (1.5, 2.0)
    assert point.thr > 0
    assert point.extras["tok"] == pytest.approx(2 * point.thr, rel=1e-5)


@pytest.mark.parametrize(
    ("step", "is_stopping", "is_due"), [(4, False, False), (5, False, True), (9, False, True), (4, True, True)]
)
def test_when_a_line_is_due(step, is_stopping, is_due, capsys):
    report, control = make_report(), Control(should_training_stop=is_stopping)
    state = SimpleNamespace(global_step=step, max_steps=9, epoch=0.5)
    report.on_step_end(ARGS, state, control)
    assert control.should_log is is_due
    report.on_log(ARGS, state, control, logs={"loss": 1.0})
    assert bool(capsys.readouterr().out) is is_due


def test_a_line_without_trained_tokens_does_not_know_the_loss(capsys):
    report, state = make_report(), SimpleNamespace(global_step=5, max_steps=9, epoch=0.5)
    report.on_log(ARGS, state, Control(), logs={"loss": 0.0})
    assert " loss=unknown " in capsys.readouterr().out


@pytest.mark.parametrize(("epoch", "number"), [(None, 0), (0.0, 0), (0.5, 0), (1.0, 1), (1.9999999999, 2), (2.25, 2)])
def test_the_order_is_told_its_epoch(epoch, number):
    report = make_report()
    report.on_epoch_begin(ARGS, SimpleNamespace(epoch=epoch), Control())
    assert report.trainer.order.epochs == [number]
