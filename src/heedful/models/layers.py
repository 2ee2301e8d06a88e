"""The parts that decoders share: norms, linear layers, rotary tables, the MLP. Shapes as in kernels/reference.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heedful.kernels.reference import rms_norm
from heedful.models.config import ModelConfig
from heedful.models.rope import Rope

_ROW_GROUPS = 4


class Linear(nn.Linear):
    """x (T, in) → (T, out).

    One token through PyTorch's own linear runs on one core; as a batch of row groups it uses all of them
    (reading 212 MB of weights: 19 ms against 4 ms on two cores).
    """

    def forward(self, x: Tensor) -> Tensor:
        out_features, in_features = self.weight.shape
        if len(x) != 1 or out_features % _ROW_GROUPS or torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        groups = self.weight.view(_ROW_GROUPS, -1, in_features)
        y = torch.bmm(groups, x.T.expand(_ROW_GROUPS, in_features, 1)).view(1, out_features)
        return y if self.bias is None else y + self.bias


class RMSNorm(nn.Module):
    """PyTorch's own takes 50 µs a call on one token, this 15."""

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def make_norm(config: ModelConfig, channels: int) -> nn.Module:
    if config.norm == "layer":
        return nn.LayerNorm(channels, eps=config.norm_eps)
    return RMSNorm(channels, config.norm_eps)


def rotary_table(rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin (T, rotary_dim / 2) for positions (T,), in float32 as the models were trained."""
    inv_freq = torch.from_numpy(rope.inv_freq()).float().to(positions.device)
    angles = positions.float()[:, None] * inv_freq[None, :]
    return angles.cos() * rope.attention_scaling, angles.sin() * rope.attention_scaling


def _activate(name: str, x: Tensor) -> Tensor:
    if name == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


class MLP(nn.Module):
    """Gated: down(act(gate(x)) · up(x)); plain: down(act(up(x))). Gate and up are one matrix, gate rows first."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.gated = config.gated_mlp
        wide = config.intermediate_size * (2 if self.gated else 1)
        self.up = Linear(config.hidden_size, wide, bias=config.mlp_bias)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.down(_activate(self.activation, self.up(x)))  # type: ignore[no-any-return]
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(_activate(self.activation, gate) * up)  # type: ignore[no-any-return]
