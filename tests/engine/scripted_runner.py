"""A runner whose logits a function makes from a sequence, over the real cache and its plans."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from heedful.cost.meter import RunnerFacts
from heedful.models.config import ModelConfig
from heedful.request import Batch, Sequence
from heedful.testing import plain_cache


class ScriptedRunner:
    """`logits_of`: (vocab,) for the last token of a sequence, which may be a guessed one. `on_step` gets every batch
    before it is computed.
    """

    def __init__(
        self,
        logits_of: Callable[[Sequence], npt.NDArray[np.float32]],
        *,
        vocab_size: int = 4,
        capacity_tokens: int = 20_000,
    ) -> None:
        self.config = ModelConfig(  # only its sizes count here
            family="gpt2",
            vocab_size=vocab_size,
            hidden_size=8,
            num_layers=3,
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
            intermediate_size=8,
            context_len=8192,
            windows=(None,) * 3,
            rope=None,
        )
        self.threads = 1
        self.facts = RunnerFacts(linear_bytes=1000, head_bytes=100)
        self.cache = plain_cache(self.config.windows, 1, 8, capacity_tokens=capacity_tokens)
        self.on_step: Callable[[Batch], None] = lambda batch: None
        self.steps = 0
        self._logits_of = logits_of

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        self.on_step(batch)
        self.steps += 1
        rows = [
            self._logits_of(
                Sequence(chunk.sequence.request, (chunk.sequence.token_ids + chunk.sequence.drafts)[: at + 1])
            )
            for chunk in batch.chunks
            for at in range(chunk.logits_from, chunk.end)
        ]
        return np.stack(rows) if rows else np.empty((0, self.config.vocab_size), dtype=np.float32)
