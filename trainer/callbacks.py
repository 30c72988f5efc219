"""What happens at step borders: progress lines, stops, looks at held-out samples, checkpoints, guards.

Side effects: prints ZY_PROGRESS, ZY_EVENT and our log lines on rank 0; collectives between ranks; deletes old
checkpoints.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from corpus_builder.errors import ProjectError
from trainer.checkpoints import Mark, delete_old, disk_short, estimated_bytes, has_room, mark_complete, needed_bytes
from trainer.device import Place
from trainer.exact_resume import replay_steps
from trainer.guards import GradientNorm, Guard, StepHealth, known_failure, read_step_health
from trainer.held_out import HeldOut
from trainer.looks import Looks
from trainer.loss import WeightedTrainer
from trainer.progress import Progress, format_progress
from trainer.recipe import Recipe
from trainer.run_paths import RunPaths
from trainer.voice import Voice

STOP_AT_CHECKPOINT, STOP_NOW = "checkpoint", "now"


def read_stop(stop_path: Path) -> str | None:
    """Return what the stop file asks for: `checkpoint`, `now`, None without one. Anything else means `checkpoint`."""
    try:
        word = stop_path.read_text("utf-8").strip()
    except FileNotFoundError:
        return None
    return STOP_NOW if word == STOP_NOW else STOP_AT_CHECKPOINT


@dataclass(slots=True)
class Seen:
    """What a border saw, for the progress line of its step.

    Attributes:
        step: Of the last look at held-out samples, 0 before the first.
        held_out: What it found: `loss` and `loss_<class>`.
        scale: The loss scale, None without a scaler.
        skipped: Steps that the scaler skipped in this attempt.
    """

    step: int = 0
    held_out: dict[str, float] = field(default_factory=dict)
    scale: float | None = None
    skipped: int = 0


class Border(TrainerCallback):  # type: ignore[misc]  # transformers ships no usable hints
    """Decides at each step border, for all ranks together, whether to go on, to look, to save or to stop.

    `stopped` is the request that ended training early, else None.
    """

    _STOP_CHECKPOINT, _STOP_NOW, _SAVE, _NO_ROOM, _BAD_LOSS, _BAD_GRADIENT, _SKIPPED, _FLAGS = range(8)

    def __init__(
        self,
        recipe: Recipe,
        paths: RunPaths,
        place: Place,
        voice: Voice,
        *,
        held_out: HeldOut | None = None,
        looks: Looks = Looks(),  # noqa: B008 (frozen)
    ) -> None:
        self._recipe, self._paths, self._place, self._voice = recipe, paths, place, voice
        self._held_out, self._looks = held_out, looks
        self._run_dir = Path(paths.checkpoints)
        self._saved_at_s = time.monotonic()
        self._guard = Guard()
        self._gradient_norm: GradientNorm | None = None
        self.seen = Seen()
        self.stopped: str | None = None
        self.trainer: WeightedTrainer | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin to watch the gradient; the clock of `save_minutes` starts, for loading the model is not training.

        The optimizer is loaded by now.
        """
        assert self.trainer is not None
        if self.trainer.is_deepspeed_enabled:
            replay_steps(self.trainer.deepspeed)
        self._gradient_norm = GradientNorm(self.trainer.accelerator)
        self._saved_at_s = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Act on what any rank saw: a step gone wrong, a stop file, a look or a checkpoint that is due."""
        step, is_last = state.global_step, state.global_step >= state.max_steps
        health = self._read_health()
        flags = self._agree(health, step, args.device)
        self._judge(health, flags, step)
        if flags[self._STOP_NOW] or (flags[self._STOP_CHECKPOINT] and not is_last):
            self.stopped = STOP_NOW if flags[self._STOP_NOW] else STOP_AT_CHECKPOINT
            control.should_training_stop = True
        is_due = flags[self._SAVE] and not is_last and self.stopped is None
        if self._is_look_due(step, with_checkpoint=is_due, is_last=is_last):
            self._look(step, args.device)
            if self._looks.must_stop(self._recipe.early_stopping_patience) and not is_last and self.stopped is None:
                self._voice.event("stopped_early", step=step, best_step=self._looks.best_step)
                control.should_training_stop = True
        control.should_save = self.stopped == STOP_AT_CHECKPOINT or is_due
        if control.should_save and flags[self._NO_ROOM]:
            raise disk_short(self._run_dir, self._needed_bytes())

    def _read_health(self) -> StepHealth:
        assert self.trainer is not None
        norm = None if self._gradient_norm is None else self._gradient_norm.take()
        return read_step_health(self.trainer, grad_norm=norm)

    def _agree(self, health: StepHealth, step: int, device: torch.device) -> list[bool]:
        """Return the flags that are set on any rank; one small collective per step."""
        assert self.trainer is not None
        flags = torch.zeros(self._FLAGS, dtype=torch.int32, device=device)
        if self._place.is_first:
            request = read_stop(Path(self._paths.stop))
            flags[self._STOP_CHECKPOINT] = request == STOP_AT_CHECKPOINT
            flags[self._STOP_NOW] = request == STOP_NOW
            flags[self._SAVE] = self._is_save_due(step)
            if flags[self._STOP_CHECKPOINT] or flags[self._SAVE]:
                keep = self._recipe.save_total_limit
                flags[self._NO_ROOM] = not has_room(self._run_dir, self._needed_bytes(), keep=keep)
        flags[self._BAD_LOSS] = ~self.trainer.meter.is_finite
        flags[self._BAD_GRADIENT] = not health.is_gradient_finite
        flags[self._SKIPPED] = health.was_skipped
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in flags.tolist()]

    def _judge(self, health: StepHealth, flags: list[bool], step: int) -> None:
        """Raise where training must not go on; the ranks judge the same facts, so all of them do."""
        assert self.trainer is not None
        if flags[self._BAD_LOSS]:
            loss = self.trainer.meter.take().get("loss", math.nan)
            health = replace(health, loss=math.nan if math.isfinite(loss) else loss)
        if flags[self._BAD_GRADIENT] and health.is_gradient_finite:
            health = replace(health, grad_norm=math.nan)
        health = replace(health, was_skipped=flags[self._SKIPPED])
        error = self._guard.judge(health, step)
        self.seen.scale, self.seen.skipped = health.scale, self._guard.skipped
        if health.scale is not None and health.was_skipped:
            self._voice.event("scale_reduced", step=step, scale=f"{health.scale:g}", skipped=self._guard.skipped)
        if error is not None:
            self.end_badly(error, step)

    def end_badly(self, error: ProjectError, step: int) -> NoReturn:
        """Say that the run ends here and raise why; the last good checkpoint stays."""
        self._voice.event("nan_stopped", step=step, reason=error.code)
        raise error

    def _is_save_due(self, step: int) -> bool:
        waited_s = time.monotonic() - self._saved_at_s
        return step % self._recipe.save_steps == 0 or waited_s >= 60 * self._recipe.save_minutes

    def _is_look_due(self, step: int, *, with_checkpoint: bool, is_last: bool) -> bool:
        if self._held_out is None or self.stopped == STOP_NOW:
            return False
        return with_checkpoint or is_last or self._counts(step)

    def _counts(self, step: int) -> bool:
        return step % (self._recipe.eval_steps or self._recipe.save_steps) == 0

    def _look(self, step: int, device: torch.device) -> None:
        assert self.trainer is not None
        assert self._held_out is not None
        found = self._held_out.look(self.trainer.model_wrapped, device)
        loss = found["loss"]
        self._voice.event("evaluated", step=step, **{key: f"{value:.6f}" for key, value in found.items()})
        if not math.isfinite(loss):
            self.end_badly(ProjectError("loss_not_finite", loss=str(loss), step=step), step)
        self._looks = self._looks.after(loss, step, counts=self._counts(step))
        self.seen.step, self.seen.held_out = step, found
        self.trainer.log({f"eval_{key}": value for key, value in found.items()})

    def _needed_bytes(self) -> int:
        assert self.trainer is not None
        estimate = estimated_bytes(
            self.trainer.model, is_launched=self._place.is_launched, is_model_only=self._recipe.save_only_model
        )
        return needed_bytes(self._run_dir, estimate)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark the checkpoint that all ranks have now written, and keep the newest ones and the best."""
        if dist.is_available() and dist.is_initialized():
            dist.barrier()
        self._saved_at_s = time.monotonic()
        if self._place.is_first:
            mark_complete(Path(self._paths.checkpoint(state.global_step)), self._mark(state.global_step))
            delete_old(self._run_dir, keep=self._recipe.save_total_limit)
        self._voice.event("checkpoint_saved", step=state.global_step)

    def _mark(self, step: int) -> Mark:
        looks = self._looks
        return Mark(
            step=step,
            ranks=self._place.ranks,
            is_launched=self._place.is_launched,
            is_model_only=self._recipe.save_only_model,
            eval_loss=self.seen.held_out["loss"] if self.seen.step == step else None,
            best_loss=looks.best_loss if looks.best_step else None,
            best_step=looks.best_step,
            stale_looks=looks.stale,
        )

    @property
    def last_loss(self) -> float | None:
        """Held-out loss of the weights as they are now, None where nobody looked."""
        assert self.trainer is not None
        is_fresh = self.seen.step and self.seen.step == self.trainer.state.global_step
        return self.seen.held_out["loss"] if is_fresh else None


