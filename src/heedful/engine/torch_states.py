"""The torch runner's recurrent states: slots of the cache as tensors, and a step's `Recur` over them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from heedful.cache.pages import ARENA_PAGES, PageArena, StateLayout
from heedful.kernels.delta_rule import DeltaState, StatefulRecur
from heedful.models.carried import zero_state
from heedful.models.config import ModelConfig
from heedful.request import Batch


def state_layout(config: ModelConfig) -> StateLayout | None:
    """In each layer the rows before the convolution, then S; None where no layer has a state."""
    return None if config.delta is None else StateLayout(len(config.delta.layers), config.delta.state_bytes)


class StateSlots:
    def __init__(self, arena: PageArena, config: ModelConfig, device: torch.device) -> None:
        self._zeros = zero_state(config, device)
        self._buffers = [on_device(arena.buffers[layer], device).view(torch.float32) for layer in arena.layers]
        """Per layer float32 (slots, numbers of a state)."""

    def recur(self, batch: Batch) -> StatefulRecur:
        """What the model's linear layers call in this step."""
        steps = [(chunk.end - chunk.start, chunk.state) for chunk in batch.chunks]
        lengths, before, after = [], [], []
        for length, state in steps:
            assert state is not None, batch
            lengths.append(length)
            before.append(self._zeros if state.before is None else self._at(state.before))
            after.append(self._at(state.after))
        return StatefulRecur(lengths, before, after)

    def _at(self, slot: int) -> DeltaState:
        """Views of the slot."""
        rows, memory = [], []
        for buffer, zero_rows, zero_memory in zip(self._buffers, self._zeros.rows, self._zeros.memory, strict=True):
            in_rows, in_memory = torch.split(buffer[slot % ARENA_PAGES], [zero_rows.numel(), zero_memory.numel()])
            rows.append(in_rows.view(zero_rows.shape))
            memory.append(in_memory.view(zero_memory.shape))
        return DeltaState(rows, memory)


def on_device(pages: npt.NDArray[np.uint8], device: torch.device) -> Tensor:
    """The cache's own pages where the processor reads them, else as many on the device."""
    if device.type == "cpu":
        return torch.from_numpy(pages)
    return torch.empty(pages.shape, dtype=torch.uint8, device=device)
