"""The contract between a model's layers and whatever holds their keys and values, and the dense ops behind it.

A layer computes q, k, v and calls `attend`; it passes facts of the model (window, scale, soft cap). The object holds
facts of the step (which tokens belong together, what is cached). Models never see a cache.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from heedful.kernels import reference


class Attend(Protocol):
    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        window: int | None,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """q (T, H, D), k and v (T, K, D) of the step's tokens, positions already applied → (T, H, D).

        May store k and v; the caller must not change them afterwards.
        """
        ...


class DenseAttend:
    """Causal attention among the tokens of the call alone: no cache. `lengths` are the packed documents, in order."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        window: int | None,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        documents = zip(*(torch.split(x, self.lengths) for x in (q, k, v)), strict=True)
        outs = []
        for q_doc, k_doc, v_doc in documents:
            bias = causal_bias(0, len(q_doc), 0, len(q_doc), window, q.device)
            outs.append(attention(q_doc, k_doc, v_doc, bias, scale=scale, softcap=softcap))
        return torch.cat(outs)


def causal_bias(
    start: int,
    num_queries: int,
    first_key: int,
    num_keys: int,
    window: int | None,
    device: torch.device | None = None,
    *,
    sinks: int = 0,
) -> Tensor | None:
    """0 where a query attends, -inf where not, float (T, sinks + N); None when every query attends to every key.

    The keys are those at positions [0, sinks), where a window does not count, and at first_key + n.
    """
    sees_all = num_queries == 1 and (window is None or num_keys <= window)
    if sees_all:
        return None
    at_sinks = reference.attention_mask(start, num_queries, 0, sinks, None, device=device)
    allowed = reference.attention_mask(start, num_queries, first_key, num_keys, window, device=device)
    allowed = torch.cat((at_sinks, allowed), dim=1) if sinks else allowed
    # a float mask: PyTorch's CPU kernel is 5-15 % faster with it than with a bool one
    return torch.zeros(allowed.shape, device=device).masked_fill_(~allowed, float("-inf"))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    sink_q: Tensor | None = None,
    sinks: int = 0,
) -> Tensor:
    """The same as `reference.attention`, without the log-sum-exp: q (T, H, D), k and v (N, K, D) → (T, H, D)."""
    if softcap is not None or sink_q is not None:  # PyTorch's fused kernel has neither
        allowed = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device) if bias is None else bias == 0
        return reference.attention(q, k, v, allowed, scale=scale, softcap=softcap, sink_q=sink_q, sinks=sinks)[0]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    bias = bias if bias is None else bias.to(q.dtype)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)
