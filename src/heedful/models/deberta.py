"""The trunk of DeBERTa v2 and v3 (He et al., 2020 and 2021): scores from contents and from their distance.

    hidden = deberta(token_ids, positions, token_types, attend)      # (T,), (T,), (T,) → (T, C)

The score of tokens i and j is (qᵢ·kⱼ + qᵢ·Kr[d] + kⱼ·Qr[d]) / √(D · terms); d is the bucket of i − j, Kr and Qr are
keys and queries made of a table of distances. `Attend` cannot say that, so `attend` is a DisentangledAttend.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from heedful.kernels.text_attention import DisentangledAttend
from heedful.models.bert import FeedForward, activate
from heedful.models.encoder_config import Convolution, EncoderConfig, RelativePositions
from heedful.models.layers import Linear

PositionTerms = tuple[Tensor | None, Tensor | None]
"""Kr and Qr of a layer, each (2 · span, H, D), or None where the model has no such term."""


class DisentangledSelfAttention(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        assert config.relative is not None
        self.relative = config.relative
        self.heads, self.head_dim = config.num_heads, config.head_dim
        self.q, self.k, self.v, self.out = (Linear(config.hidden_size, config.hidden_size) for _ in range(4))
        own = not self.relative.shared
        if own and self.relative.content_to_position:
            self.pos_k = Linear(config.hidden_size, config.hidden_size)
        if own and self.relative.position_to_content:
            self.pos_q = Linear(config.hidden_size, config.hidden_size)

    def position_terms(self, table: Tensor) -> PositionTerms:
        """From the table of distances (2 · span, C)."""
        shared = self.relative.shared
        keys = queries = None
        if self.relative.content_to_position:
            keys = self._by_head((self.k if shared else self.pos_k)(table))
        if self.relative.position_to_content:
            queries = self._by_head((self.q if shared else self.pos_q)(table))
        return keys, queries

    def forward(self, x: Tensor, terms: PositionTerms, rows: Tensor, attend: DisentangledAttend) -> Tensor:
        q, k, v = (self._by_head(project(x)) for project in (self.q, self.k, self.v))
        scale = (self.head_dim * (1 + self.relative.kinds)) ** -0.5
        out = attend(q, k, v, position_keys=terms[0], position_queries=terms[1], rows=rows, scale=scale)
        return self.out(out.reshape(len(x), -1))  # type: ignore[no-any-return]

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(len(x), self.heads, self.head_dim)


class DebertaBlock(nn.Module):
    """Each norm comes after the residual sum."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attn = DisentangledSelfAttention(config)
        self.attn_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = FeedForward(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, x: Tensor, terms: PositionTerms, rows: Tensor, attend: DisentangledAttend) -> Tensor:
        x = self.attn_norm(x + self.attn(x, terms, rows, attend))
        return self.mlp_norm(x + self.mlp(x))  # type: ignore[no-any-return]


class NeighbourConvolution(nn.Module):
    """norm(x + act(conv(embedded))); beyond the ends of a text there are zeros."""

    def __init__(self, config: EncoderConfig, convolution: Convolution) -> None:
        super().__init__()
        width = config.hidden_size
        self.activation = convolution.activation
        reach = (convolution.width - 1) // 2
        self.conv = nn.Conv1d(width, width, convolution.width, padding=reach, groups=convolution.groups)
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)

    def forward(self, embedded: Tensor, x: Tensor, lengths: list[int]) -> Tensor:
        """Both (T, C), of texts of these lengths → (T, C)."""
        near = torch.cat([self.conv(text.T).T for text in torch.split(embedded, lengths)])
        return self.norm(x + activate(self.activation, near))  # type: ignore[no-any-return]


class Deberta(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        assert config.relative is not None
        self.config, self.relative = config, config.relative
        width, eps = config.hidden_size, config.norm_eps
        self.embed = nn.Embedding(config.vocab_size, width)
        self.position_embed = nn.Embedding(config.context_len, width) if config.learned_positions else None
        self.type_embed = nn.Embedding(config.token_types, width) if config.token_types else None
        self.embed_norm = nn.LayerNorm(width, eps=eps)
        self.rel_embed = nn.Embedding(2 * self.relative.span, width)
        self.rel_norm = nn.LayerNorm(width, eps=eps) if self.relative.normed else None
        self.layers = nn.ModuleList(DebertaBlock(config) for _ in range(config.num_layers))
        self.conv = NeighbourConvolution(config, config.convolution) if config.convolution else None
        self._fixed_terms: list[PositionTerms] | None = None

    def forward(self, token_ids: Tensor, positions: Tensor, token_types: Tensor, attend: DisentangledAttend) -> Tensor:
        """All int64 (T,); `token_types` count where the model has such embeddings → last hidden states (T, C)."""
        x = self.embed(token_ids)
        if self.position_embed is not None:
            x = x + self.position_embed(positions)
        if self.type_embed is not None:
            x = x + self.type_embed(token_types)
        embedded = x = self.embed_norm(x)
        rows = distance_rows(self.relative, attend.longest)
        for layer, terms in enumerate(self._fixed_terms or self._position_terms()):
            x = self.layers[layer](x, terms, rows, attend)
            if layer == 0 and self.conv is not None:
                x = self.conv(embedded, x, attend.lengths)
        return x  # type: ignore[no-any-return]

    @torch.inference_mode()
    def fix_positions(self) -> None:
        """Computes Kr and Qr once for all calls: they depend on no text. The weights must not change afterwards."""
        self._fixed_terms = self._position_terms()

    def weight_slots(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by the name of weights/encoder_names.py, with the parameter it belongs in."""
        yield from self.named_parameters()

    def _position_terms(self) -> list[PositionTerms]:
        table = self.rel_embed.weight
        table = table if self.rel_norm is None else self.rel_norm(table)
        return [cast(DebertaBlock, block).attn.position_terms(table) for block in self.layers]


def distance_rows(relative: RelativePositions, longest: int) -> Tensor:
    """The table's row for each distance i − j from 1 − longest to longest − 1, int64 (2 · longest − 1,)."""
    distances = torch.arange(1 - longest, longest)
    buckets = _log_buckets(relative, distances) if relative.buckets else distances
    return (buckets + relative.span).clamp(0, 2 * relative.span - 1)


def _log_buckets(relative: RelativePositions, distances: Tensor) -> Tensor:
    """Distances up to buckets / 2 as they are; the rest by logarithm. float32, as the models were trained."""
    middle = relative.buckets // 2
    far = distances.abs().clamp(min=middle).float() / middle
    widest = torch.tensor((relative.max_distance - 1) / middle)
    logarithmic = torch.ceil(torch.log(far) / torch.log(widest) * (middle - 1)) + middle
    return torch.where(distances.abs() <= middle, distances, (logarithmic * distances.sign()).long())
