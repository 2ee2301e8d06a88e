"""Attention inside whole texts that lie one after another: no cache, no padding. Both follow `attention.Attend`.

The cost of a text of l tokens is l² visits a head where every token sees every token, l (l + 1) / 2 where it sees the
past alone, whatever the other texts' lengths are.
"""

from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from heedful.kernels.attention import attention, causal_bias

QUERY_BLOCK = 512
"""Queries whose mask is held at once: a mask of a whole long text would take its length squared."""


class BidirectionalAttend:
    """Every token sees every token of its text. `lengths`: of the texts, in order; neighbours of one length are run
    together.
    """

    def __init__(self, lengths: list[int]) -> None:
        self._runs = [(length, len(list(run))) for length, run in groupby(lengths)]
        self._tokens = [length * texts for length, texts in self._runs]

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float, softcap: float | None
    ) -> Tensor:
        assert window is None, window
        assert softcap is None, softcap
        parts = zip(self._runs, *(torch.split(x, self._tokens) for x in (q, k, v)), strict=True)
        return torch.cat([_attend_within(length, texts, *qkv, scale=scale) for (length, texts), *qkv in parts])


def _attend_within(length: int, texts: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """q, k and v (texts · length, H, D) → the same shape."""
    shape = (texts, length, *q.shape[1:])
    by_text = [x.view(shape).transpose(1, 2) for x in (q, k, v)]  # (texts, H, length, D)
    out = F.scaled_dot_product_attention(by_text[0], by_text[1], by_text[2], scale=scale)
    return out.transpose(1, 2).reshape(q.shape)


class CausalTextAttend:
    """Every token sees itself and the past of its text, within the layer's window. What `attention.DenseAttend`
    computes, some queries at a time, so that memory grows with the length and not with its square.
    """

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float, softcap: float | None
    ) -> Tensor:
        outs = []
        for q_text, k_text, v_text in zip(*(torch.split(x, self._lengths) for x in (q, k, v)), strict=True):
            for start in range(0, len(q_text), QUERY_BLOCK):
                block = q_text[start : start + QUERY_BLOCK]
                end = start + len(block)
                first = 0 if window is None else max(0, start - window + 1)
                bias = causal_bias(start, len(block), first, end - first, window, q.device)
                keys, values = k_text[first:end], v_text[first:end]
                outs.append(attention(block, keys, values, bias, scale=scale, softcap=softcap))
        return torch.cat(outs)
