"""Low-rank updates of the trunk while it is trained: W x + scale · B A x (LoRA, arXiv:2106.09685), and their names.

A fused matrix, as that of queries, keys and values, has an A and a B for each part, as the checkpoint stores them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from heedful.models.bert import Bert, EncoderBlock

RANK, ALPHA = 16, 32


class LowRankLinear(nn.Module):
    """x (T, in) → (T, out). The base stays as it is; B begins at zero, so the sum begins as the base."""

    def __init__(self, base: nn.Linear, parts: int = 1) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(parts * RANK, base.in_features) * base.in_features**-0.5)
        self.b = nn.Parameter(torch.zeros(parts, RANK, base.out_features // parts))

    def forward(self, x: Tensor) -> Tensor:
        parts = len(self.b)
        low = (x @ self.a.T).view(len(x), parts, RANK).transpose(0, 1)  # (parts, T, r)
        update = torch.bmm(low, self.b).transpose(0, 1).reshape(len(x), -1)
        return torch.add(self.base(x), update, alpha=ALPHA / RANK)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(A (r, in), B (out, r)) of each part."""
        for a, b in zip(self.a.detach().chunk(len(self.b)), self.b.detach(), strict=True):
            yield a.contiguous(), b.T.contiguous()


def add_updates(trunk: Bert) -> None:
    """Every matrix of every layer gets one; all else of the trunk is frozen."""
    trunk.requires_grad_(False)
    for block in trunk.layers:
        assert isinstance(block, EncoderBlock), block
        block.attn.qkv = LowRankLinear(block.attn.qkv, parts=3)  # type: ignore[assignment]
        block.attn.out = LowRankLinear(block.attn.out)  # type: ignore[assignment]
        block.mlp.up = LowRankLinear(block.mlp.up)  # type: ignore[assignment]
        block.mlp.down = LowRankLinear(block.mlp.down)  # type: ignore[assignment]


def set_updates(trunk: Bert, tensors: Mapping[str, Tensor]) -> None:
    """Where `add_updates` made them: those of a checkpoint, by its names."""
    for at, block in enumerate(trunk.layers):
        assert isinstance(block, EncoderBlock), block
        for linear, of_parts in _names(block).items():
            assert isinstance(linear, LowRankLinear), linear
            stems = [f"encoder.encoder.layer.{at}.{name}" for name in of_parts]
            linear.a.data = torch.cat([tensors[f"{stem}.lora_A"].float() for stem in stems])
            linear.b.data = torch.stack([tensors[f"{stem}.lora_B"].float().T for stem in stems]).contiguous()


def update_tensors(trunk: Bert) -> dict[str, Tensor]:
    """By the checkpoint's names."""
    found: dict[str, Tensor] = {}
    for at, block in enumerate(trunk.layers):
        assert isinstance(block, EncoderBlock), block
        for linear, of_parts in _names(block).items():
            assert isinstance(linear, LowRankLinear), linear
            for name, (a, b) in zip(of_parts, linear.pairs(), strict=True):
                found[f"encoder.encoder.layer.{at}.{name}.lora_A"] = a
                found[f"encoder.encoder.layer.{at}.{name}.lora_B"] = b
    return found


def _names(block: EncoderBlock) -> dict[nn.Module, list[str]]:
    """Of each matrix those that the checkpoint stores of it."""
    return {
        block.attn.qkv: ["attention.self.query", "attention.self.key", "attention.self.value"],
        block.attn.out: ["attention.output.dense"],
        block.mlp.up: ["intermediate.dense"],
        block.mlp.down: ["output.dense"],
    }
