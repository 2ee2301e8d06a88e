"""The plain PyTorch meaning of every op: the judge of the fast ones. Written to be read, never optimised.

Shapes: T query tokens, N key tokens, H query heads, K KV heads, D channels a head, C hidden channels.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def attention_mask(
    start: int,
    num_queries: int,
    first_key: int,
    num_keys: int,
    window: int | None,
    sinks: int = 0,
    device: torch.device | None = None,
) -> Tensor:
    """Which keys each query attends to, bool (T, N): causal, within the window, or among the first `sinks` tokens.

    Queries stand at positions start + t, keys at first_key + n. A window of w is the query's own position and the
    w - 1 before it.
    """
    query_at = torch.arange(start, start + num_queries, device=device)[:, None]
    key_at = torch.arange(first_key, first_key + num_keys, device=device)[None, :]
    allowed = key_at <= query_at
    if window is not None:
        allowed &= (query_at - key_at < window) | (key_at < sinks)
    return allowed


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sink_q: Tensor | None = None,
    sinks: int = 0,
) -> tuple[Tensor, Tensor]:
    """Softmax attention with grouped heads: query head h reads KV head h // (H / K).

    q (T, H, D), k and v (N, K, D), allowed bool (T, N) → out (T, H, D), log-sum-exp of the scores (T, H).
    The first `sinks` keys meet the queries `sink_q` (T, H, D) where they are given (arXiv:2309.17453).
    """
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    parts = [(q, k)] if sink_q is None else [(sink_q, k[:sinks]), (q, k[sinks:])]
    scores = torch.cat([torch.einsum("thd,nhd->thn", *part) for part in parts], dim=-1) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed[:, None, :], float("-inf"))
    lse = scores.logsumexp(dim=-1)
    return torch.einsum("thn,nhd->thd", (scores - lse[..., None]).exp(), v), lse


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last axis (arXiv:1910.07467)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel pairs (i, i + R/2) of x (T, H, D) by the angles behind cos, sin (T, R/2); channels ≥ R stay."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (T, in) · weightᵀ (out, in) + bias (out) → (T, out)."""
    y = x @ weight.T
    return y if bias is None else y + bias


# ---- rows of keys and values in few bits ------------------------------------------------------------------------

F16_MAX = 65504.0
Q4_BLOCK = 32


def encode(number: str, x: Tensor) -> Tensor:
    """Rows x (..., D) in a number format of request.KV_ROW_BYTES: uint8 (..., bytes of a row)."""
    x = x.float()
    if number == "f32":
        return x.contiguous().view(torch.uint8)
    if number == "f16":
        return x.clamp(-F16_MAX, F16_MAX).half().contiguous().view(torch.uint8)
    assert number in ("q8", "q4"), number
    return _encode_q8(x) if number == "q8" else _encode_q4(x)


def decode(number: str, rows: Tensor, head_dim: int) -> Tensor:
    """What `encode` stored, uint8 (..., bytes of a row) → float32 (..., D); of "f32" a view of the rows themselves."""
    if number == "f32":
        return rows.view(torch.float32)
    if number == "f16":
        return rows.view(torch.float16).float()
    assert number in ("q8", "q4"), number
    return _decode_q8(rows, head_dim) if number == "q8" else _decode_q4(rows, head_dim)


def _encode_q8(x: Tensor) -> Tensor:
    """Codes of the row, int8, then its scale, float32: max |x| / 127; code = round half to even(x / scale)."""
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    codes = torch.where(scale == 0, 0.0, x / scale).round().clamp(-127, 127)  # below 1e-43 a scale is too coarse
    return torch.cat((_bytes(codes.to(torch.int8)), _bytes(scale)), dim=-1)


def _decode_q8(rows: Tensor, head_dim: int) -> Tensor:
    return rows[..., :head_dim].view(torch.int8) * _from_bytes(rows[..., head_dim:], torch.float32)


def _encode_q4(x: Tensor) -> Tensor:
    """ggml's Q4_0: of each 32 channels a scale, float16, then 16 bytes: channel j in the low half of byte j, j + 16 in
    the high half. The last block is filled up with zeros.
    """
    blocks = _blocks(F.pad(x, (0, -x.shape[-1] % Q4_BLOCK)), Q4_BLOCK)
    extreme = blocks.gather(-1, _first_largest(blocks.abs()))
    scale = extreme / -8
    inverse = 1 / scale
    inverse = torch.where(inverse.isfinite(), inverse, 0.0)  # a scale that small is stored as 0
    codes = (blocks * inverse + 8.5).trunc().clamp(max=15).to(torch.uint8)
    low, high = codes.chunk(2, dim=-1)
    return torch.cat((_bytes(scale.half()), low | high << 4), dim=-1).flatten(-2)


