"""The loss of the trained tokens, computed inside the model's head, in chunks. Touches no file; changes a module.

Whole logits are the largest tensor of a small model's training: tokens x vocabulary, in 32 bits, several at a time.
Here the head itself turns hidden states into the sum of weight x cross entropy, 256 trained tokens at a time, with
their gradients, so no more than one chunk's logits ever exist and the backward pass only multiplies.

It must happen in the forward of the head module, not beside the model: under ZeRO-3 the hooks around that forward
bring the whole weight together; read anywhere else it is an empty shard, and its gradient is never reduced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from trainer.head_types import CHUNK_TOKENS, PLAIN_HEADS


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """What a micro-batch of B rows of T tokens has to predict: N tokens.

    Attributes:
        mask: (B, T) bool, the positions whose next token is learned, N of them.
        token_ids: (N,) int64, those next tokens, row after row.
        weights: (N,) float32, what multiplies the loss of each.
    """

    mask: Tensor
    token_ids: Tensor
    weights: Tensor


class _ChunkedLoss(torch.autograd.Function):
    """sum(weight x cross entropy) over N hidden states, its gradients made on the way forward.

    The sum is not normalised and neither are the gradients kept: dividing by the tokens of a step comes in with
    `grad_output`, together with the loss scale of fp16, so nothing small is rounded away in between. Both gradients
    are summed in 32 bits. The backward pass doesn't read the head's weight, which ZeRO-3 has taken apart by then.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        token_ids: Tensor,
        token_weights: Tensor,
        needs: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor]:
        """Return the sum, a float32 scalar, and the cross entropy (N,) of each token.

        Args:
            hidden: (N, H).
            weight: (V, H) of the head.
            token_ids, token_weights: (N,).
            needs: whether a gradient is needed of `hidden` and of `weight`.
        """
        dtype = _dtype_of_products(weight)
        states, matrix = hidden.to(dtype), weight.to(dtype)
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden, dtype=torch.float32) if needs[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None
        for start in range(0, len(hidden), CHUNK_TOKENS):
            chunk = slice(start, start + CHUNK_TOKENS)
            targets = token_ids[chunk, None]
            log_probabilities = functional.log_softmax(states[chunk] @ matrix.T, dim=-1, dtype=torch.float32)
            losses[chunk] = -log_probabilities.gather(1, targets).squeeze(1)
            if not any(needs):
                continue
            # d(weight x cross entropy) / d(logits) = weight x (probabilities - 1 at the target)
            slope = log_probabilities.exp_()
            slope.scatter_add_(1, targets, torch.full_like(targets, -1, dtype=torch.float32))
            slope = slope.mul_(token_weights[chunk, None]).to(dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = slope @ matrix
            if grad_weight is not None:
                _add_product(grad_weight, slope.T, states[chunk])
        ctx.gradients, ctx.dtypes = (grad_hidden, grad_weight), (hidden.dtype, weight.dtype)
        ctx.mark_non_differentiable(losses)
        return (losses * token_weights).sum(), losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # scaled in place: the weight's is the size of the head
        scaled = (
            None if gradient is None else gradient.mul_(grad_output).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return (*scaled, None, None, None)


def _dtype_of_products(weight: Tensor) -> torch.dtype:
    """Return the type in which the head multiplies: autocast's where it is on, else the weight's own."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total`, which has 32 bits."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


class HeadLoss:
    """The loss in the head of one model. Without targets the head is what it was: generation works as before."""

    def __init__(self, head: nn.Linear) -> None:
        self._head = head
        self._targets: Targets | None = None
        self._losses: Tensor | None = None
        head.forward = self._forward  # type: ignore[assignment, method-assign]  # the module stays: its hooks and names do

    def _forward(self, hidden: Tensor) -> Tensor:
        """Return logits; with targets the weighted sum of their losses, a scalar that takes the logits' place."""
        if self._targets is None:
            return nn.Linear.forward(self._head, hidden)
        targets, weight = self._targets, self._head.weight
        trained = hidden[targets.mask]
        is_learning = torch.is_grad_enabled()
        needs = (is_learning and trained.requires_grad, is_learning and weight.requires_grad)
        total: Tensor
        total, self._losses = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
            trained, weight, targets.token_ids, targets.weights, needs
        )
        return total

    def score(self, model: Any, targets: Targets, **inputs: Any) -> tuple[Tensor, Tensor]:
        """Run the model (as it is wrapped) and return sum(weight x cross entropy) and the cross entropies (N,).

        The sum is a float32 scalar and 0 without targets, with gradients of 0; the cross entropies carry none.
        """
        self._targets = targets
        try:
            total = model(**inputs).logits
        finally:
            self._targets = None
        losses, self._losses = self._losses, None
        assert losses is not None, "the model never called its head"
        return total, losses


def head_loss_of(model: Any) -> HeadLoss | None:
    """Return the loss in the head of a model, put there at the first call; None where `why_no_head_loss` says why."""
    head = _head_of(model)
    if why_no_head_loss(model) is not None:
        return None
    installed = getattr(head.forward, "__self__", None)
    return installed if isinstance(installed, HeadLoss) else HeadLoss(head)


def why_no_head_loss(model: Any) -> str | None:
    """Return why the loss of this model must be made from whole logits, None where its head can make it."""
    model_type = str(unwrapped(model).config.model_type)
    if model_type not in PLAIN_HEADS:
        return f"models of type {model_type} may change their logits behind the head"
    head = _head_of(model)
    if type(head) is not nn.Linear:  # an adapter or a quantized layer, which computes more than a product
        return f"its head is a {type(head).__module__}.{type(head).__name__}, more than a linear layer"
    if getattr(head, "bias", None) is not None:
        return "its head has a bias"
    return None


def unwrapped(model: Any) -> Any:
    """Return the model inside what DeepSpeed or a launcher has put around it."""
    while (inner := getattr(model, "module", None)) is not None:
        model = inner
    return model


def _head_of(model: Any) -> Any:
    """Return the module that makes logits; of a head that PEFT trains whole, the copy that is trained."""
    head = unwrapped(model).get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    return copies[head.active_adapters[0]] if isinstance(copies, nn.ModuleDict) else head
