"""The trunk of BERT (Devlin et al., 2018): token ids to hidden states. Heads and pooling stand on it elsewhere.

    hidden = bert(token_ids, positions, token_types, attend)      # (T,), (T,), (T,) → (T, C)

Tokens of several texts lie one after another in T, without padding; `attend` alone knows where each begins.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from heedful.kernels.attention import Attend
from heedful.models.encoder_config import EncoderConfig
from heedful.models.layers import Linear


class SelfAttention(nn.Module):
    """Projects to q, k, v (one matrix, in that order), attends, projects back."""

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.head_dim = config.num_heads, config.head_dim
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.heads, self.head_dim).unbind(1)  # each (T, H, D)
        out = attend(self.layer, q, k, v, window=None, scale=self.head_dim**-0.5, softcap=None)
        return self.out(out.reshape(len(x), -1))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.up = Linear(config.hidden_size, config.intermediate_size)
        self.down = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(activate(self.activation, self.up(x)))  # type: ignore[no-any-return]


class EncoderBlock(nn.Module):
    """Each norm comes after the residual sum."""

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        self.attn = SelfAttention(config, layer)
        self.attn_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = FeedForward(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        x = self.attn_norm(x + self.attn(x, attend))
        return self.mlp_norm(x + self.mlp(x))  # type: ignore[no-any-return]


class Bert(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embed = nn.Embedding(config.context_len, config.hidden_size)
        self.type_embed = nn.Embedding(config.token_types, config.hidden_size)
        self.embed_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.layers = nn.ModuleList(EncoderBlock(config, layer) for layer in range(config.num_layers))

    def forward(self, token_ids: Tensor, positions: Tensor, token_types: Tensor, attend: Attend) -> Tensor:
        """All int64 (T,); `token_types`: 1 in the second text of a pair, else 0 → last hidden states (T, C)."""
        x = self.embed(token_ids) + self.position_embed(positions) + self.type_embed(token_types)
        x = self.embed_norm(x)
        for block in self.layers:
            x = block(x, attend)
        return x  # type: ignore[no-any-return]

    def weight_slots(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by the name of weights/encoder_names.py, with the (slice of the) parameter it belongs in."""
        for name, parameter in self.named_parameters():
            owner, kind = name.rsplit(".", 1)
            if owner.endswith("attn.qkv"):
                for part, rows in zip("qkv", parameter.chunk(3), strict=True):
                    yield f"{owner.removesuffix('qkv')}{part}.{kind}", rows
            else:
                yield name, parameter


def activate(name: str, x: Tensor) -> Tensor:
    if name == "relu":
        return F.relu(x)
    if name == "tanh":
        return x.tanh()
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
