"""Step borders: stop files, looks, checkpoints that are due, steps gone wrong, progress lines."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from corpus_builder.errors import ProjectError
from corpus_builder.sample import CLASSES
from trainer.callbacks import Border, Report, Seen, read_stop, train_guarded
from trainer.checkpoints import Mark, mark_complete, read_mark
from trainer.device import Place
from trainer.looks import Looks
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


class Engine:
    """A DeepSpeed engine of fp16, by what the guard reads of it; a test says how the next step went."""

    def __init__(self) -> None:
        self.norm = 1.0
        self.optimizer = SimpleNamespace(overflow=False, loss_scaler=SimpleNamespace(cur_scale=65536.0, min_scale=1.0))

    def fp16_enabled(self) -> bool:
        return True

    def get_global_grad_norm(self) -> float:
        return self.norm

    def overflow(self, scale: float) -> None:
        self.norm, self.optimizer.overflow, self.optimizer.loss_scaler.cur_scale = math.inf, True, scale


class Trainer:
    """What a border asks of a Trainer: a meter, a model, who clips, and its logs."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.meter = LossMeter(torch.device("cpu"))
        self.model = self.model_wrapped = torch.nn.Linear(4, 4)
        self.deepspeed, self.is_deepspeed_enabled = engine, engine is not None
        self.accelerator = SimpleNamespace(scaler=None, clip_grad_norm_=lambda *_: torch.tensor(self.clipped))
        self.clipped = 1.0
        self.logged: list[dict[str, float]] = []
        self.state = SimpleNamespace(global_step=0)

    def log(self, logs: dict[str, float]) -> None:
        self.logged.append(logs)


class HeldOut:
    """Looks that find one loss after another."""

    def __init__(self, *losses: float) -> None:
        self.losses = list(losses)

    def look(self, model: object, device: torch.device) -> dict[str, float]:
        loss = self.losses.pop(0)
        return {"loss": loss, "loss_soul": loss + 1}


def make_border(paths, *, engine: Engine | None = None, held_out: HeldOut | None = None, looks=None, **keys) -> Border:
    made = Border(make_recipe(**keys), paths, FIRST, Voice(FIRST), held_out=held_out, looks=looks or Looks())
    made.trainer = Trainer(engine)
    Path(paths.checkpoints).mkdir(parents=True)
    made.on_train_begin(ARGS, None, None)
    return made


@pytest.fixture
def border(paths) -> Border:
    return make_border(paths)


def end_step(border: Border, step: int, *, total: int = 100) -> Control:
    control = Control()
    border.trainer.state.global_step = step
    border.trainer.accelerator.clip_grad_norm_([])
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
    assert capsys.readouterr().out == "ZY_EVENT name=nan_stopped step=7 reason=loss_not_finite\n"


def test_a_gradient_that_is_not_finite_stops_the_run_before_it_is_saved(border, capsys):
    border.trainer.clipped = math.nan
    with pytest.raises(ProjectError, match="gradient_not_finite") as caught:
        end_step(border, 10)
    assert caught.value.values == {"norm": "nan", "step": 10}
    assert capsys.readouterr().out == "ZY_EVENT name=nan_stopped step=10 reason=gradient_not_finite\n"


def test_overflows_of_fp16_are_told_and_counted(paths, capsys):
    engine = Engine()
    border = make_border(paths, engine=engine)
    for step, scale in ((1, 65536.0), (2, 32768.0)):
        engine.overflow(scale)
        assert end_step(border, step) == Control()
    engine.norm, engine.optimizer.overflow = 1.0, False
    assert end_step(border, 3) == Control()
    assert capsys.readouterr().out.splitlines() == [
        "ZY_EVENT name=scale_reduced step=1 scale=65536 skipped=1",
        "ZY_EVENT name=scale_reduced step=2 scale=32768 skipped=2",
    ]
    assert (border.seen.scale, border.seen.skipped) == (32768.0, 2)


