"""What makes a step faster and changes no result beyond rounding: norms in fewer passes, memory that is not given back.

Both are put on from outside; the model's files do not know.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import torch
from torch import Tensor

from heedful.models.decoder import Decoder
from heedful.models.layers import RMSNorm

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
_MOST = 2**31 - 1


def keep_freed_memory() -> None:
    """Has glibc's malloc keep what is freed, for the whole process; elsewhere nothing happens.

    A step frees and takes the same tensors again. Given back to the system, each comes as fresh pages, which cost a
    tenth of the time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _MOST)
        mallopt(_TRIM_THRESHOLD, _MOST)


def fuse_norms(decoder: Decoder) -> None:
    """RMS norms with a backward pass of their own: half the time of what autograd makes of `reference.rms_norm`."""
    for module in decoder.modules():
        if isinstance(module, RMSNorm):
            module.forward = partial(_rms_norm, module)  # type: ignore[method-assign]


def _rms_norm(module: RMSNorm, x: Tensor) -> Tensor:
    return _RMSNorm.apply(x, module.weight, module.eps)  # type: ignore[no-untyped-call, no-any-return]


class _RMSNorm(torch.autograd.Function):
    """y = x̂ · w with x̂ = x / rms(x); dx = (g · w − x̂ · mean(g · w · x̂)) / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, weight, scale)
        out: Tensor = normed * weight
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        normed, weight, scale = ctx.saved_tensors
        grad = grads[0]
        along = grad * normed
        for_weight = along.flatten(0, -2).sum(dim=0)
        mean = (along @ weight).div_(-normed.shape[-1]).unsqueeze(-1)
        for_x: Tensor = torch.addcmul(grad * weight, normed, mean).mul_(scale)
        return for_x, for_weight, None