def train_guarded(trainer: WeightedTrainer, border: Border, resume_point: Path | None) -> None:
    """Train from `resume_point`, None: from the base model; what DeepSpeed calls by its own words gets our code."""
    try:
        trainer.train(resume_from_checkpoint=None if resume_point is None else str(resume_point))
    except ProjectError:
        raise
    except Exception as error:
        step = trainer.state.global_step + 1
        known = known_failure(error, step, border.seen.scale)
        if known is None:
            raise
        border.end_badly(known, step)


class Report(TrainerCallback):  # type: ignore[misc]
    """Prints a ZY_PROGRESS line every `report_every_steps` steps, after a look and at the last step."""

    def __init__(self, recipe: Recipe, voice: Voice, seen: Seen, *, attempt: int) -> None:
        self._recipe, self._voice, self._seen, self._attempt = recipe, voice, seen, attempt
        self._lr: float | None = None
        self._since_s = time.monotonic()
        self.trainer: WeightedTrainer | None = None

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tell the order which epoch begins; after a resume `state.epoch` may lie inside one."""
        assert self.trainer is not None
        self.trainer.order.set_epoch(int((state.epoch or 0.0) + 1e-6))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock: loading the model is not training."""
        self._since_s = time.monotonic()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the rate of this step from the optimizer itself, before the schedule moves on."""
        self._lr = float(kwargs["optimizer"].param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Have the Trainer log, which knows the gradient norm, where a line is due."""
        control.should_log = control.should_log or self._is_due(state, control)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Print the line of this step."""
        if logs is None or "loss" not in logs or not self._is_due(state, control):
            return
        assert self.trainer is not None
        report = self.trainer.meter.take()
        now_s = time.monotonic()
        elapsed_s, self._since_s = max(now_s - self._since_s, 1e-9), now_s
        line = Progress(
            step=state.global_step,
            total=state.max_steps,
            loss=report.get("loss"),
            lr=self._lr,
            epoch=float(state.epoch or 0.0),
            total_epochs=float(self._recipe.num_train_epochs),
            thr=report["rows"] / elapsed_s,
            extras=self._extras(report, elapsed_s, state.global_step, logs.get("grad_norm")),
        )
        self._voice.say(format_progress(line))

    def _extras(
        self, report: dict[str, float], elapsed_s: float, step: int, grad_norm: float | None
    ) -> dict[str, float]:
        extras = {key: value for key, value in report.items() if key.startswith("loss_")}
        extras["tok"] = report["tokens"] / elapsed_s
        if grad_norm is not None:
            extras["gnorm"] = float(grad_norm)
        if self._seen.scale is not None:
            extras |= {"scale": self._seen.scale, "skipped": self._seen.skipped}
        if self._seen.step == step:
            extras |= {f"eval_{key}": value for key, value in self._seen.held_out.items()}
        extras["attempt"] = self._attempt
        return extras

    def _is_due(self, state: Any, control: Any) -> bool:
        is_last = state.global_step >= state.max_steps or control.should_training_stop
        is_after_look = self._seen.step == state.global_step
        return bool(is_last or is_after_look or state.global_step % self._recipe.report_every_steps == 0)
