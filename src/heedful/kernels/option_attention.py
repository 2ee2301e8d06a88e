"""Attention inside questions whose options do not see each other, so that their order cannot matter.

Follows `attention.Attend`. A question is its text, its options and its state, one after another; options share their
positions, and a local layer's window counts positions, not places.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from heedful.kernels.text_attention import QUERY_BLOCK


class OptionAttend:
    """`lengths` of the questions, in order; `positions` and `options` int64 (T,): the option that a token belongs to,
    from 1 on, or 0: none. Tokens of two different options do not see each other; within a window all others do that are
    less than `window` positions apart.
    """

    def __init__(self, lengths: list[int], positions: Tensor, options: Tensor) -> None:
        self._lengths = lengths
        self._questions = list(zip(torch.split(positions, lengths), torch.split(options, lengths), strict=True))
        self._biases: dict[tuple[int, int | None], Tensor] = {}

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float, softcap: float | None
    ) -> Tensor:
        assert softcap is None, softcap
        outs = []
        for question, qkv in enumerate(zip(*(torch.split(x, self._lengths) for x in (q, k, v)), strict=True)):
            query, key, value = (x.transpose(0, 1)[None] for x in qkv)  # each (1, H, length, D)
            for start in range(0, query.shape[2], QUERY_BLOCK):
                bias = self._bias(question, start, window, q.dtype)
                block = query[:, :, start : start + QUERY_BLOCK]
                out = F.scaled_dot_product_attention(block, key, value, attn_mask=bias, scale=scale)
                outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    def _bias(self, question: int, start: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Of the queries from `start` on. Kept for the next layer where it is of a whole question, which is short."""
        if (kept := self._biases.get((question, window))) is not None:
            return kept
        positions, options = self._questions[question]
        sees = visible(positions, options, slice(start, start + QUERY_BLOCK), window)
        bias = torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, float("-inf"))
        if len(sees) == len(positions):
            self._biases[question, window] = bias
        return bias


def visible(positions: Tensor, options: Tensor, block: slice, window: int | None) -> Tensor:
    """Whether a token of `block` sees each token of its question, bool (block, length)."""
    own = options[block, None]
    sees = (own == options) | (own == 0) | (options == 0)
    if window is not None:
        sees &= (positions[block, None] - positions).abs() < window
    return sees
