"""The decoder: Llama, SmolLM2, Mistral, Qwen2, Qwen3, Gemma 3, Phi-3, GPT-2. One file; their differences are data.

    hidden = decoder(token_ids, positions, attend)      # (T,), (T,) → (T, C)
    logits = decoder.logits(hidden[rows])               # (R, C) → (R, vocab)

The same call serves training, prefill and decode: `attend` alone knows which tokens belong together and what is
cached. Tokens of several sequences lie one after another in T.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from heedful.kernels.attention import Attend
from heedful.kernels.reference import rotate
from heedful.models.config import ModelConfig
from heedful.models.layers import MLP, Linear, make_norm, rotary_table

Rotary = tuple[Tensor, Tensor] | None


class Attention(nn.Module):
    """Projects to q, k, v (one matrix, in that order), turns q and k by their positions, attends, projects back."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.window = config.windows[layer]
        self.scale, self.softcap = config.query_scale, config.attention_softcap
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.out = Linear(self.heads * self.head_dim, config.hidden_size, bias=config.out_bias)
        self.q_norm = make_norm(config, self.head_dim) if config.qk_norm else None
        self.k_norm = make_norm(config, self.head_dim) if config.qk_norm else None
        self.rotate = rotate

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        qkv = self.qkv(x).view(len(x), -1, self.head_dim)  # (T, H + 2K, D)
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split((self.heads, self.kv_heads), dim=1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        if rotary is not None:
            qk = self.rotate(qk, *rotary)
        q, k = qk.split((self.heads, self.kv_heads), dim=1)
        out = attend(self.layer, q, k, v, window=self.window, scale=self.scale, softcap=self.softcap)
        return self.out(out.reshape(len(x), -1))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = make_norm(config, config.hidden_size)
        self.attn = Attention(config, layer)
        self.mlp_norm = make_norm(config, config.hidden_size)
        self.mlp = MLP(config)
        sandwich = config.sandwich_norm
        self.attn_post_norm = make_norm(config, config.hidden_size) if sandwich else None
        self.mlp_post_norm = make_norm(config, config.hidden_size) if sandwich else None

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        attended = self.attn(self.attn_norm(x), rotary, attend)
        x = x + (attended if self.attn_post_norm is None else self.attn_post_norm(attended))
        mixed = self.mlp(self.mlp_norm(x))
        return x + (mixed if self.mlp_post_norm is None else self.mlp_post_norm(mixed))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embed = nn.Embedding(config.context_len, config.hidden_size) if config.rope is None else None
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = make_norm(config, config.hidden_size)
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embed.weight

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids and positions int64 (T,) → hidden states after the last norm (T, C)."""
        x = self.embed(token_ids)
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        if self.position_embed is not None:
            x = x + self.position_embed(positions)
        full, local = self._rotary(positions)
        for layer, block in enumerate(self.layers):
            x = block(x, full if self.config.windows[layer] is None else local, attend)
        return self.norm(x)  # type: ignore[no-any-return]

    def _rotary(self, positions: Tensor) -> tuple[Rotary, Rotary]:
        """The tables of full and of windowed layers, computed once a step."""
        if self.config.rope is None:
            return None, None
        full = rotary_table(self.config.rope, positions)
        return full, rotary_table(self.config.rope_local, positions) if self.config.rope_local else full

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, C) → (R, vocab)."""
        logits = self.head(hidden)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def weight_slots(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by the name that weights/names.py gives it, with the (slice of the) parameter it belongs in."""
        for name, parameter in self.named_parameters():  # a tied head is listed once, as embed.weight
            owner, kind = name.rsplit(".", 1)
            if owner.endswith("attn.qkv"):
                sizes = [n * self.config.head_dim for n in (self.config.num_heads, *[self.config.num_kv_heads] * 2)]
                yield from _slots(owner.removesuffix("qkv"), ("q", "k", "v"), kind, torch.split(parameter, sizes))
            elif owner.endswith("mlp.up") and self.config.gated_mlp:
                yield from _slots(owner.removesuffix("up"), ("gate", "up"), kind, parameter.chunk(2))
            else:
                yield name, parameter


def _slots(owner: str, names: tuple[str, ...], kind: str, parts: tuple[Tensor, ...]) -> Iterator[tuple[str, Tensor]]:
    for name, part in zip(names, parts, strict=True):
        yield f"{owner}{name}.{kind}", part
