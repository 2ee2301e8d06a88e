"""Branches behind one state with PyTorch: texts that begin alike, their beginning computed once.

    state = read_state(decoder, ids)
    run_branches(decoder, state, [ids, ids])      # hidden states of each branch, which sees the state and itself

The keys and values of a branch lie behind those of the state while it attends, then the next one takes their place: no
copy of the state's, and no mask of all tokens with all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heedful.engine.pooled import STEP_TOKENS
from heedful.kernels.delta_rule import StatefulRecur
from heedful.kernels.text_attention import causal_attention
from heedful.models.carried import zero_state
from heedful.models.config import ModelConfig
from heedful.models.decoder import Decoder
from heedful.models.qwen3_5 import Qwen35

AnyDecoder = Decoder | Qwen35


class SharedState:
    """What a decoder has computed of a text, to go on from. Used by one thread at a time."""

    def __init__(self, config: ModelConfig) -> None:
        self.steps: list[int] = []
        """Tokens that each pass read."""
        self.recurrent = zero_state(config)
        """Of the layers that are none of attention."""
        self._recurrent_bytes = config.state_bytes
        self._rows = torch.empty(2, len(config.windows), 0, config.num_kv_heads, config.head_dim)
        """Keys and values by attention layer, with room for a branch behind them."""

    @property
    def length(self) -> int:
        """In tokens."""
        return sum(self.steps)

    @property
    def num_bytes(self) -> int:
        return self._rows.nbytes + self._recurrent_bytes

    def make_room(self, tokens: int) -> None:
        """For so many behind those that were read."""
        if self._rows.shape[2] < self.length + tokens:
            sides, layers, _, *row = self._rows.shape
            rows = torch.empty(sides, layers, self.length + tokens, *row)
            rows[:, :, : self.length] = self._rows[:, :, : self.length]
            self._rows = rows

    def extended(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (length + T, K, D) of the text and, behind it, of k and v (T, K, D): views, until the next
        call.
        """
        end = self.length + len(k)
        for side, new in enumerate((k, v)):
            self._rows[side, layer, self.length : end] = new
        keys, values = self._rows[:, layer, :end]
        return keys, values


class BranchAttend:
    """Texts that lie one after another, each behind the state: it sees the state and its own past. Follows
    `kernels.attention.Attend`. `lengths`: of the texts, in order; the state has room for the longest.
    """

    def __init__(self, state: SharedState, lengths: list[int]) -> None:
        self._state = state
        self._lengths = lengths

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float, softcap: float | None
    ) -> Tensor:
        outs = []
        for q_text, k_text, v_text in zip(*(torch.split(x, self._lengths) for x in (q, k, v)), strict=True):
            keys, values = self._state.extended(layer, k_text, v_text)
            outs.append(causal_attention(q_text, keys, values, window=window, scale=scale, softcap=softcap))
        return torch.cat(outs)


def read_state(decoder: AnyDecoder, ids: Sequence[int], *, room: int = 0) -> SharedState:
    """In steps of STEP_TOKENS. `room`: tokens of the longest branch that is expected."""
    state = SharedState(decoder.config)
    state.make_room(len(ids) + room)
    for start in range(0, len(ids), STEP_TOKENS):
        step = ids[start : start + STEP_TOKENS]
        _run(decoder, state, [step], StatefulRecur([len(step)], [state.recurrent]))
        state.steps.append(len(step))
    return state


def run_branches(decoder: AnyDecoder, state: SharedState, branches: Sequence[Sequence[int]]) -> list[Tensor]:
    """Hidden states after the last norm (T, C) of each branch, all in one pass; the state stays as it is."""
    lengths = [len(branch) for branch in branches]
    state.make_room(max(lengths))
    starts, ends = ([one] * len(branches) for one in (state.recurrent, state.recurrent.copy()))
    return _run(decoder, state, branches, StatefulRecur(lengths, starts, ends))  # where a branch ends is of no use


@torch.inference_mode()
def _run(decoder: AnyDecoder, state: SharedState, texts: Sequence[Sequence[int]], recur: StatefulRecur) -> list[Tensor]:
    lengths = [len(text) for text in texts]
    ids = torch.tensor([token for text in texts for token in text])
    positions = torch.cat([torch.arange(state.length, state.length + length) for length in lengths])
    attend = BranchAttend(state, lengths)
    hidden = decoder(ids, positions, attend, recur) if isinstance(decoder, Qwen35) else decoder(ids, positions, attend)
    return list(hidden.split(lengths))
