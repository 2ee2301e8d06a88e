"""The gated delta rule (Gated DeltaNet, arXiv:2412.06464), and the contract between a linear layer and whatever holds
its state.

Each value head keeps a matrix S. A token fades it, corrects what it says of the token's key, and asks it:

    S ← exp(g) S;   S ← S + k (β (v - Sᵀ k))ᵀ;   o = Sᵀ q

`delta_steps` says this token by token and is the judge; `delta_blocks` computes the same for a block of tokens at once,
with matrix products and one triangular solve. Shapes: B sequences of T tokens each, K key heads, H value heads, head h
reading key head h // (H / K); E channels of a key, D of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

BLOCK_LEN = 64
"""Tokens: longer blocks make fewer, larger products, and a triangular solve that grows with the square."""


class Recur(Protocol):
    """What a linear layer calls for all that reaches over time. Layers are numbered among the linear ones.

    The object holds the step's facts: which tokens belong to which sequence, and the state that each begins from and
    leaves behind. Every call moves that layer's state on, so a layer makes each once a step.
    """

    def convolve(self, layer: int, rows: Tensor, weight: Tensor) -> Tensor:
        """Depthwise and causal: rows (T, C) of the step's tokens, weight (C, taps), last tap at the token → (T, C)."""
        ...

    def delta(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """q and k (T, K, E), v (T, H, D), log decay g and beta (T, H) of the step's tokens → (T, H, D)."""
        ...


def delta_steps(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token. q and k (B, T, K, E), v (B, T, H, D), g and beta (B, T, H), state (B, H, E, D) →
    (B, T, H, D), the state after the last token."""
    share = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(share, dim=2) for x in (q, k))
    outs = []
    for t in range(v.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        error = v[:, t] - torch.einsum("bhed,bhe->bhd", state, k[:, t])
        state = state + torch.einsum("bhe,bhd->bhed", k[:, t], beta[:, t, :, None] * error)
        outs.append(torch.einsum("bhed,bhe->bhd", state, q[:, t]))
    return torch.stack(outs, dim=1), state


def delta_blocks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, block_len: int = BLOCK_LEN
) -> tuple[Tensor, Tensor]:
    """The same in blocks of up to `block_len` tokens."""
    share = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(share, dim=2) for x in (q, k))
    outs = []
    blocks = [torch.split(x.transpose(1, 2), block_len, dim=2) for x in (q, k, v, g, beta)]
    for q_block, k_block, v_block, g_block, beta_block in zip(*blocks, strict=True):
        out, state = _one_block(q_block, k_block, v_block, g_block, beta_block, state)
        outs.append(out)
    return torch.cat(outs, dim=2).transpose(1, 2), state


def _one_block(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """q and k (B, H, T, E), v (B, H, T, D), g and beta (B, H, T).

    Inside a block token i sees token j < i faded by exp(c_i - c_j), c being the sum of g up to there. What each token
    writes depends on what those before it wrote: (I + A) written = β (v - faded S k), A strictly lower triangular.
    """
    total = g.double().cumsum(dim=-1)  # what is left of differences of large sums would be rounding
    length = g.shape[-1]
    later = torch.ones(length, length, dtype=torch.bool, device=g.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf"))  # else exp overflows there
    fading, faded = between.to(g.dtype).exp(), total.to(g.dtype).exp()[..., None]
    among = beta[..., None] * (k @ k.mT) * fading
    wanted = beta[..., None] * (v - faded * (k @ state))
    written = torch.linalg.solve_triangular(among, wanted, upper=False, unitriangular=True)  # its diagonal is not read
    out = faded * (q @ state) + ((q @ k.mT) * fading) @ written
    left = (total[..., -1:] - total).to(g.dtype).exp()[..., None]
    return out, faded[..., -1:, :] * state + (left * k).mT @ written


def convolve(rows: Tensor, weight: Tensor) -> Tensor:
    """Depthwise over time: rows (B, taps - 1 + T, C), oldest first, weight (C, taps) → (B, T, C)."""
    taps = weight.shape[1]
    length = rows.shape[1] - taps + 1
    out = rows[:, :length] * weight[:, 0]
    for tap in range(1, taps):
        out = out + rows[:, tap : tap + length] * weight[:, tap]
    return out


@dataclass
class DeltaState:
    """What one sequence carries in its linear layers. It cannot be cut: copy it before a branch runs on it."""

    rows: list[Tensor]
    """Per layer (taps - 1, C): the newest rows before the convolution, zeros where there were none."""
    memory: list[Tensor]
    """Per layer (H, E, D): S."""

    def copy(self) -> DeltaState:
        return DeltaState([x.clone() for x in self.rows], [x.clone() for x in self.memory])


@dataclass(frozen=True)
class _Together:
    """Sequences of a step that have equally many tokens, computed as one batch."""

    members: tuple[int, ...]
    tokens: Tensor
    """(B, T): where their tokens are among the step's."""


class StatefulRecur:
    """The `Recur` of a step over sequences that lie one after another, each on a state of its own.

    A sequence begins from its state in `before`, which stays as it is, and leaves the new one in `after`; without
    `after` the states of `before` themselves move on. Whatever one sequence writes was read by every other one first.
    """

    def __init__(
        self, lengths: Sequence[int], before: Sequence[DeltaState], after: Sequence[DeltaState] | None = None
    ) -> None:
        self._before, self._after = before, before if after is None else after
        assert len(lengths) == len(self._before) == len(self._after), (lengths, len(self._before), len(self._after))
        self._groups = _grouped(lengths)
        self._num_tokens = sum(lengths)

    def convolve(self, layer: int, rows: Tensor, weight: Tensor) -> Tensor:
        kept = weight.shape[1] - 1
        out, news = torch.empty_like(rows), []
        for group in self._groups:
            old = torch.stack([self._before[member].rows[layer] for member in group.members])
            known = torch.cat((old, rows[group.tokens]), dim=1)
            out[group.tokens] = convolve(known, weight)
            news.append(known[:, known.shape[1] - kept :])
        for group, new in zip(self._groups, news, strict=True):
            for member, its_own in zip(group.members, new, strict=True):
                self._after[member].rows[layer].copy_(its_own)
        return out

    def delta(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        out, news = torch.empty_like(v), []
        for group in self._groups:
            old = torch.stack([self._before[member].memory[layer] for member in group.members])
            compute = delta_steps if group.tokens.shape[1] == 1 else delta_blocks
            at = group.tokens
            out[at], new = compute(q[at], k[at], v[at], g[at], beta[at], old)
            news.append(new)
        for group, new in zip(self._groups, news, strict=True):
            for member, its_own in zip(group.members, new, strict=True):
                self._after[member].memory[layer].copy_(its_own)
        return out


def _grouped(lengths: Sequence[int]) -> list[_Together]:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    members: dict[int, list[int]] = {}
    for member, length in enumerate(lengths):
        members.setdefault(length, []).append(member)
    return [
        _Together(tuple(same), torch.tensor([range(ends[member] - length, ends[member]) for member in same]))
        for length, same in members.items()
    ]
