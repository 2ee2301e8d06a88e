"""What one sequence carries from one call of a decoder to the next: keys and values, and recurrent states.

Holds plain tensors, grows as tokens come, knows no pages: for tests, for decisions on a shared prefix, for reading.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from heedful.kernels.attention import attention, causal_bias
from heedful.kernels.delta_rule import DeltaState, StatefulRecur
from heedful.models.config import ModelConfig


def zero_state(config: ModelConfig, device: torch.device | None = None) -> DeltaState:
    """Of a sequence that has no tokens yet; empty lists where no layer is DeltaNet."""
    delta = config.delta
    if delta is None:
        return DeltaState([], [])
    rows = (delta.conv_len - 1, delta.conv_channels)
    memory = (delta.value_heads, delta.key_dim, delta.value_dim)
    return DeltaState(
        [torch.zeros(rows, device=device) for _ in delta.layers],
        [torch.zeros(memory, device=device) for _ in delta.layers],
    )


@dataclass
class Carried:
    """Both `Attend` and `Recur` of one sequence's next tokens; any decoder can be given it.

    Every call of the decoder moves it on. Positions must go on where the last call ended: `length`.
    """

    config: ModelConfig
    keys: dict[int, Tensor] = field(default_factory=dict)
    """By attention layer: (N, K, D), positions applied."""
    values: dict[int, Tensor] = field(default_factory=dict)
    state: DeltaState = field(init=False)

    def __post_init__(self) -> None:
        self.state = zero_state(self.config)

    @property
    def length(self) -> int:
        """Tokens so far."""
        return len(next(iter(self.keys.values()), ()))

    def copy(self) -> Carried:
        """A branch. Keys and values are shared, for they are never changed in place."""
        branch = Carried(self.config, dict(self.keys), dict(self.values))
        branch.state = self.state.copy()
        return branch

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float, softcap: float | None
    ) -> Tensor:
        start = 0
        if layer in self.keys:
            start = len(self.keys[layer])
            k, v = torch.cat((self.keys[layer], k)), torch.cat((self.values[layer], v))
        self.keys[layer], self.values[layer] = k, v
        bias = causal_bias(start, len(q), 0, len(k), window, q.device)
        return attention(q, k, v, bias, scale=scale, softcap=softcap)

    def convolve(self, layer: int, rows: Tensor, weight: Tensor) -> Tensor:
        return StatefulRecur([len(rows)], [self.state]).convolve(layer, rows, weight)

    def delta(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return StatefulRecur([len(v)], [self.state]).delta(layer, q, k, v, g, beta)
