"""What a process holds of the parameters that are trained, and how to come by the whole. Which part that is:
parallel.py; without other processes it is everything, and nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from heedful.train.layout import Layout
from heedful.train.team import Team

ALONE = Team()

_OF_OWN_HEADS = ("attn.q_norm.weight", "attn.k_norm.weight", "attn.q_norm.bias", "attn.k_norm.bias")
"""Every tensor rank has these whole and sees the gradient of its own heads alone."""


class Spread:
    """The trained parameters of a model, by name, and what this process holds of each.

    `held`: plain tensors that share their memory with the model's parameters; the parameters themselves where those are
    plain. Updates go there.
    """

    def __init__(self, model: nn.Module, team: Team = ALONE, layouts: Mapping[str, Layout] | None = None) -> None:
        self.team, self._model = team, model
        self._parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self.layouts = {name: Layout(tuple(each.shape)) for name, each in self._parameters.items()} | dict(
            layouts or {}
        )
        self.held = {name: _held(each) for name, each in self._parameters.items()}
        self._sharded: list[Any] = [module for module in model.modules() if hasattr(module, "unshard")]  # FSDP2's

    @property
    def is_whole(self) -> bool:
        """Whether this process holds all of everything."""
        return not self._sharded

    # ---- gradients

    def take_gradients(self) -> None:
        """After the last backward pass of a step: `held` has the gradients of the sums over all processes."""
        for name, parameter in self._parameters.items():
            held = self.held[name]
            if held is not parameter:
                assert parameter.grad is not None, name
                held.grad = parameter.grad.to_local()  # type: ignore[attr-defined]
                parameter.grad = None
        of_all = {name: held.grad for name, held in self.held.items() if held.grad is not None}
        self.team.add_up([grad for name, grad in of_all.items() if self.layouts[name].data_parts == 1], "data")
        self.team.add_up([grad for name, grad in of_all.items() if name.endswith(_OF_OWN_HEADS)], "tensor")

    def gradient_norm(self) -> float:
        """Of all gradients together."""
        place = self.team.data_rank, self.team.tensor_rank
        grads = {name: held.grad for name, held in self.held.items() if held.grad is not None}
        if self.team.mesh is None:
            return float(nn.utils.get_total_norm(list(grads.values())))
        counted = [grad for name, grad in grads.items() if self.layouts[name].is_holder(*place)]
        norms = torch.stack([norm.double() for norm in torch._foreach_norm(counted)]) if counted else torch.zeros(1)
        return float(self.team.sum_over_all(float(norms.square().sum())) ** 0.5)

    # ---- whole tensors

    def own(self, name: str, whole: Tensor) -> Tensor:
        """This process's part of a tensor that lies as the parameter does."""
        return self.layouts[name].part(whole, self.team.data_rank, self.team.tensor_rank)

    def gathered(self, name: str, part: Tensor) -> npt.NDArray[Any] | Gathered:
        """The whole of a tensor that lies as the parameter does, to be written once, by the first process."""
        return part.detach().numpy() if self.team.mesh is None else Gathered(self.team, self.layouts[name], part)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the first process's model has whole, plain weights, to be read; that of the others has none."""
        if self.is_whole:
            yield
            return
        wholes = {name: self._whole_at_first(name) for name in self._parameters}
        with self._with_parameters(wholes):
            yield

    def _whole_at_first(self, name: str) -> Tensor:
        whole = self.team.to_owners([self.layouts[name]], [self.held[name].detach()], [0])[0]
        return torch.empty(self.layouts[name].shape, device="meta") if whole is None else whole

    @contextmanager
    def to_be_placed(self) -> Iterator[None]:
        """Inside, the model has whole, plain weights that wait for their values; then every process keeps its part."""
        if self.is_whole:
            yield
            return
        wholes = {name: torch.empty(self.layouts[name].shape) for name in self._parameters}
        with self._with_parameters(wholes):
            yield
        with torch.no_grad():
            for name, whole in wholes.items():
                self.held[name].copy_(self.own(name, whole))

    @contextmanager
    def _with_parameters(self, wholes: Mapping[str, Tensor]) -> Iterator[None]:
        """In every place where a parameter is used: a tied head has two."""
        names = {parameter: name for name, parameter in self._parameters.items()}
        new = {name: nn.Parameter(whole) for name, whole in wholes.items()}
        before: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        for module in self._model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter in names:
                    before.append((module._parameters, key, parameter))
        for slots, key, parameter in before:
            slots[key] = new[names[parameter]]
        try:
            yield
        finally:
            for slots, key, parameter in before:
                slots[key] = parameter

    # ---- forward passes without gradients

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Inside, every process has the weights that its forward passes need, gathered once; no gradients."""
        for module in self._sharded:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in self._sharded:
                module.set_reshard_after_forward(module is not self._model, recurse=False)
                module.reshard()


class Gathered:
    """An array that is on no process yet. All of them call `numpy.asarray`, in the same order; the first then has the
    values, the others an empty one.
    """

    def __init__(self, team: Team, layout: Layout, part: Tensor) -> None:
        self._team, self._layout, self._part = team, layout, part.detach()
        self.shape, self.dtype = layout.shape, np.dtype(np.float32)
        self.nbytes = self.dtype.itemsize * int(np.prod(layout.shape))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        whole = self._team.to_owners([self._layout], [self._part], [0])[0]
        return np.empty(0, np.float32) if whole is None else whole.contiguous().numpy()


def _held(parameter: nn.Parameter) -> nn.Parameter:
    """A DTensor's own part; importing DTensor to ask for it takes a second that one process does not need."""
    if not hasattr(parameter, "to_local"):
        return parameter
    return nn.Parameter(parameter.detach().to_local())  # type: ignore[attr-defined]
