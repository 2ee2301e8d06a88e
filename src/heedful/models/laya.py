"""Laya: an encoder that reads a question with its options and a state, and scores each option at its mark.

    logits = laya(token_ids, positions, question_types, markers, attend, head_attend)      # (markers,)

Hidden states of the trunk, plus an embedding of the question's type, pass some layers more; an option's logit is made
from the state at its mark. Tokens of several questions lie one after another in T, without padding; the two attends
alone know where each begins.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from heedful.kernels.attention import Attend
from heedful.kernels.text_attention import DisentangledAttend
from heedful.models.bert import Bert, FeedForward, SelfAttention
from heedful.models.deberta import Deberta
from heedful.models.encoder_config import EncoderConfig
from heedful.models.laya_config import ACT_FACTS, ACT_WIDTH, QUESTION_TYPES, LayaConfig
from heedful.models.layers import Linear
from heedful.models.modernbert import ModernBert


class HeadBlock(nn.Module):
    """Each norm comes before its part."""

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = SelfAttention(config, layer)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """(T, C) → (T, C), or of these rows alone, int64 (M,) → (M, C)."""
        x = x + self.attn(self.attn_norm(x), attend)
        x = x if rows is None else x[rows]
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Scorer(nn.Module):
    """out(gelu(dense(norm(x)))): one number a row."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.out = Linear(config.hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, C) → (rows,)."""
        return self.out(F.gelu(self.dense(self.norm(x)))).squeeze(-1)  # type: ignore[no-any-return]


class ActHead(nn.Module):
    """Whether to act on an answer or to pass it on. Its weights are kept; no answer needs them."""

    def __init__(self, width: int, actions: int) -> None:
        super().__init__()
        self.dense = Linear(width + ACT_FACTS, ACT_WIDTH)
        self.out = Linear(ACT_WIDTH, actions)


class LayaHead(nn.Module):
    """All that stands on the trunk."""

    def __init__(self, config: LayaConfig) -> None:
        super().__init__()
        layers = config.head
        self.type_embed = nn.Embedding(len(QUESTION_TYPES), layers.hidden_size)
        self.layers = nn.ModuleList(HeadBlock(layers, layer) for layer in range(layers.num_layers))
        self.scorer = Scorer(layers)
        self.act = None if config.actions is None else ActHead(layers.hidden_size, config.actions)

    def forward(self, hidden: Tensor, question_types: Tensor, markers: Tensor, attend: Attend) -> Tensor:
        """Hidden states (T, C) of the trunk; question_types int64 (T,); markers int64 (M,), places in T → (M,)."""
        x = hidden + self.type_embed(question_types)
        for block in self.layers[:-1]:
            x = block(x, attend)
        return self.scorer(self.layers[-1](x, attend, markers))  # type: ignore[no-any-return]

    def weight_slots(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by the name of weights/laya_names.py, with the parameter it belongs in."""
        yield from self.named_parameters()


class LayaNetwork(nn.Module):
    def __init__(self, trunk: Bert | ModernBert | Deberta, head: LayaHead) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        question_types: Tensor,
        markers: Tensor,
        attend: Attend | DisentangledAttend,
        head_attend: Attend,
    ) -> Tensor:
        """token_ids, positions and question_types int64 (T,), the last the type of each token's question; markers int64
        (M,), places in T. `attend` is of the trunk: a DisentangledAttend where it is a DeBERTa → logits (M,).
        """
        hidden = self.trunk(token_ids, positions, token_ids.new_zeros(token_ids.shape), attend)
        return self.head(hidden, question_types, markers, head_attend)  # type: ignore[no-any-return]
