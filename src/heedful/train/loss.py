"""Cross-entropy of a linear head without the logits of all tokens in memory: a chunk of tokens at a time.

The gradients are made in the forward pass, where a chunk's probabilities are at hand; so a second derivative does not
exist. Peak memory is chunk · vocabulary instead of tokens · vocabulary, twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heedful.models.decoder import Decoder
from heedful.train.batches import IGNORED


def summed_loss(decoder: Decoder, hidden: Tensor, targets: Tensor, *, chunk: int) -> Tensor:
    """Σ over tokens of −ln p(target), a scalar: hidden (T, C), targets int64 (T,). Ignored ones never meet the head."""
    counted = targets != IGNORED
    if not bool(counted.all()):
        hidden, targets = hidden[counted], targets[counted]
    args = (hidden, decoder.head.weight, targets, chunk, decoder.config.logit_softcap)
    return _ChunkedCrossEntropy.apply(*args)  # type: ignore[no-untyped-call, no-any-return]


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, softcap: float | None) -> Tensor:
        for_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        loss = hidden.new_zeros((), dtype=torch.float64)
        buffer = hidden.new_empty(
            min(chunk, len(hidden)), len(weight)
        )  # one for all: fresh memory costs as much as sums
        for begin in range(0, len(hidden), chunk):
            rows = slice(begin, min(begin + chunk, len(hidden)))
            logits = torch.mm(hidden[rows], weight.T, out=buffer[: rows.stop - begin])
            if softcap is not None:
                logits.div_(softcap).tanh_().mul_(softcap)
            at_target = logits.gather(1, targets[rows, None])
            slope = 1 - (logits / softcap) ** 2 if softcap is not None else None
            largest = logits.amax(dim=1, keepdim=True)
            total = logits.sub_(largest).exp_().sum(dim=1, keepdim=True)
            loss += (largest + total.log() - at_target).sum(dtype=torch.float64)
            if for_hidden is None and for_weight is None:
                continue
            grad = logits.div_(total)
            grad.scatter_add_(1, targets[rows, None], grad.new_full((1, 1), -1.0).expand(len(grad), 1))
            if slope is not None:
                grad *= slope
            if for_hidden is not None:
                torch.mm(grad, weight, out=for_hidden[rows])
            if for_weight is not None:
                for_weight.addmm_(grad.T, hidden[rows])
        ctx.save_for_backward(for_hidden, for_weight)
        return loss.to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        for_hidden, for_weight = ctx.saved_tensors
        scaled = [None if made is None else made * grads[0] for made in (for_hidden, for_weight)]
        return scaled[0], scaled[1], None, None, None
