"""Whether training may go on after a step: what a step says of itself, and the judge of it. Pure.

An fp16 overflow is no NaN: the scaler skips the step and lowers its scale, and a healthy run begins with several of
them. DeepSpeed reports an infinite gradient norm on each.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from corpus_builder.errors import ProjectError

#: More than MOST_SKIPPED of the last WINDOW_STEPS skipped: the scaler finds no scale that holds.
WINDOW_STEPS, MOST_SKIPPED = 50, 25
#: torch's scaler has no least scale; at 1 the loss is not raised any more. DeepSpeed's default is 1 as well.
TORCH_LEAST_SCALE = 1.0
#: What DeepSpeed 0.19 says when it gives up by itself (runtime/fp16/loss_scaler.py, DynamicLossScaler.update_scale).
_AT_MINIMUM = "loss scale already at minimum"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHealth:
    """What one optimizer step says of itself, on one rank.

    Attributes:
        grad_norm: Before clipping, None where nobody computed it. DeepSpeed writes an invalid one as -1 or inf.
        loss: nan or inf if that of any token was; its finite value is nobody's concern here.
        was_skipped: The optimizer left the weights as they were.
        scale: What the loss is multiplied with from now on, None without a loss scaler.
        least_scale: Where the scaler ends, None if it never changes its scale.
    """

    grad_norm: float | None
    loss: float = 0.0
    was_skipped: bool = False
    scale: float | None = None
    least_scale: float | None = None

    @property
    def is_gradient_finite(self) -> bool:
        """Whether the gradient is a number."""
        return self.grad_norm is None or (math.isfinite(self.grad_norm) and self.grad_norm >= 0)


class Guard:
    """Judges step after step; `skipped` counts the steps that a scaler skipped."""

    def __init__(self) -> None:
        self.skipped = 0
        self.scale: float | None = None
        self._recent: deque[bool] = deque(maxlen=WINDOW_STEPS)

    def judge(self, health: StepHealth, step: int) -> ProjectError | None:
        """Take one step in and return why the run must stop, None to go on.

        The codes: `loss_not_finite`, `gradient_not_finite` (there is no scaler to blame), `loss_scale_minimum` (an
        overflow although the scale was at its least), `too_many_skipped`.
        """
        scale_before, self.scale = self.scale, health.scale
        if not math.isfinite(health.loss):
            return ProjectError("loss_not_finite", loss=str(health.loss), step=step)
        if health.scale is None:
            if health.is_gradient_finite and not health.was_skipped:
                return None
            return ProjectError("gradient_not_finite", norm=_norm_word(health.grad_norm), step=step)
        self._recent.append(health.was_skipped)
        if not health.was_skipped:
            return None
        self.skipped += 1
        if health.least_scale is not None and scale_before is not None and scale_before <= health.least_scale:
            return ProjectError("loss_scale_minimum", scale=health.scale, step=step)
        if sum(self._recent) > MOST_SKIPPED:
            return ProjectError("too_many_skipped", skipped=sum(self._recent), window=WINDOW_STEPS, step=step)
        return None


def _norm_word(norm: float | None) -> str:
    """Return a norm that is none as people write it; DeepSpeed's -1 and inf stand for either."""
    return "nan" if norm is not None and math.isnan(norm) else "inf"


def read_step_health(trainer: Any, *, grad_norm: float | None) -> StepHealth:
    """Return what the step that has just ended says of itself; the one place that knows where engines keep it.

    Args:
        trainer: A transformers Trainer within `on_step_end`.
        grad_norm: What `GradientNorm` saw, used where no DeepSpeed engine has its own.
    """
    engine = trainer.deepspeed if trainer.is_deepspeed_enabled else None
    if engine is None:
        return _read_accelerate(trainer.accelerator, grad_norm)
    optimizer = engine.optimizer
    norm = engine.get_global_grad_norm()
    scaler = _deepspeed_scaler(optimizer) if engine.fp16_enabled() else None
    return StepHealth(
        grad_norm=None if norm is None else float(norm),
        was_skipped=bool(getattr(optimizer, "overflow", False)),  # torch's own optimizers, without ZeRO, have none
        scale=None if scaler is None else float(scaler.cur_scale),
        least_scale=_least_scale(scaler),
    )


def _deepspeed_scaler(optimizer: Any) -> Any:
    """Return ZeRO's scaler object, or the scale settings of DeepSpeed's fp16 optimizers without ZeRO."""
    return optimizer.loss_scaler if hasattr(optimizer, "loss_scaler") else optimizer.loss_scale_config


def _least_scale(scaler: Any) -> float | None:
    """Return where a dynamic scaler ends; a static one has no end, its overflows are only counted."""
    for name in ("min_scale", "min_loss_scale"):
        least = getattr(scaler, name, None)
        if least is not None:
            return float(least)
    return None


def _read_accelerate(accelerator: Any, grad_norm: float | None) -> StepHealth:
    scaler = accelerator.scaler
    if scaler is None:
        return StepHealth(grad_norm=grad_norm)
    return StepHealth(
        grad_norm=grad_norm,
        was_skipped=bool(accelerator.optimizer_step_was_skipped),
        scale=float(scaler.get_scale()),
        least_scale=TORCH_LEAST_SCALE,
    )


class GradientNorm:
    """Keeps the norm that clipping computes, before it clips.

    The Trainer hands it to nobody until it logs; afterwards it cannot be told: clipping by an infinite norm leaves
    zeros. Every version from 4.50 to 5 clips by `accelerator.clip_grad_norm_`.
    """

    def __init__(self, accelerator: Any) -> None:
        self._clip = accelerator.clip_grad_norm_
        self._last: Any = None
        accelerator.clip_grad_norm_ = self._keep

    def _keep(self, *args: Any, **kwargs: Any) -> Any:
        self._last = self._clip(*args, **kwargs)
        return self._last

    def take(self) -> float | None:
        """Return the norm of the step that has just ended, None where nothing was clipped."""
        last, self._last = self._last, None
        return None if last is None else float(last)


def known_failure(error: Exception, step: int, scale: float | None) -> ProjectError | None:
    """Return what DeepSpeed means by an exception of its own, None for any other."""
    if _AT_MINIMUM not in str(error):
        return None
    return ProjectError("loss_scale_minimum", scale=scale or TORCH_LEAST_SCALE, step=step)
