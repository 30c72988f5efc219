"""The loss, and the one Trainer subclass that computes it. Side effects: collectives between ranks.

    loss of a step = sum(weight x cross entropy) / sum(weight), over the trained tokens of all ranks and micro-batches

so the gradient never depends on how the rows of a step are cut into micro-batches and ranks. Logits are made for
trained tokens only, inside the model's own forward: in chunks in the head (head_loss.py), or whole where the model
does more with them than its head.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import Trainer

from corpus_builder.frame import IGNORE_INDEX
from corpus_builder.sample import CLASSES
from trainer.dataset import Batch, Collator, DealtOrder, Row, Rows, make_loader
from trainer.head_loss import Targets, head_loss_of


def token_weights(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss weight of each predicted token (B, T-1): its sample's, 0 where nothing is learned."""
    return batch["weights"][:, 1:] * (batch["labels"][:, 1:] != IGNORE_INDEX)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of `values` over all ranks; `values` itself in a single process."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(values)
    return values


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """The N trained tokens of a micro-batch, and what they cost.

    Attributes:
        total: sum(weight x cross entropy), a float32 scalar that gradients flow through; 0 without trained tokens.
        losses: (N,) cross entropy of each in nats, float32, without gradient.
        weights, class_indices: (N,) of each token's sample.
    """

    total: Tensor
    losses: Tensor
    weights: Tensor
    class_indices: Tensor


def score_tokens(model: Any, batch: Mapping[str, Tensor]) -> TokenScores:
    """Run the model on a micro-batch; one without trained tokens runs all of it too, as ZeRO-3 needs of all ranks."""
    labels = batch["labels"]
    is_trained = functional.pad(labels[:, 1:] != IGNORE_INDEX, (0, 1))
    following = is_trained.roll(1, dims=1)  # the last column is never trained, so nothing goes round
    targets = Targets(is_trained, labels[following], batch["weights"][following])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}
    head_loss = head_loss_of(model)
    score = _score_whole_logits if head_loss is None else head_loss.score
    total, losses = score(model, targets, **inputs, use_cache=False)
    return TokenScores(total, losses, targets.weights, batch["class_indices"][following])


