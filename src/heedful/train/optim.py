"""Optimizers: AdamW, decaying matrices alone, and Muon for the matrices of the layers. Their state by names, to save.

Muon (K. Jordan, 2024) replaces a matrix's momentum by the nearest matrix whose singular values are about one, found by
Newton-Schulz steps in float32: a low-precision product is slower on a CPU, not faster. Fused matrices (q, k, v) are
taken apart first. Updates are scaled to the size of AdamW's (0.2 · √max(rows, columns), arXiv:2502.16982), so that one
learning rate fits both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from heedful.train.settings import OptimSettings

_NS_STEPS = 5
_NS = (3.4445, -4.7750, 2.0315)


class Optimizer:
    """All parameters of a model that need gradients, each under the optimizer that is its own.

    `matrices`: those that are Muon's, where it is asked for: by name the rows of each matrix that is fused in one.
    """

    def __init__(
        self, model: nn.Module, settings: OptimSettings, matrices: Mapping[str, list[int]] = MappingProxyType({})
    ) -> None:
        self._names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        by_name = {name: parameter for parameter, name in self._names.items()}
        parts = dict(matrices) if settings.optimizer == "muon" else {}
        others = [parameter for name, parameter in by_name.items() if name not in parts]
        adamw = torch.optim.AdamW(
            [
                {"params": [p for p in others if p.dim() >= 2], "weight_decay": settings.weight_decay},
                {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )
        self._all: list[torch.optim.Optimizer] = [adamw]
        if parts:
            pairs = [(by_name[name], rows) for name, rows in parts.items()]
            self._all.append(Muon(pairs, settings.lr, settings.momentum, settings.weight_decay))

    def step(self, lr: float) -> None:
        """Gradients are used up."""
        for optimizer in self._all:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """By "kind/parameter"; 0-dimensional ones count steps."""
        return {
            f"{kind}/{name}": value
            for parameter, name in self._names.items()
            for optimizer in self._all
            for kind, value in optimizer.state.get(parameter, {}).items()
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """What `state` gave. Raises KeyError for a parameter that this model lacks."""
        by_name = {name: parameter for parameter, name in self._names.items()}
        for key, value in state.items():
            kind, _, name = key.partition("/")
            parameter = by_name[name]
            owner = next(o for o in self._all if any(parameter is p for g in o.param_groups for p in g["params"]))
            owner.state[parameter][kind] = value.clone()


class Muon(torch.optim.Optimizer):
    """`matrices`: (parameter, rows of each matrix that is fused in it)."""

    def __init__(
        self, matrices: list[tuple[torch.nn.Parameter, list[int]]], lr: float, momentum: float, weight_decay: float
    ) -> None:
        self._rows = dict(matrices)
        super().__init__([parameter for parameter, _ in matrices], {"lr": lr})
        self._momentum, self._weight_decay = momentum, weight_decay

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            parts: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
            for parameter in group["params"]:
                for matrix, update in self._split(parameter):
                    parts.setdefault(update.shape, []).append((matrix, update))
            for shape, pairs in parts.items():
                self._apply(pairs, shape, group["lr"])

    def _split(self, parameter: torch.nn.Parameter) -> list[tuple[Tensor, Tensor]]:
        """(matrix, its momentum with this step's gradient looked ahead to) for each that is fused in a parameter."""
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        state["momentum"].lerp_(parameter.grad, 1 - self._momentum)
        ahead = parameter.grad.lerp(state["momentum"], self._momentum)
        rows = self._rows[parameter]
        return list(zip(torch.split(parameter, rows), torch.split(ahead, rows), strict=True))

    def _apply(self, pairs: list[tuple[Tensor, Tensor]], shape: torch.Size, lr: float) -> None:
        turned = orthogonalized(torch.stack([update for _, update in pairs]))
        for (matrix, _), update in zip(pairs, turned, strict=True):
            matrix.mul_(1 - lr * self._weight_decay).add_(update, alpha=-lr * 0.2 * max(shape) ** 0.5)


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
