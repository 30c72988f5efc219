"""The loss on samples that are not trained: per class, over all ranks; and the best checkpoint by it.

A *look* is one pass over the validation split; what follows from looks says looks.py. Side effects: collectives between
ranks; `load_best` reads weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trainer.checkpoints import best_checkpoint
from trainer.dataset import Collator, DealtOrder, Rows, make_loader
from trainer.device import Place
from trainer.encoded import EncodedSet
from trainer.loss import LossMeter, token_losses
from trainer.packing import Packing, one_each, pack
from trainer.recipe import Recipe


def find_held_out(
    validation: EncodedSet, recipe: Recipe, place: Place, *, collate: Collator, is_packed: bool
) -> HeldOut | None:
    """Return the held-out rows, packed like those that are trained; None where they teach nothing to look for."""
    if not validation.trained_tokens:
        return None
    packing = pack(validation.lengths, recipe.max_seq_len) if is_packed else one_each(len(validation))
    return HeldOut(validation, packing, recipe, place, collate=collate)


class HeldOut:
    """The held-out rows of one rank, dealt so that all ranks run the model equally often, as ZeRO-3 needs."""

    def __init__(
        self, samples: EncodedSet, packing: Packing, recipe: Recipe, place: Place, *, collate: Collator
    ) -> None:
        order = DealtOrder(
            len(packing),
            ranks=place.ranks,
            rank=place.rank,
            batch_size=recipe.per_device_train_batch_size,
            seed=recipe.seed,
        )
        self._loader = make_loader(Rows(samples, packing), order, collate=collate)

    def look(self, model: Any, device: torch.device) -> dict[str, float]:
        """Return `loss` (weighted mean per trained token, over all samples) and `loss_<class>`, alike on all ranks.

        Args:
            model: As the Trainer wrapped it: the DeepSpeed engine, or the model. Its mode is left as it was.
        """
        meter = LossMeter(device)
        was_training = model.training
        model.eval()
        try:
            for batch in self._loader:
                here = {name: value.to(device) for name, value in batch.items()}
                meter.add(*token_losses(model, here), here["taught"])
        finally:
            model.train(was_training)
        report = meter.take()
        return {key: value for key, value in report.items() if key.startswith("loss") and key != "loss_raw"}


def load_best(trainer: Any, run_dir: Path, last_loss: float | None) -> Path | None:
    """Load this run's best checkpoint unless the weights of the last step are better; return it, else None.

    All ranks call this together. It is the Trainer's own way, which knows DeepSpeed and adapters.
    """
    best = best_checkpoint(run_dir)
    if best is None or (last_loss is not None and last_loss <= best[1]):
        return None
    trainer.state.best_model_checkpoint = str(best[0])
    trainer._load_best_model()
    return best[0]
