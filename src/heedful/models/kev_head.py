"""Kev's pointer head: how well each option's last token answers the token that decides."""

from __future__ import annotations

import math

from torch import Tensor, nn


class PointerHead(nn.Module):
    """Two linear layers, in float32 whatever the decoder computes in."""

    def __init__(self, hidden_size: int, head_dim: int) -> None:
        super().__init__()
        self.q = nn.Linear(hidden_size, head_dim)
        self.k = nn.Linear(hidden_size, head_dim)
        self.scale = 1 / math.sqrt(head_dim)

    def forward(self, decide: Tensor, options: Tensor) -> Tensor:
        """Hidden states of the deciding token (C,) and of the options' ends (K, C) → logits (K,)."""
        return self.k(options.float()) @ self.q(decide.float()) * self.scale  # type: ignore[no-any-return]
