"""Qwen3.5: a hybrid decoder. Most layers are gated DeltaNet, which carry a state of one size; each few, full attention.

    hidden = decoder(token_ids, positions, attend, recur)   # (T,), (T,) → (T, C)
    logits = decoder.logits(hidden[rows])                   # (R, C) → (R, vocab)

As with decoder.py, the model knows no phase and no cache: `attend` (kernels/attention.py) holds what attention layers
remember, `recur` (kernels/delta_rule.py) what linear ones do. Layers call them by numbers among their own kind.

One prefix with several continuations (a state, then questions about it): compute the prefix once and copy what it left,
for a recurrent state cannot be cut back. models/carried.py holds all of it for one sequence:

    prefix = Carried(config)
    decoder(state_ids, torch.arange(n), prefix, prefix)
    branch = prefix.copy()                                  # keys and values are shared, recurrent states copied
    hidden = decoder(question_ids, torch.arange(n, n + m), branch, branch)

Source: transformers' models/qwen3_5; arXiv:2412.06464.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heedful.kernels.attention import Attend
from heedful.kernels.delta_rule import Recur
from heedful.kernels.reference import rotate
from heedful.models.config import DeltaNet, ModelConfig
from heedful.models.layers import MLP, Linear, make_norm, rotary_table

_L2_EPS = 1e-6  # of DeltaNet's queries and keys; no setting


class GatedAttention(nn.Module):
    """One matrix gives each head's q, its output gate, k and v, in that order; q and k are normed and turned."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.scale = layer, config.query_scale
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = Linear(config.hidden_size, sum(attention_rows(config)), bias=False)
        self.out = Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = make_norm(config, self.head_dim)
        self.k_norm = make_norm(config, self.head_dim)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        of_heads = self.qkv(x).view(len(x), -1, self.head_dim)
        q, gate, k, v = of_heads.split((self.heads, self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = rotate(self.q_norm(q), *rotary), rotate(self.k_norm(k), *rotary)
        out = attend(self.layer, q, k, v, window=None, scale=self.scale, softcap=None)
        return self.out((out * gate.sigmoid()).reshape(len(x), -1))  # type: ignore[no-any-return]


class GatedDeltaNet(nn.Module):
    """One matrix gives q, k and v, which pass a causal convolution, then z (output gate), b (how strongly a token
    writes) and a (how fast the state fades)."""

    def __init__(self, config: ModelConfig, delta: DeltaNet, layer: int) -> None:
        super().__init__()
        self.layer, self.sizes = layer, delta
        self.qkv = Linear(config.hidden_size, sum(delta_rows(delta)), bias=False)
        self.conv = nn.Parameter(torch.empty(delta.conv_channels, delta.conv_len))
        self.a_log = nn.Parameter(torch.empty(delta.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(delta.value_heads))
        self.norm = make_norm(config, delta.value_dim)
        self.out = Linear(delta.value_channels, config.hidden_size, bias=False)

    def forward(self, x: Tensor, recur: Recur) -> Tensor:
        sizes = self.sizes
        rows, z, b, a = torch.split(self.qkv(x), delta_rows(sizes), dim=-1)
        mixed = F.silu(recur.convolve(self.layer, rows, self.conv))
        keys = sizes.key_heads * sizes.key_dim
        q, k, v = torch.split(mixed, [keys, keys, sizes.value_channels], dim=-1)
        q, k = (_unit(y.view(len(x), sizes.key_heads, sizes.key_dim)) for y in (q, k))
        v, z = (y.view(len(x), sizes.value_heads, sizes.value_dim) for y in (v, z))
        g = -self.a_log.exp() * F.softplus(a + self.dt_bias)
        out = recur.delta(self.layer, q * sizes.key_dim**-0.5, k, v, g, b.sigmoid())
        return self.out((self.norm(out) * F.silu(z)).flatten(1))  # type: ignore[no-any-return]


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + _L2_EPS)


class Block(nn.Module):
    """`attn` or `delta`, then the MLP. `layer` counts among those of its kind."""

    def __init__(self, config: ModelConfig, layer: int, delta: DeltaNet | None) -> None:
        super().__init__()
        self.attn_norm = make_norm(config, config.hidden_size)
        self.attn = GatedAttention(config, layer) if delta is None else None
        self.delta = None if delta is None else GatedDeltaNet(config, delta, layer)
        self.mlp_norm = make_norm(config, config.hidden_size)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend, recur: Recur) -> Tensor:
        normed = self.attn_norm(x)
        if self.attn is not None:
            x = x + self.attn(normed, rotary, attend)
        elif self.delta is not None:
            x = x + self.delta(normed, recur)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Qwen35(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.delta is not None, config.family
        assert config.rope is not None, config.family
        self.config, self.rope = config, config.rope
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_blocks(config, config.delta))
        self.norm = make_norm(config, config.hidden_size)
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embed.weight

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, recur: Recur) -> Tensor:
        """token_ids and positions int64 (T,) → hidden states after the last norm (T, C)."""
        x = self.embed(token_ids)
        rotary = rotary_table(self.rope, positions)
        for block in self.layers:
            x = block(x, rotary, attend, recur)
        return self.norm(x)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, C) → (R, vocab)."""
        return self.head(hidden)  # type: ignore[no-any-return]

    def weight_slots(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by the name that weights/names.py gives it, with the (slice of the) parameter it belongs in."""
        assert self.config.delta is not None
        parts = {
            "attn.qkv": (("q", "gate", "k", "v"), attention_rows(self.config)),
            "delta.qkv": (("qkv", "z", "b", "a"), delta_rows(self.config.delta)),
            "mlp.up": (("gate", "up"), [self.config.intermediate_size] * 2),
        }
        for name, parameter in self.named_parameters():  # a tied head is listed once, as embed.weight
            owner, _, kind = name.rpartition(".")
            fused = ".".join(owner.split(".")[-2:])
            if fused in parts:
                names, sizes = parts[fused]
                for part, slot in zip(names, torch.split(parameter, sizes), strict=True):
                    yield f"{owner.rpartition('.')[0]}.{part}.{kind}", slot
            else:
                yield name if kind == "weight" else f"{name}.weight", parameter


def _blocks(config: ModelConfig, delta: DeltaNet) -> Iterator[Block]:
    attention = recurrent = 0
    for layer in range(config.num_layers):
        if layer in delta.layers:
            yield Block(config, recurrent, delta)
            recurrent += 1
        else:
            yield Block(config, attention, None)
            attention += 1


def attention_rows(config: ModelConfig) -> list[int]:
    """Rows of the matrix for q, gate, k and v."""
    heads, kv_heads = config.num_heads * config.head_dim, config.kv_channels
    return [heads, heads, kv_heads, kv_heads]


def delta_rows(delta: DeltaNet) -> list[int]:
    """Rows of the matrix for q, k and v together, z, b and a."""
    return [delta.conv_channels, delta.value_channels, delta.value_heads, delta.value_heads]
