"""The trunk of ModernBERT (Warner et al., 2024): rotary positions, gated MLPs, local layers between ones that see all.

    hidden = modernbert(token_ids, positions, token_types, attend)      # (T,), (T,), (T,) → (T, C)

Tokens of several texts lie one after another in T, without padding; `attend` alone knows where each begins.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from heedful.kernels.attention import Attend
from heedful.kernels.reference import rotate
from heedful.models.bert import activate
from heedful.models.encoder_config import EncoderConfig
from heedful.models.layers import Linear, rotary_table
from heedful.models.rope import Rope


class RotaryAttention(nn.Module):
    """Projects to q, k, v (one matrix, in that order), turns q and k by their positions, attends, projects back."""

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.window = layer, config.layer_windows[layer]
        self.heads, self.head_dim = config.num_heads, config.head_dim
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=config.attention_bias)
        self.out = Linear(config.hidden_size, config.hidden_size, bias=config.attention_bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.heads, self.head_dim).unbind(1)  # each (T, H, D)
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        out = attend(self.layer, q, k, v, window=self.window, scale=self.head_dim**-0.5, softcap=None)
        return self.out(out.reshape(len(x), -1))  # type: ignore[no-any-return]


class GatedFeedForward(nn.Module):
    """down(act(a) · b); a and b come from one matrix, a's rows first."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.up = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x).chunk(2, dim=-1)
        return self.down(activate(self.activation, a) * b)  # type: ignore[no-any-return]


class PreNormBlock(nn.Module):
    """Each norm comes before its part. The first layer has none before attention: the embedding's was just there."""

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = _norm(config) if layer else nn.Identity()
        self.attn = RotaryAttention(config, layer)
        self.mlp_norm = _norm(config)
        self.mlp = GatedFeedForward(config)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = x + self.attn(self.attn_norm(x), rotary, attend)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class ModernBert(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_norm = _norm(config)
        self.layers = nn.ModuleList(PreNormBlock(config, layer) for layer in range(config.num_layers))
        self.norm = _norm(config)

    def forward(self, token_ids: Tensor, positions: Tensor, token_types: Tensor, attend: Attend) -> Tensor:
        """All int64 (T,); ModernBERT has no token types, they count for nothing → hidden states after the last norm
        (T, C).
        """
        x = self.embed_norm(self.embed(token_ids))
        tables: dict[Rope, tuple[Tensor, Tensor]] = {
            rope: rotary_table(rope, positions) for rope in set(self.config.ropes)
        }
        for block, rope in zip(self.layers, self.config.ropes, strict=True):
            x = block(x, tables[rope], attend)
        return self.norm(x)  # type: ignore[no-any-return]

    def weight_slots(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by the name of weights/encoder_names.py, with the parameter it belongs in."""
        yield from self.named_parameters()


def _norm(config: EncoderConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)