def _decode_q4(rows: Tensor, head_dim: int) -> Tensor:
    blocks = _blocks(rows, 2 + Q4_BLOCK // 2)
    nibbles = blocks[..., 2:]
    codes = torch.cat((nibbles & 15, nibbles >> 4), dim=-1).to(torch.int8) - 8
    return (codes * _from_bytes(blocks[..., :2], torch.float16).float()).flatten(-2)[..., :head_dim]


def _blocks(x: Tensor, size: int) -> Tensor:
    """(..., n · size) → (..., n, size)."""
    return x.reshape(*x.shape[:-1], -1, size)


def _first_largest(x: Tensor) -> Tensor:
    """Index of the largest along the last axis, the first of equals, (..., 1); argmax promises no order."""
    return (x == x.amax(dim=-1, keepdim=True)).to(torch.uint8).argmax(dim=-1, keepdim=True)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _from_bytes(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Copied first: scales lie at any byte."""
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)


def hadamard(x: Tensor, block: int) -> Tensor:
    """x (..., D) times the normalised Walsh-Hadamard matrix (natural order) in blocks of channels; its own inverse.

    Sums and differences of channels 1, 2, 4, … apart: per row, so that no result depends on the rows beside it.
    """
    distance = 1
    while distance < block:
        first, second = _blocks(x, 2 * distance).chunk(2, dim=-1)
        x = torch.cat((first + second, first - second), dim=-1).flatten(-2)
        distance *= 2
    return x * (1 / math.sqrt(block))


# ---- which pages to read (after Quest, arXiv:2406.10774) ---------------------------------------------------------

BOUND_DEVIATIONS = 2.0
RENEWAL_BONUS = 1.25
"""What a page promises counts so many times where it was chosen before."""


def encode_bounds(keys: Tensor) -> Tensor:
    """keys (..., page length, K, D) of full pages, as stored → uint8 (..., K, 2·D + 8): means of the channels, int8,
    then variances, int8, then a float32 scale of either.
    """
    variances, means = torch.var_mean(keys, dim=-3, correction=0)
    sides = []
    for side in (means, variances):
        scale = side.abs().amax(dim=-1, keepdim=True) / 127
        codes = torch.where(scale == 0, 0.0, side / scale).round().clamp(-127, 127)
        sides.append((_bytes(codes.to(torch.int8)), _bytes(scale)))
    return torch.cat([codes for codes, _ in sides] + [scale for _, scale in sides], dim=-1)


def decode_bounds(rows: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 (..., K, 2·D + 8) → means and variances, float32 (..., K, D) each."""
    means, variances = rows[..., :-8].view(torch.int8).chunk(2, dim=-1)
    scales = _from_bytes(rows[..., -8:], torch.float32)
    return means * scales[..., :1], variances * scales[..., 1:]


def page_bounds(q: Tensor, means: Tensor, variances: Tensor) -> Tensor:
    """What a key two standard deviations above its page's mean scores: q·mean + 2 √(Σ q²·variance), as if a page's
    channels varied independently. q (H, D), means and variances (P, K, D) → (H, P).
    """
    _, kv_heads, head_dim = means.shape
    q = q.reshape(kv_heads, -1, head_dim)
    at_mean = torch.einsum("kgd,pkd->kgp", q, means.to(q.dtype))
    variance = torch.einsum("kgd,pkd->kgp", q.square(), variances.to(q.dtype))
    return (at_mean + BOUND_DEVIATIONS * variance.sqrt()).flatten(0, 1)


def page_weights(q: Tensor, keys: Tensor, softcap: float | None) -> Tensor:
    """Of what a page's keys weigh, the logarithm: log Σ exp(score).

    q (H, D), scaled, keys (P, page length, K, D) → (H, P).
    """
    q = q.reshape(keys.shape[2], -1, keys.shape[3])
    scores = torch.einsum("kgd,pnkd->kgpn", q, keys)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    return scores.logsumexp(dim=-1).flatten(0, 1)


def page_promises(bounds: Tensor, kv_heads: int) -> Tensor:
    """bounds (..., H, P), scaled as scores are → (..., K, P): a page's shares of each query head's softmax, summed over
    the query heads of a KV head.
    """
    *rows, heads, pages = bounds.shape
    return bounds.softmax(dim=-1).reshape(*rows, kv_heads, heads // kv_heads, pages).sum(dim=-2)


def choose_pages(promises: Tensor, count: int, chosen_before: Tensor | None = None) -> Tensor:
    """For each KV head the `count` candidates that promise most, the earlier one of equals; ascending (K, count).

    promises (K, P). `chosen_before` bool (K, P): those that have the bonus; None when nothing was chosen yet.
    """
    if chosen_before is not None:
        promises = torch.where(chosen_before, promises * RENEWAL_BONUS, promises)
    return promises.sort(dim=-1, descending=True, stable=True).indices[:, :count].sort(dim=-1).values
