"""Attention inside whole texts that lie one after another: no cache, no padding. The first two follow
`attention.Attend`; DeBERTa's has terms of its own.

The cost of a text of l tokens is l² visits a head where every token sees every token, l (l + 1) / 2 where it sees the
past alone, less within windows, whatever the other texts' lengths are.
"""

from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from heedful.kernels.attention import attention, causal_bias

QUERY_BLOCK = 512
"""Queries whose mask is held at once: a mask of a whole long text would take its length squared."""
LOCAL_BLOCK = 128
"""The same in a layer with windows on both sides: a block computes block + 2 · window keys and masks some."""


class BidirectionalAttend:
    """Every token sees every token of its text, or those less than `window` places away, on both sides. `lengths`: of
    the texts, in order; neighbours of one length are run together.
    """

    def __init__(self, lengths: list[int]) -> None:
        self._runs = _runs_of(lengths)
        self._tokens = [length * texts for length, texts in self._runs]

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float, softcap: float | None
    ) -> Tensor:
        assert window is None or window >= 1, window
        assert softcap is None, softcap
        outs = []
        parts = zip(self._runs, *(torch.split(x, self._tokens) for x in (q, k, v)), strict=True)
        for (length, texts), *qkv in parts:
            by_text = [_by_text(x, texts) for x in qkv]
            if window is None or length <= window:
                out = F.scaled_dot_product_attention(by_text[0], by_text[1], by_text[2], scale=scale)
            else:
                out = _local(by_text[0], by_text[1], by_text[2], window, scale)
            outs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outs)


def _runs_of(lengths: list[int]) -> list[tuple[int, int]]:
    """(length, how many neighbours have it)."""
    return [(length, len(list(run))) for length, run in groupby(lengths)]


def _by_text(x: Tensor, texts: int) -> Tensor:
    """(texts · length, H, D) → (texts, H, length, D)."""
    return x.reshape(texts, len(x) // texts, *x.shape[1:]).transpose(1, 2)


def _local(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """All (texts, H, length, D); blocks of queries, each with the keys that any of them sees."""
    length, outs = q.shape[2], []
    for start in range(0, length, LOCAL_BLOCK):
        end = min(start + LOCAL_BLOCK, length)
        first, last = max(0, start - window + 1), min(length, end + window - 1)
        apart = torch.arange(start, end, device=q.device)[:, None] - torch.arange(first, last, device=q.device)
        bias = torch.zeros(apart.shape, dtype=q.dtype, device=q.device)
        bias.masked_fill_(apart.abs() >= window, float("-inf"))
        keys, values = k[:, :, first:last], v[:, :, first:last]
        outs.append(F.scaled_dot_product_attention(q[:, :, start:end], keys, values, attn_mask=bias, scale=scale))
    return torch.cat(outs, dim=2)


class DisentangledAttend:
    """Every token sees every token of its text; a pair's score has terms for its distance. `lengths`: of texts."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.longest = max(lengths)
        self._runs = _runs_of(lengths)
        self._tokens = [length * texts for length, texts in self._runs]

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        position_keys: Tensor | None,
        position_queries: Tensor | None,
        rows: Tensor,
        scale: float,
    ) -> Tensor:
        """q, k, v (T, H, D); position_keys, position_queries (R, H, D), None: no such term; rows (2 · longest − 1,):
        the row of each distance i − j, from 1 − longest on → (T, H, D).
        """
        outs = []
        for (length, texts), *qkv in zip(self._runs, *(torch.split(x, self._tokens) for x in (q, k, v)), strict=True):
            own = rows[self.longest - length : self.longest + length - 1]
            query, key, value = (_by_text(x, texts) for x in qkv)
            # of every key with every row, once; a pair's is picked below
            at_keys = None if position_queries is None else _with_rows(key, position_queries)
            blocks = []
            for start in range(0, length, LOCAL_BLOCK):
                block = query[:, :, start : start + LOCAL_BLOCK]
                picked = _picked_rows(own, start, block.shape[2], length)
                scores = block @ key.transpose(-1, -2)
                if position_keys is not None:
                    at_queries = _with_rows(block, position_keys)
                    scores += at_queries.gather(-1, picked.expand(*block.shape[:2], -1, -1))
                if at_keys is not None:
                    scores += at_keys.gather(-1, picked.T.expand(*key.shape[:2], -1, -1)).transpose(-1, -2)
                blocks.append((scores * scale).softmax(dim=-1) @ value)
            outs.append(torch.cat(blocks, dim=2).transpose(1, 2).flatten(0, 1))
        return torch.cat(outs)


def _with_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x (texts, H, n, D) · rows (R, H, D) → (texts, H, n, R)."""
    return x @ rows.permute(1, 2, 0)


def _picked_rows(rows: Tensor, start: int, num_queries: int, length: int) -> Tensor:
    """The row of each pair (query, key), (num_queries, length); `rows`: of distances from 1 − length on."""
    queries = torch.arange(start, start + num_queries, device=rows.device)
    return rows[queries[:, None] - torch.arange(length, device=rows.device) + length - 1]


class CausalTextAttend:
    """Every token sees itself and the past of its text, within the layer's window. What `attention.DenseAttend`
    computes, some queries at a time, so that memory grows with the length and not with its square.
    """

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float, softcap: float | None
    ) -> Tensor:
        texts = zip(*(torch.split(x, self._lengths) for x in (q, k, v)), strict=True)
        return torch.cat([causal_attention(*text, window=window, scale=scale, softcap=softcap) for text in texts])


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float, softcap: float | None
) -> Tensor:
    """Of one text whose newest tokens the queries are: q (T, H, D), k and v (N, K, D), N at least T → (T, H, D)."""
    before, outs = len(k) - len(q), []
    for begin in range(0, len(q), QUERY_BLOCK):
        block = q[begin : begin + QUERY_BLOCK]
        start, end = before + begin, before + begin + len(block)
        first = 0 if window is None else max(0, start - window + 1)
        bias = causal_bias(start, len(block), first, end - first, window, q.device)
        outs.append(attention(block, k[first:end], v[first:end], bias, scale=scale, softcap=softcap))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


class PackedCausalAttend:
    """What CausalTextAttend computes, made for training on many texts at once: texts of one length that are neighbours
    run together, and no mask is made where the past is all there is. Gradients flow.
    """

    def __init__(self, lengths: list[int]) -> None:
        self._runs = _runs_of(lengths)
        self._tokens = [length * texts for length, texts in self._runs]

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float, softcap: float | None
    ) -> Tensor:
        assert softcap is None, softcap
        outs = []
        parts = zip(self._runs, *(torch.split(x, self._tokens) for x in (q, k, v)), strict=True)
        for (length, texts), *qkv in parts:
            query, key, value = (_by_text(x, texts) for x in qkv)
            if window is None or length <= window:
                out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
            else:
                out = _local_past(query, key, value, window, scale)
            outs.append(out.transpose(1, 2).flatten(0, 1))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def _local_past(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """q (texts, H, length, D), k and v (texts, K, length, D); blocks of queries, each with the keys that any sees."""
    length, outs = q.shape[2], []
    for start in range(0, length, LOCAL_BLOCK):
        end, first = min(start + LOCAL_BLOCK, length), max(0, start - window + 1)
        bias = causal_bias(start, end - start, first, end - first, window, q.device)
        keys, values = k[:, :, first:end], v[:, :, first:end]
        outs.append(
            F.scaled_dot_product_attention(
                q[:, :, start:end], keys, values, attn_mask=bias, scale=scale, enable_gqa=True
            )
        )
    return torch.cat(outs, dim=2)
