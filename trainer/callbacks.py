"""What happens at step borders: progress lines, stops, checkpoints, a guard against NaN.

Side effects: prints ZY_PROGRESS, ZY_EVENT and our log lines on rank 0; collectives between ranks.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from corpus_builder.errors import ProjectError
from trainer.checkpoints import delete_old, mark_complete
from trainer.device import Place
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


class Border(TrainerCallback):  # type: ignore[misc]  # transformers ships no usable hints
    """Decides at each step border, for all ranks together, whether to go on, to save or to stop.

    `stopped` is the request that ended training early, else None.
    """

    _STOP_CHECKPOINT, _STOP_NOW, _SAVE, _NOT_FINITE = range(4)

    def __init__(self, recipe: Recipe, paths: RunPaths, place: Place, voice: Voice) -> None:
        self._recipe, self._paths, self._place, self._voice = recipe, paths, place, voice
        self._saved_at_s = time.monotonic()
        self.stopped: str | None = None
        self.trainer: WeightedTrainer | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Act on what any rank saw: a stop file, a checkpoint that is due, a loss that is not finite."""
        assert self.trainer is not None
        is_last = state.global_step >= state.max_steps
        flags = self._agree(state.global_step, args.device)
        if flags[self._NOT_FINITE]:
            loss = self.trainer.meter.take().get("loss", math.nan)
            self._voice.event("nan_stopped", step=state.global_step)
            raise ProjectError("loss_not_finite", loss=str(loss), step=state.global_step)
        if flags[self._STOP_NOW] or (flags[self._STOP_CHECKPOINT] and not is_last):
            self.stopped = STOP_NOW if flags[self._STOP_NOW] else STOP_AT_CHECKPOINT
            control.should_training_stop = True
        control.should_save = self.stopped == STOP_AT_CHECKPOINT or (
            flags[self._SAVE] and not is_last and self.stopped is None
        )

    def _agree(self, step: int, device: torch.device) -> list[bool]:
        """Return the flags that are set on any rank; one small collective per step."""
        assert self.trainer is not None
        flags = torch.zeros(4, dtype=torch.int32, device=device)
        if self._place.is_first:
            request = read_stop(Path(self._paths.stop))
            flags[self._STOP_CHECKPOINT] = request == STOP_AT_CHECKPOINT
            flags[self._STOP_NOW] = request == STOP_NOW
            flags[self._SAVE] = self._is_save_due(step)
        flags[self._NOT_FINITE] = ~self.trainer.meter.is_finite
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in flags.tolist()]

    def _is_save_due(self, step: int) -> bool:
        waited_s = time.monotonic() - self._saved_at_s
        return step % self._recipe.save_steps == 0 or waited_s >= 60 * self._recipe.save_minutes

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark the checkpoint that all ranks have now written, and keep the newest ones."""
        if dist.is_available() and dist.is_initialized():
            dist.barrier()
        self._saved_at_s = time.monotonic()
        if self._place.is_first:
            checkpoint_dir = Path(self._paths.checkpoint(state.global_step))
            mark_complete(checkpoint_dir, step=state.global_step, ranks=self._place.ranks)
            delete_old(checkpoint_dir.parent, keep=self._recipe.save_total_limit)
        self._voice.event("checkpoint_saved", step=state.global_step)


class Report(TrainerCallback):  # type: ignore[misc]
    """Prints a ZY_PROGRESS line every `report_every_steps` steps and at the last step."""

    def __init__(self, recipe: Recipe, voice: Voice, *, attempt: int) -> None:
        self._recipe, self._voice, self._attempt = recipe, voice, attempt
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
        extras = {key: value for key, value in report.items() if key.startswith("loss_")}
        extras["tok"] = report["tokens"] / elapsed_s
        if logs.get("grad_norm") is not None:
            extras["gnorm"] = float(logs["grad_norm"])
        extras["attempt"] = self._attempt
        line = Progress(
            step=state.global_step,
            total=state.max_steps,
            loss=report.get("loss"),
            lr=self._lr,
            epoch=float(state.epoch or 0.0),
            total_epochs=float(self._recipe.num_train_epochs),
            thr=report["rows"] / elapsed_s,
            extras=extras,
        )
        self._voice.say(format_progress(line))

    def _is_due(self, state: Any, control: Any) -> bool:
        is_last = state.global_step >= state.max_steps or control.should_training_stop
        return bool(is_last or state.global_step % self._recipe.report_every_steps == 0)
