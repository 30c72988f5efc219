"""What follows from looks at held-out samples: which was the best, and when it is enough. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from corpus_builder.errors import ProjectError
from trainer.checkpoints import Mark
from trainer.device import Place
from trainer.encoded import EncodedSet
from trainer.recipe import Recipe


def check_held_out(validation: EncodedSet, recipe: Recipe, place: Place) -> None:
    """Raise where the recipe wants what its corpus or its checkpoints cannot give; ask before the model is loaded.

    Raises:
        ProjectError: `no_validation`: a key needs held-out samples; `method_unsupported`: DeepSpeed cannot load the
            best checkpoint back from weights alone.
    """
    asks = {
        "load_best_model_at_end": recipe.load_best_model_at_end,
        "early_stopping_patience": recipe.early_stopping_patience is not None,
    }
    for key, is_asked in asks.items():
        if is_asked and not validation.trained_tokens:
            raise ProjectError("no_validation", key=key)
    if recipe.load_best_model_at_end and recipe.save_only_model and place.is_launched:
        reason = "DeepSpeed loads no checkpoint without its optimizer: take save_only_model out"
        raise ProjectError("method_unsupported", method="load_best_model_at_end", reason=reason)


@dataclass(frozen=True, slots=True)
class Looks:
    """Where early stopping stands: the lowest loss so far, its step, and the looks since then."""

    best_loss: float = math.inf
    best_step: int = 0
    stale: int = 0

    def after(self, loss: float, step: int, *, counts: bool) -> Looks:
        """Return where it stands after a look.

        Args:
            counts: Whether the look was due by its step. One that comes with a checkpoint by the clock may be the
                best, but is no reason to stop: else the end of a run would hang on the speed of a disk.
        """
        if loss < self.best_loss:
            return Looks(loss, step, 0)
        return replace(self, stale=self.stale + counts)

    def must_stop(self, patience: int | None) -> bool:
        """Whether so many looks brought nothing better."""
        return patience is not None and self.stale >= patience


def looks_of(mark: Mark | None) -> Looks:
    """Return where early stopping stood when a checkpoint was written."""
    if mark is None or mark.best_loss is None:
        return Looks()
    return Looks(mark.best_loss, mark.best_step, mark.stale_looks)