def token_losses(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return cross entropy, weight and class index (N,) of each trained token, without gradients.

    On any model, wrapped or not; the mode (`eval`, `no_grad`) is the caller's. All ranks call this together.
    """
    with torch.no_grad():
        scores = score_tokens(model, batch)
    return scores.losses, scores.weights, scores.class_indices


def _score_whole_logits(model: Any, targets: Targets, **inputs: Any) -> tuple[Tensor, Tensor]:
    """Return the sum and the cross entropies as `HeadLoss.score` does, from logits that the model has finished."""
    positions = targets.mask.any(dim=0).nonzero().flatten()
    logits = model(**inputs, logits_to_keep=positions).logits
    kept = logits[targets.mask[:, positions]].float()
    losses = functional.cross_entropy(kept, targets.token_ids, reduction="none")
    return (losses * targets.weights).sum(), losses.detach()


class LossMeter:
    """What was learned, per class, as sums on the device. Several readers, each of whom takes and starts anew."""

    REPORT, TRACKERS = range(2)
    WEIGHTED_LOSS, WEIGHT, LOSS, TOKENS, ROWS = range(5)

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, len(CLASSES), 5, dtype=torch.float64, device=device)
        self.is_finite = torch.ones((), dtype=torch.bool, device=device)

    def add(self, losses: Tensor, weights: Tensor, class_indices: Tensor, taught: Tensor) -> None:
        """Count one micro-batch.

        Args:
            losses, weights, class_indices: (N,) of each token, weight 0 where nothing is learned.
            taught: (classes,) samples of each class that teach something.
        """
        is_trained = weights > 0
        columns = (losses * weights, weights, losses * is_trained, is_trained)
        per_token = torch.stack([column.detach().double() for column in columns], dim=1)
        of_batch = torch.zeros_like(self._sums[0])
        of_batch[:, : self.ROWS].index_add_(0, class_indices, per_token)
        of_batch[:, self.ROWS] = taught
        self._sums += of_batch
        self.is_finite &= torch.isfinite(losses.detach()).all()

    def take(self, reader: int = REPORT) -> dict[str, float]:
        """Return what was learned since this reader's last call, over all ranks. Every rank calls this together.

        `loss` (weighted mean per trained token), `loss_raw` (unweighted), `loss_<class>` (weighted, one per class
        present), `tokens` (trained), `rows` (samples, not packed rows).
        """
        sums = sum_over_ranks(self._sums[reader].clone()).cpu()
        self._sums[reader].zero_()
        total = sums.sum(dim=0)
        report = {"tokens": float(total[self.TOKENS]), "rows": float(total[self.ROWS])}
        if total[self.TOKENS] > 0:
            report["loss"] = float(total[self.WEIGHTED_LOSS] / total[self.WEIGHT])
            report["loss_raw"] = float(total[self.LOSS] / total[self.TOKENS])
        for name, of_class in zip(CLASSES, sums, strict=True):
            if of_class[self.TOKENS] > 0:
                report[f"loss_{name}"] = float(of_class[self.WEIGHTED_LOSS] / of_class[self.WEIGHT])
        return report


class WeightedTrainer(Trainer):  # type: ignore[misc]  # transformers ships no usable hints
    """Hugging Face's Trainer with our order of rows, our loss and our logs.

    Overrides five seams that exist alike from transformers 4.50 to 5: `get_train_dataloader`, `get_batch_samples`,
    `_prepare_inputs`, `compute_loss`, `log`.
    """

    def __init__(self, *, rows: Rows, order: DealtOrder, collate: Collator, **kwargs: Any) -> None:
        super().__init__(train_dataset=rows, **kwargs)
        self._rows, self.order, self._collate = rows, order, collate
        # Our loss is normalised by what `get_batch_samples` counted: the Trainer must not divide it once more.
        self.model_accepts_loss_kwargs = True
        self.meter = LossMeter(self.args.device)
        self._logged_at_s: float | None = None

    def get_train_dataloader(self) -> DataLoader[Row]:
        """Return the loader of this rank; rows are dealt here and by nobody else."""
        return make_loader(self._rows, self.order, collate=self._collate)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, *_: Any
    ) -> tuple[list[Batch], Tensor]:
        """Return the micro-batches of one optimizer step and the sum of their token weights over all ranks."""
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        self._logged_at_s = self._logged_at_s or time.monotonic()  # setting up was not training
        weight = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            weight += token_weights(batch).double().sum()
        return batches, sum_over_ranks(weight.to(self.args.device))

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        """Return the batch on this rank's device. Its types stay: under DeepSpeed the Trainer would halve weights."""
        return {name: value.to(self.args.device) for name, value in inputs.items()}

    def compute_loss(
        self,
        model: Any,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """Return this micro-batch's share of the step's loss, times the ranks (whose gradients are averaged)."""
        scores = score_tokens(model, inputs)
        self.meter.add(scores.losses, scores.weights, scores.class_indices, inputs["taught"])
        total = scores.weights.double().sum() if num_items_in_batch is None else num_items_in_batch
        share = scores.total * (self.args.world_size / total.clamp(min=1e-9)).to(scores.total.dtype)
        return (share, {"losses": scores.losses}) if return_outputs else share

    def log(self, logs: dict[str, float], *args: Any) -> None:
        """Log the meter's means in place of the Trainer's own, which is one per step, whatever a step held.

        `loss`, `loss_raw`, `loss_<class>`, and `tok`, trained tokens per second, since the last line; all ranks
        together. A `loss` of nan: nothing was learned since then.
        """
        if "loss" in logs:
            report = self.meter.take(LossMeter.TRACKERS)
            now_s = time.monotonic()
            elapsed_s, self._logged_at_s = max(now_s - (self._logged_at_s or now_s), 1e-9), now_s
            logs = {**logs, "loss": math.nan}
            logs |= {key: value for key, value in report.items() if key.startswith("loss")}
            logs["tok"] = report["tokens"] / elapsed_s
        super().log(logs, *args)
