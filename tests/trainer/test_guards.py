"""What stops a run and what does not: the judge on its own, and the reader before engines that are scripted."""

import math
from types import SimpleNamespace

import pytest
import torch

from corpus_builder.errors import ProjectError
from trainer.guards import MOST_SKIPPED, WINDOW_STEPS, GradientNorm, Guard, StepHealth, known_failure, read_step_health

GOOD = StepHealth(grad_norm=1.5)


def scaled(scale: float, *, is_skipped: bool = False, least: float | None = 1.0) -> StepHealth:
    norm = math.inf if is_skipped else 1.5  # what DeepSpeed reports
    return StepHealth(grad_norm=norm, was_skipped=is_skipped, scale=scale, least_scale=least)


def judge_all(steps, guard=None):
    guard = guard or Guard()
    return [guard.judge(health, step) for step, health in enumerate(steps, 1)]


def codes(errors):
    return [None if error is None else error.code for error in errors]


def test_a_healthy_run_goes_on():
    assert judge_all([GOOD] * 200) == [None] * 200


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_stops(loss):
    (error,) = judge_all([StepHealth(grad_norm=1.0, loss=loss)])
    assert (error.code, error.values) == ("loss_not_finite", {"loss": str(loss), "step": 1})


@pytest.mark.parametrize(("norm", "word"), [(math.nan, "nan"), (math.inf, "inf"), (-1.0, "inf")])
def test_a_gradient_that_is_no_number_stops_where_there_is_no_scaler(norm, word):
    errors = judge_all([GOOD, StepHealth(grad_norm=norm)])
    assert codes(errors) == [None, "gradient_not_finite"]
    assert errors[1].values == {"norm": word, "step": 2}


def test_a_loss_of_zero_beside_a_gradient_of_nan_is_found():
    """What public logs hold: `{'loss': 0.0, 'grad_norm': nan}`."""
    assert codes(judge_all([StepHealth(loss=0.0, grad_norm=math.nan)])) == ["gradient_not_finite"]


def test_a_step_that_is_skipped_without_a_scaler_stops():
    assert codes(judge_all([StepHealth(grad_norm=None, was_skipped=True)])) == ["gradient_not_finite"]


def test_a_gradient_that_nobody_measured_is_no_fault():
    assert judge_all([StepHealth(grad_norm=None)]) == [None]


def test_a_healthy_fp16_run_begins_with_overflows():
    """DeepSpeed from 2^16 with hysteresis 2: the first overflow lowers nothing."""
    guard = Guard()
    steps = [scaled(2**16, is_skipped=True), scaled(2**15, is_skipped=True), scaled(2**14, is_skipped=True)]
    assert judge_all([*steps, *[scaled(2**14)] * 100], guard) == [None] * 103
    assert guard.skipped == 3


def test_an_overflow_at_the_least_scale_stops():
    errors = judge_all([scaled(2, is_skipped=True), scaled(1, is_skipped=True), scaled(1, is_skipped=True)])
    assert codes(errors) == [None, None, "loss_scale_minimum"]
    assert errors[2].values == {"scale": 1, "step": 3}


def test_the_least_scale_itself_is_no_fault():
    assert judge_all([scaled(1)] * 100) == [None] * 100


def test_a_static_scale_has_no_least():
    assert judge_all([scaled(128, least=None), scaled(128, is_skipped=True, least=None)]) == [None, None]


def test_more_than_half_of_the_last_steps_skipped_stops():
    errors = judge_all([scaled(2**40, is_skipped=True)] * (MOST_SKIPPED + 1))
    assert codes(errors) == [None] * MOST_SKIPPED + ["too_many_skipped"]
    assert errors[-1].values == {"skipped": MOST_SKIPPED + 1, "window": WINDOW_STEPS, "step": MOST_SKIPPED + 1}


def test_every_second_step_skipped_is_just_allowed():
    steps = [scaled(2**40, is_skipped=step % 2 == 0) for step in range(400)]
    assert judge_all(steps) == [None] * 400


def test_skips_that_are_long_past_do_not_count():
    guard = Guard()
    judge_all([scaled(2**40, is_skipped=True)] * MOST_SKIPPED, guard)
    judge_all([scaled(2**20)] * WINDOW_STEPS, guard)
    assert judge_all([scaled(2**20, is_skipped=True)] * MOST_SKIPPED, guard) == [None] * MOST_SKIPPED


class Scripted:
    """An object that has what it was told about and refuses all else, as the real one would."""

    def __init__(self, **attributes):
        self._attributes = attributes
        self.asked = set()

    def __getattr__(self, name):
        if name not in self._attributes:
            raise AttributeError(name)
        self.asked.add(name)
        return self._attributes[name]


def deepspeed_trainer(*, norm, optimizer, is_fp16=True):
    engine = Scripted(get_global_grad_norm=lambda: norm, fp16_enabled=lambda: is_fp16, optimizer=optimizer)
    return Scripted(is_deepspeed_enabled=True, deepspeed=engine)


