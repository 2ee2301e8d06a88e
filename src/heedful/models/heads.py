"""Heads of encoders: pooled hidden states to logits of classes, hidden states to logits of tokens.

    logits = SequenceHead(config)(pooled)             # (texts, C) → (texts, classes)
    logits = MlmHead(config)(hidden, embed.weight)    # (T, C) → (T, vocabulary)

One of each kind serves all families; what differs between them is data in models/head_config.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heedful.models.bert import activate
from heedful.models.head_config import MlmHeadConfig, SequenceHeadConfig
from heedful.models.layers import Linear


class SequenceHead(nn.Module):
    """BERT's pooler and classifier, DeBERTa's ContextPooler and classifier, ModernBERT's head and classifier."""

    def __init__(self, config: SequenceHeadConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.dense = Linear(width, width, bias=config.dense_bias)
        self.norm = nn.LayerNorm(width, eps=config.norm_eps, bias=config.norm_bias) if config.norm else nn.Identity()
        self.out = Linear(width, len(config.labels))

    def forward(self, pooled: Tensor) -> Tensor:
        """(texts, C), pooled by `config.pooling` → (texts, classes)."""
        return self.out(self.norm(activate(self.config.activation, self.dense(pooled))))  # type: ignore[no-any-return]

    def weight_slots(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by the name of weights/head_names.py, with the parameter it belongs in."""
        yield from self.named_parameters()


class MlmHead(nn.Module):
    """Which token stands at each place: the head of masked language models."""

    def __init__(self, config: MlmHeadConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.dense = Linear(width, width, bias=config.dense_bias)
        self.norm = nn.LayerNorm(width, eps=config.norm_eps, bias=config.norm_bias)
        self.out = _Out(config)

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """Hidden states (T, C) and the embedding of tokens (V, C), which a head that is not tied leaves → (T, V)."""
        x = self.norm(activate(self.config.activation, self.dense(hidden)))
        weight = embedding if self.out.weight is None else self.out.weight
        return F.linear(x, weight, self.out.bias)

    def weight_slots(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by the name of weights/head_names.py, with the parameter it belongs in."""
        yield from self.named_parameters()


class _Out(nn.Module):
    """The last matrix, where the head has one for itself, and the bias, where it has one."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, config: MlmHeadConfig) -> None:
        super().__init__()
        weight, bias = torch.zeros(config.vocab_size, config.hidden_size), torch.zeros(config.vocab_size)
        self.register_parameter("weight", None if config.tied else nn.Parameter(weight))
        self.register_parameter("bias", nn.Parameter(bias) if config.out_bias else None)
