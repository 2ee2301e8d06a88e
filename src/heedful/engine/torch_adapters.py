"""Adapters beside a decoder's linear layers, from outside: hooks add B (A x) to the rows of tokens that want it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heedful.cost.meter import AdapterFacts
from heedful.engine.adapter_runs import AdapterRun
from heedful.errors import UnsupportedModel
from heedful.models.decoder import Decoder
from heedful.models.qwen3_5 import Qwen35
from heedful.weights.adapter import Adapter


@dataclass(frozen=True, eq=False)
class _Update:
    """Of rows [first_row, first_row + len(b)) of a layer's output."""

    first_row: int
    a: Tensor
    b: Tensor


class TorchAdapters:
    """`runs` says for each step which tokens are whose; without runs nothing is added and nothing costs."""

    def __init__(self, decoder: Decoder | Qwen35, adapters: Mapping[str, Adapter], device: torch.device) -> None:
        self.runs: list[AdapterRun] = []
        self.facts = {name: _facts(adapter) for name, adapter in adapters.items()}
        linears = {m.weight.data_ptr(): m for m in decoder.modules() if isinstance(m, nn.Linear)}
        slots = {name: slot for name, slot in decoder.weight_slots() if adapters}
        updates: dict[nn.Linear, dict[str, list[_Update]]] = defaultdict(lambda: defaultdict(list))
        for name, adapter in adapters.items():
            for matrix, update in adapter.updates.items():
                slot = slots[matrix]
                linear = linears.get(slot.untyped_storage().data_ptr())
                if linear is None:
                    raise UnsupportedModel(f"the adapter {name} updates {matrix}, which is no linear layer here", "")
                first_row = slot.storage_offset() // slot.shape[1]
                sides = (torch.from_numpy(side).to(device) for side in (update.a, update.b))
                updates[linear][name].append(_Update(first_row, *sides))
        for linear, by_adapter in updates.items():
            linear.register_forward_hook(self._hook(by_adapter, of_wanted=linear is decoder.head))

    def _hook(self, by_adapter: Mapping[str, list[_Update]], *, of_wanted: bool) -> Any:
        def add(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            (x,) = inputs
            for run in self.runs:
                rows = slice(run.wanted_begin, run.wanted_end) if of_wanted else slice(run.begin, run.end)
                for update in by_adapter.get(run.adapter, ()):
                    columns = slice(update.first_row, update.first_row + len(update.b))
                    output[rows, columns] += (x[rows] @ update.a.T) @ update.b.T

        return add


def _facts(adapter: Adapter) -> AdapterFacts:
    sizes = {name: update.a.size + update.b.size for name, update in adapter.updates.items()}
    head = sizes.pop("head.weight", 0)
    linear = sum(sizes.values())
    return AdapterFacts(adapter.sha256, linear, head, linear_bytes=4 * linear, head_bytes=4 * head)