def test_the_scale_at_its_minimum_stops_the_run(paths, capsys):
    engine = Engine()
    border = make_border(paths, engine=engine)
    engine.overflow(1.0)
    end_step(border, 1)
    with pytest.raises(ProjectError, match="loss_scale_minimum"):
        end_step(border, 2)
    assert capsys.readouterr().out.splitlines()[-1] == "ZY_EVENT name=nan_stopped step=2 reason=loss_scale_minimum"


def test_what_deepspeed_says_at_the_minimum_becomes_our_error(paths, capsys):
    border = make_border(paths, engine=Engine())

    def give_up(**_):
        raise Exception("Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.")

    border.trainer.train = give_up
    border.trainer.state.global_step = 6
    with pytest.raises(ProjectError) as caught:
        train_guarded(border.trainer, border, None)
    assert (caught.value.code, caught.value.values) == ("loss_scale_minimum", {"scale": 1.0, "step": 7})
    assert "reason=loss_scale_minimum" in capsys.readouterr().out


def test_other_exceptions_pass(border):
    def fail(**_):
        raise ValueError("something else")

    border.trainer.train = fail
    with pytest.raises(ValueError, match="something else"):
        train_guarded(border.trainer, border, None)


def test_a_save_that_does_not_fit_ends_the_run_with_numbers(border, paths):
    last = Path(paths.checkpoint(5))
    last.mkdir()
    with (last / "huge").open("wb") as file:
        file.truncate(1 << 42)  # sparse: takes no room
    mark_complete(last, Mark(step=5, ranks=1))
    assert end_step(border, 7) == Control()
    with pytest.raises(ProjectError, match="disk_short") as caught:
        end_step(border, 10)
    assert caught.value.values["needed_gib"] > 4096 > caught.value.values["free_gib"]
    assert (last / CHECKPOINT_COMPLETE).is_file()


def test_a_look_comes_with_each_checkpoint_and_at_the_end(paths, capsys):
    border = make_border(paths, held_out=HeldOut(3.0, 2.0))
    assert [end_step(border, step).should_save for step in (9, 10, 100)] == [False, True, False]
    assert capsys.readouterr().out.splitlines() == [
        "ZY_EVENT name=evaluated step=10 loss=3.000000 loss_soul=4.000000",
        "ZY_EVENT name=evaluated step=100 loss=2.000000 loss_soul=3.000000",
    ]
    assert border.trainer.logged == [
        {"eval_loss": 3.0, "eval_loss_soul": 4.0},
        {"eval_loss": 2.0, "eval_loss_soul": 3.0},
    ]
    assert border.last_loss == 2.0


def test_looks_have_their_own_pace(paths):
    border = make_border(paths, held_out=HeldOut(3.0, 2.0, 1.0), eval_steps=4)
    for step in range(1, 11):
        end_step(border, step)
    assert border.seen.step == 10
    assert border.trainer.logged == [{"eval_loss": loss, "eval_loss_soul": loss + 1} for loss in (3.0, 2.0, 1.0)]


def test_who_wants_to_stop_now_does_not_wait_for_a_look(paths):
    border = make_border(paths, held_out=HeldOut())
    Path(paths.stop).write_text("now")
    assert end_step(border, 10) == Control(should_training_stop=True)


def test_a_stop_between_looks_does_not_wait_for_one(paths):
    border = make_border(paths, held_out=HeldOut())
    Path(paths.stop).write_text("checkpoint")
    assert end_step(border, 7) == Control(should_save=True, should_training_stop=True)


def test_a_look_that_was_due_is_not_lost_by_a_stop(paths):
    border = make_border(paths, held_out=HeldOut(3.0))
    Path(paths.stop).write_text("checkpoint")
    assert end_step(border, 10).should_save
    assert border.last_loss == 3.0


def test_a_held_out_loss_that_is_not_finite_stops_the_run_before_it_is_saved(paths):
    border = make_border(paths, held_out=HeldOut(math.nan))
    with pytest.raises(ProjectError, match="loss_not_finite"):
        end_step(border, 10)


