"""Optimizers: AdamW, decaying matrices alone, and Muon for the matrices of the layers. Their state by names, to save.

Muon (K. Jordan, 2024) replaces a matrix's momentum by the nearest matrix whose singular values are about one, found by
Newton-Schulz steps in float32: a low-precision product is slower on a CPU, not faster. Fused matrices (q, k, v) are
taken apart first. Updates are scaled to the size of AdamW's (0.2 · √max(rows, columns), arXiv:2502.16982), so that one
learning rate fits both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from heedful.train.layout import Layout
from heedful.train.settings import OptimSettings
from heedful.train.shares import shares
from heedful.train.spread import Gathered, Spread
from heedful.train.team import Team

_NS_STEPS = 5
_NS = (3.4445, -4.7750, 2.0315)


class Optimizer:
    """All parameters of a model that need gradients, each under the optimizer that is its own.

    `matrices`: those that are Muon's, where it is asked for: by name the rows of each matrix that is fused in one.
    Of a model that is spread over processes, each updates what it holds.
    """

    def __init__(
        self,
        model: nn.Module | Spread,
        settings: OptimSettings,
        matrices: Mapping[str, list[int]] = MappingProxyType({}),
    ) -> None:
        self.spread = model if isinstance(model, Spread) else Spread(model)
        self._names = {held: name for name, held in self.spread.held.items()}
        by_name = {name: parameter for parameter, name in self._names.items()}
        parts = dict(matrices) if settings.optimizer == "muon" else {}
        others = [parameter for name, parameter in by_name.items() if name not in parts]
        adamw = torch.optim.AdamW(
            [
                {"params": [p for p in others if p.dim() >= 2], "weight_decay": settings.weight_decay},
                {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=0.0,  # each step brings its own
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )
        self._all: list[torch.optim.Optimizer] = [adamw]
        if parts:
            pairs = [(by_name[name], rows, self.spread.layouts[name]) for name, rows in parts.items()]
            self._all.append(Muon(pairs, settings.momentum, settings.weight_decay, self.spread.team))

    def step(self, lr: float) -> None:
        """Gradients are used up."""
        for optimizer in self._all:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """What this process holds, by "kind/parameter"; 0-dimensional ones count steps."""
        return {
            f"{kind}/{name}": value
            for parameter, name in self._names.items()
            for optimizer in self._all
            for kind, value in optimizer.state.get(parameter, {}).items()
        }

    def stored(self) -> dict[str, npt.NDArray[Any] | Gathered]:
        """The state of all processes, whole, to be written once."""
        return {
            key: self.spread.gathered(key.partition("/")[2], value) if value.dim() else value.numpy()
            for key, value in self.state().items()
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """A whole state, as it was stored. Raises KeyError for a parameter that this model lacks."""
        by_name = {name: parameter for parameter, name in self._names.items()}
        for key, value in state.items():
            kind, _, name = key.partition("/")
            parameter = by_name[name]
            owner = next(o for o in self._all if any(parameter is p for g in o.param_groups for p in g["params"]))
            owner.state[parameter][kind] = (self.spread.own(name, value) if value.dim() else value).clone()


class Muon(torch.optim.Optimizer):
    """`matrices`: (parameter, rows of each matrix that is fused in it, how it lies over the processes). A matrix is
    whole where it is turned: each process turns its share of them.
    """

    def __init__(
        self, matrices: list[tuple[nn.Parameter, list[int], Layout]], momentum: float, weight_decay: float, team: Team
    ) -> None:
        self._rows = [rows for _, rows, _ in matrices]
        self._layouts = [layout for _, _, layout in matrices]
        super().__init__([parameter for parameter, _, _ in matrices], {"lr": 0.0})
        self._momentum, self._weight_decay, self._team = momentum, weight_decay, team
        places = range(len(matrices))
        by_rank = shares(places, lambda place: _turning_cost(self._layouts[place].shape), team.processes.size)
        rank_of = {place: rank for rank, mine in enumerate(by_rank) for place in mine}
        self._owners = [rank_of[place] for place in places]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        (group,) = self.param_groups
        ahead = [self._looked_ahead(parameter) for parameter in group["params"]]
        wholes = self._team.to_owners(self._layouts, ahead, self._owners)
        updates = self._team.from_owners(self._layouts, self._turned(wholes), self._owners)
        for parameter, update in zip(group["params"], updates, strict=True):
            parameter.mul_(1 - group["lr"] * self._weight_decay).add_(update, alpha=-group["lr"])

    def _looked_ahead(self, parameter: nn.Parameter) -> Tensor:
        """The momentum, with this step's gradient looked ahead to."""
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        state["momentum"].lerp_(parameter.grad, 1 - self._momentum)
        return parameter.grad.lerp(state["momentum"], self._momentum)

    def _turned(self, wholes: list[Tensor | None]) -> list[Tensor | None]:
        """Each of the fused matrices turned and scaled; those of one shape together."""
        parts = [None if whole is None else list(torch.split(whole, self._rows[i])) for i, whole in enumerate(wholes)]
        by_shape: dict[torch.Size, list[tuple[list[Tensor], int]]] = {}
        for matrices in parts:
            for place, matrix in enumerate(matrices or []):
                assert matrices is not None
                by_shape.setdefault(matrix.shape, []).append((matrices, place))
        for shape, slots in by_shape.items():
            turned = orthogonalized(torch.stack([matrices[place] for matrices, place in slots]))
            for (matrices, place), update in zip(slots, turned.mul_(0.2 * max(shape) ** 0.5), strict=True):
                matrices[place] = update
        return [None if matrices is None else torch.cat(matrices) for matrices in parts]


def _turning_cost(shape: tuple[int, ...]) -> int:
    """About, and of fused matrices as of one: products of small side² · large side."""
    return min(shape) * math.prod(shape)


def orthogonalized(x: Tensor) -> Tensor:
    """(..., rows, columns) → about U Vᵀ of x = U S Vᵀ: singular values between 0.7 and 1.2, where they are not tiny."""
    a, b, c = _NS
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_NS_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
