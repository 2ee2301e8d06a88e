"""What makes a step faster and changes no result beyond rounding: layers in fewer passes, freed memory that is kept.

Both are put on from outside; the model's files do not know.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from heedful.models.decoder import Attention, Decoder
from heedful.models.layers import MLP, RMSNorm

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


def fuse_layers(decoder: Decoder) -> None:
    """RMS norms, gated units and rotary turns with backward passes of their own: fewer passes over memory than what
    autograd makes of the plain ops, and no parts that are joined afterwards.
    """
    for module in decoder.modules():
        if isinstance(module, RMSNorm):
            module.forward = partial(_rms_norm, module)  # type: ignore[method-assign]
        elif isinstance(module, MLP) and module.gated and module.activation == "silu":
            module.forward = partial(_gated, module)  # type: ignore[method-assign]
        elif isinstance(module, Attention):
            module.rotate = _rotate


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


def _gated(module: MLP, x: Tensor) -> Tensor:
    return module.down(_GatedUnit.apply(module.up(x)))  # type: ignore[no-untyped-call, no-any-return]


class _GatedUnit(torch.autograd.Function):
    """joined (T, 2 · I), gates first → silu(gate) · up (T, I); silu is computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor) -> Tensor:
        ctx.save_for_backward(joined)
        gate, up = joined.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (joined,) = ctx.saved_tensors
        gate, up = joined.chunk(2, dim=-1)
        for_joined = torch.empty_like(joined)
        for_gate, for_up = for_joined.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grads[0], out=for_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=for_gate)
        return for_joined


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _Rotation.apply(x, cos, sin)  # type: ignore[no-untyped-call, no-any-return]


class _Rotation(torch.autograd.Function):
    """`reference.rotate`; the gradient is turned back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second = x[..., :half], x[..., half : 2 * half]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin, value=sign)
    out[..., 2 * half :] = x[..., 2 * half :]
    return out