def test_looks_without_improvement_stop_early(paths, capsys):
    border = make_border(paths, held_out=HeldOut(3.0, 3.1, 3.0, 2.0), early_stopping_patience=2)
    assert [end_step(border, step).should_training_stop for step in (10, 20, 30)] == [False, False, True]
    assert border.stopped is None, "an early end is no request: the result is made"
    assert capsys.readouterr().out.splitlines()[-1] == "ZY_EVENT name=stopped_early step=30 best_step=10"


def test_patience_goes_on_after_a_resume(paths):
    border = make_border(paths, held_out=HeldOut(3.1), looks=Looks(3.0, 10, 1), early_stopping_patience=2)
    assert end_step(border, 30).should_training_stop


def test_looks_by_the_clock_do_not_wear_patience_out(paths):
    border = make_border(paths, held_out=HeldOut(3.0, 3.1), early_stopping_patience=1)
    end_step(border, 10)
    border._saved_at_s -= 30 * 60
    assert end_step(border, 13) == Control(should_save=True)


def test_a_checkpoint_knows_its_held_out_loss_and_where_patience_stood(paths):
    border = make_border(paths, held_out=HeldOut(3.0, 3.5))
    for step in (10, 20):
        end_step(border, step)
        Path(paths.checkpoint(step)).mkdir()
        border.on_save(ARGS, SimpleNamespace(global_step=step), Control())
    mark = read_mark(Path(paths.checkpoint(20)))
    assert (mark.eval_loss, mark.best_loss, mark.best_step, mark.stale_looks) == (3.5, 3.0, 10, 1)
    Path(paths.checkpoint(23)).mkdir()
    border.on_save(ARGS, SimpleNamespace(global_step=23), Control())
    assert read_mark(Path(paths.checkpoint(23))).eval_loss is None


def test_a_mark_is_plain_json(paths, border):
    Path(paths.checkpoint(3)).mkdir()
    border.on_save(ARGS, SimpleNamespace(global_step=3), Control())
    text = (Path(paths.checkpoint(3)) / CHECKPOINT_COMPLETE).read_text()
    assert json.loads(text, parse_constant=pytest.fail)["best_loss"] is None


def test_a_checkpoint_is_marked_and_old_ones_go(border, paths, capsys):
    for step in (1, 2, 3, 4):
        Path(paths.checkpoint(step)).mkdir()
        border.on_save(ARGS, SimpleNamespace(global_step=step), Control())
    left = sorted(path.name for path in Path(paths.checkpoints).iterdir())
    assert left == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]
    assert (Path(paths.checkpoint(4)) / CHECKPOINT_COMPLETE).is_file()
    assert capsys.readouterr().out.splitlines()[-1] == "ZY_EVENT name=checkpoint_saved step=4"


def test_other_ranks_are_silent(capsys):
    Voice(SECOND).event("started", ranks=2)
    assert capsys.readouterr().out == ""


def make_report(**seen) -> Report:
    report = Report(make_recipe(), Voice(FIRST), Seen(**seen), attempt=2)
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


def test_a_line_carries_the_look_of_its_step_and_the_scale(capsys):
    report = make_report(step=3, held_out={"loss": 1.5, "loss_tool": 2.5}, scale=1024.0, skipped=4)
    for step in (3, 5):
        state, control = SimpleNamespace(global_step=step, max_steps=9, epoch=0.5), Control()
        report.on_step_end(ARGS, state, control)
        assert control.should_log, "a look makes a line due"
        report.on_log(ARGS, state, control, logs={"loss": 1.0})
    first, second = (parse_line(line)[0].extras for line in capsys.readouterr().out.splitlines())
    assert (first["eval_loss"], first["eval_loss_tool"], first["scale"], first["skipped"]) == (1.5, 2.5, 1024.0, 4.0)
    assert "eval_loss" not in second


@pytest.mark.parametrize(("epoch", "number"), [(None, 0), (0.0, 0), (0.5, 0), (1.0, 1), (1.9999999999, 2), (2.25, 2)])
def test_the_order_is_told_its_epoch(epoch, number):
    report = make_report()
    report.on_epoch_begin(ARGS, SimpleNamespace(epoch=epoch), Control())
    assert report.trainer.order.epochs == [number]
