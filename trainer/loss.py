"""The loss, and the one Trainer subclass that computes it. Side effects: collectives between ranks.

    loss of a step = sum(weight x cross entropy) / sum(weight), over the trained tokens of all ranks and micro-batches

so the gradient never depends on how the rows of a step are cut into micro-batches and ranks. Logits are made for
trained positions only, inside the model's own forward (under ZeRO-3 a head read outside it is an empty shard).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
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


def token_weights(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss weight of each predicted token (B, T-1): its sample's, 0 where nothing is learned."""
    return batch["weights"][:, 1:] * (batch["labels"][:, 1:] != IGNORE_INDEX)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of `values` over all ranks; `values` itself in a single process."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(values)
    return values


class LossMeter:
    """What was learned since the last report: per class the sums that a progress line needs. Lives on the device."""

    WEIGHTED_LOSS, WEIGHT, LOSS, TOKENS, ROWS = range(5)

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(CLASSES), 5, dtype=torch.float64, device=device)
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
        self._sums[:, : self.ROWS].index_add_(0, class_indices, per_token)
        self._sums[:, self.ROWS] += taught
        self.is_finite &= torch.isfinite(losses.detach()).all()

    def take(self) -> dict[str, float]:
        """Return the report since the last call, over all ranks, and start anew.

        `loss` (weighted mean per trained token), `loss_raw` (unweighted), `loss_<class>` (weighted, one per class
        present), `tokens` (trained), `rows` (samples, not packed rows). Every rank calls this together.
        """
        sums = sum_over_ranks(self._sums.clone()).cpu()
        self._sums.zero_()
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
    """Hugging Face's Trainer with our order of rows and our loss.

    Overrides three seams that exist alike from transformers 4.50 to 5: `get_train_dataloader`,
    `get_batch_samples`, `compute_loss`.
    """

    def __init__(self, *, rows: Rows, order: DealtOrder, collate: Collator, **kwargs: Any) -> None:
        super().__init__(train_dataset=rows, **kwargs)
        self._rows, self.order, self._collate = rows, order, collate
        # Our loss is normalised by what `get_batch_samples` counted: the Trainer must not divide it once more.
        self.model_accepts_loss_kwargs = True
        self._takes_positions = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        self.meter = LossMeter(self.args.device)

    def get_train_dataloader(self) -> DataLoader[Row]:
        """Return the loader of this rank; rows are dealt here and by nobody else."""
        return make_loader(self._rows, self.order, collate=self._collate)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, *_: Any
    ) -> tuple[list[Batch], Tensor]:
        """Return the micro-batches of one optimizer step and the sum of their token weights over all ranks."""
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        weight = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            weight += token_weights(batch).double().sum()
        return batches, sum_over_ranks(weight.to(self.args.device))

    def compute_loss(
        self,
        model: Any,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """Return this micro-batch's share of the step's loss, times the ranks (whose gradients are averaged)."""
        positions = trained_positions(inputs["labels"])
        asked = {"logits_to_keep": positions} if self._takes_positions else {}
        seen = {name: inputs[name] for name in ("attention_mask", "position_ids") if name in inputs}
        outputs = model(input_ids=inputs["input_ids"], use_cache=False, **seen, **asked)
        logits = outputs.logits if self._takes_positions else outputs.logits[:, positions]
        targets = inputs["labels"][:, positions + 1].flatten()
        weights = token_weights(inputs)[:, positions].flatten()
        losses = functional.cross_entropy(
            logits.float().flatten(0, 1), targets, ignore_index=IGNORE_INDEX, reduction="none"
        )
        self.meter.add(losses, weights, inputs["class_indices"][:, positions + 1].flatten(), inputs["taught"])
        total = weights.sum() if num_items_in_batch is None else num_items_in_batch
        share = (losses * weights).sum() * self.args.world_size / total.clamp(min=1e-9).to(losses.dtype)
        return (share, outputs) if return_outputs else share


def trained_positions(labels: Tensor) -> Tensor:
    """Return the positions (N,) whose next token is learned in any row; one position where there is none.

    A micro-batch without trained tokens still runs the whole model: under ZeRO-3 all ranks must.
    """
    positions = (labels[:, 1:] != IGNORE_INDEX).any(dim=0).nonzero().flatten()
    return positions if len(positions) else torch.zeros(1, dtype=torch.int64, device=labels.device)
