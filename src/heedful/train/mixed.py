"""Mixed precision: the products of layers' matrices in bfloat16, forward and backward, with float32 sums; everything
else, the weights, their gradients, attention, a decoder's head, stays float32. (Micikevicius et al., arXiv:1710.03740.)

PyTorch's autocast would also run attention in bfloat16, which on a CPU takes four times as long as in float32. Put on
from outside; the model's files do not know. What is judged passes the plain products.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from heedful.train.low_rank import FrozenLinear


def mix_products(model: nn.Module) -> None:
    """Of every linear layer, wherever gradients are made."""
    for module in model.modules():
        if isinstance(module, nn.Linear | FrozenLinear):
            module.forward = partial(_linear, module, module.forward)  # type: ignore[method-assign]


def _linear(module: nn.Linear | FrozenLinear, plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return plain(x)
    y = product(x, module.weight)
    return y if module.bias is None else y + module.bias


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x (T, in), weight (out, in), both float32 → x · weightᵀ (T, out), with its gradients."""
    return _Product.apply(x, weight)  # type: ignore[no-untyped-call, no-any-return]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        low_x, low_weight = x.bfloat16(), weight.bfloat16()
        ctx.save_for_backward(low_x if ctx.needs_input_grad[1] else None, low_weight)
        return (low_x @ low_weight.T).float()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None]:
        low_x, low_weight = ctx.saved_tensors
        grad = grads[0].bfloat16()
        for_x = (grad @ low_weight).float() if ctx.needs_input_grad[0] else None
        for_weight = (grad.T @ low_x).float() if low_x is not None else None
        return for_x, for_weight