def test_zero_with_a_dynamic_scale():
    optimizer = Scripted(overflow=True, loss_scaler=Scripted(cur_scale=32768, min_scale=1))
    health = read_step_health(deepspeed_trainer(norm=math.inf, optimizer=optimizer), grad_norm=None)
    assert health == StepHealth(grad_norm=math.inf, was_skipped=True, scale=32768.0, least_scale=1.0)


def test_zero_with_a_static_scale():
    optimizer = Scripted(overflow=False, loss_scaler=Scripted(cur_scale=128))
    health = read_step_health(deepspeed_trainer(norm=torch.tensor(2.0), optimizer=optimizer), grad_norm=None)
    assert health == StepHealth(grad_norm=2.0, was_skipped=False, scale=128.0, least_scale=None)


def test_deepspeeds_fp16_optimizer_without_zero():
    settings = Scripted(cur_scale=256.0, min_loss_scale=1, use_grad_scaling=True)
    optimizer = Scripted(overflow=True, loss_scale_config=settings)
    health = read_step_health(deepspeed_trainer(norm=math.inf, optimizer=optimizer), grad_norm=None)
    assert health == StepHealth(grad_norm=math.inf, was_skipped=True, scale=256.0, least_scale=1.0)


def test_zero_in_32_or_bf16_bits_has_no_scale():
    """ZeRO-3 skips a step whose norm is none in every type; its scaler is there, of scale 1, and scales nothing."""
    optimizer = Scripted(overflow=True, loss_scaler=Scripted(cur_scale=1.0))
    health = read_step_health(deepspeed_trainer(norm=math.inf, optimizer=optimizer, is_fp16=False), grad_norm=None)
    assert health == StepHealth(grad_norm=math.inf, was_skipped=True)
    assert Guard().judge(health, 1).code == "gradient_not_finite"


def test_a_norm_that_deepspeed_does_not_compute():
    health = read_step_health(
        deepspeed_trainer(norm=None, optimizer=Scripted(overflow=False), is_fp16=False), grad_norm=5.0
    )
    assert health == StepHealth(grad_norm=None)


def test_torchs_scaler_by_accelerate():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    accelerator = Scripted(scaler=scaler, optimizer_step_was_skipped=True)
    trainer = Scripted(is_deepspeed_enabled=False, accelerator=accelerator)
    assert read_step_health(trainer, grad_norm=math.inf) == StepHealth(
        grad_norm=math.inf, was_skipped=True, scale=1024.0, least_scale=1.0
    )


def test_no_scaler():
    trainer = Scripted(is_deepspeed_enabled=False, accelerator=Scripted(scaler=None))
    assert read_step_health(trainer, grad_norm=2.0) == StepHealth(grad_norm=2.0)


def test_deepspeeds_scalers_have_what_is_read():
    """The scripted engines speak as the installed one: its own scaler, overflowing down to its end."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(
        init_scale=4, scale_window=1000, min_scale=1, delayed_shift=1, consecutive_hysteresis=False, dtype=torch.float32
    )
    guard, seen, error = Guard(), [], None
    optimizer = SimpleNamespace(overflow=True, loss_scaler=scaler)
    for step in range(1, 4):
        try:
            scaler.cur_scale = scaler.cur_scale  # a plain attribute, read and written
            _overflow(scaler)
        except Exception as raised:  # the library's own class
            error = known_failure(raised, step, guard.scale)
            break
        health = read_step_health(deepspeed_trainer(norm=math.inf, optimizer=optimizer), grad_norm=None)
        seen.append((health.scale, guard.judge(health, step)))
    assert seen == [(2.0, None), (1.0, None)]
    assert error is not None
    assert (error.code, error.values) == ("loss_scale_minimum", {"scale": 1.0, "step": 3})


def _overflow(scaler):
    """Overflow once, without a process group: the scaler asks for its rank only to write a line."""
    from deepspeed.runtime.fp16 import loss_scaler

    real = loss_scaler.dist.get_rank
    loss_scaler.dist.get_rank = lambda: 1
    try:
        scaler.update_scale(True)
    finally:
        loss_scaler.dist.get_rank = real


def test_other_failures_are_not_ours():
    assert known_failure(RuntimeError("CUDA out of memory"), 3, None) is None


def accelerator_of(scaler=None):
    from accelerate import Accelerator

    return Accelerator(cpu=True)


@pytest.mark.parametrize("gradient", [3.0, math.nan, math.inf, 1e30])
def test_the_norm_is_kept_as_it_was_before_clipping(gradient):
    """1e30 squared is infinite in 32 bits: clipping by it leaves zeros, in which nobody would see the fault."""
    accelerator = accelerator_of()
    watch = GradientNorm(accelerator)
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([gradient, 4.0])
    accelerator.clip_grad_norm_([weight], 1.0)
    norm = watch.take()
    assert norm == pytest.approx(5.0) if gradient == 3.0 else not StepHealth(grad_norm=norm).is_gradient_finite
    assert watch.take() is None


def test_errors_have_words():
    """Each code that the guard raises is in the table of codes; an unknown one raises when it is made."""
    for code in ("loss_not_finite", "gradient_not_finite", "loss_scale_minimum", "too_many_skipped"):
        assert ProjectError(code).exit_code == 6
