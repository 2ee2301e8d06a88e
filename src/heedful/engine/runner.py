"""What the engine asks of whatever computes: logits for a planned batch. torch_runner.py is the plain one."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from heedful.cache.pages import KVCache
from heedful.cost.meter import RunnerFacts
from heedful.models.config import ModelConfig
from heedful.request import Batch


class Runner(Protocol):
    config: ModelConfig
    cache: KVCache
    facts: RunnerFacts
    threads: int

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Compute the batch's tokens, storing their K and V where each chunk's spans say.

        Returns logits (R, vocab) of the last `num_logits` tokens of every chunk, in batch order. They are valid until
        the next call, which may use the same memory.
        """
        ...
