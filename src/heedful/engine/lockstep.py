"""Several sequences of the same tokens under policies of their own, computed in the same steps and fed by the caller.

It drives the cache and the runner as the engine does, but the tokens are given, not sampled: what a policy changes is
measured so, and the weights are read once for all sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListLike
from typing import Self

import numpy as np
import numpy.typing as npt

from heedful.engine.runner import Runner
from heedful.engine.scheduler import TOKEN_BUDGET
from heedful.errors import CacheFull
from heedful.request import Batch, CachePolicy, Chunk, Request, Sequence

Progress = Callable[[int], None]
"""Called with how many more positions have been computed, each sequence's counted."""


class Lockstep:
    """Use it as a context manager: pages go back at the end."""

    def __init__(
        self,
        runner: Runner,
        policies: ListLike[CachePolicy],
        prompt_ids: ListLike[int],
        *,
        longest: int,
        progress: Progress = lambda positions: None,
    ) -> None:
        """`longest`: tokens that a sequence may come to.

        Raises BadParameter for a policy that the runner cannot carry out, CacheFull when the sequences do not fit.
        """
        self._runner = runner
        self._progress = progress
        self.sequences = [Sequence(Request(tuple(prompt_ids), policy=policy), list(prompt_ids)) for policy in policies]
        needed = sum(runner.cache.bytes_needed(policy, longest, TOKEN_BUDGET) for policy in policies)
        if needed > (room := runner.cache.budget_bytes):
            raise CacheFull(
                f"{len(policies)} sequences of {longest:,} tokens need {needed / 1e6:,.0f} MB of KV cache, and there "
                f"are {room / 1e6:,.0f}",
                "Take fewer tokens, or fewer policies at a time.",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for sequence in self.sequences:
            self._runner.cache.release(sequence)

    def prefill(self) -> npt.NDArray[np.float32]:
        """Compute the prompts, one sequence after another. Logits (sequences, vocab) of their last tokens."""
        return np.concatenate([self._prefill(sequence) for sequence in self.sequences])

    def step(self, token_ids: Iterable[int]) -> npt.NDArray[np.float32]:
        """Append a token to each sequence and compute them all as decode steps are. Logits (sequences, vocab)."""
        for sequence, token in zip(self.sequences, token_ids, strict=True):
            sequence.token_ids.append(token)
        return self._run(self.sequences)

    def _prefill(self, sequence: Sequence) -> npt.NDArray[np.float32]:
        while True:
            logits = self._run([sequence])
            if sequence.cached_len == sequence.prompt_len:
                return logits

    def _run(self, sequences: list[Sequence]) -> npt.NDArray[np.float32]:
        chunks = tuple(self._plan(sequence) for sequence in sequences)
        logits = self._runner.run(Batch(chunks)).copy()  # the runner's own memory, which the next step overwrites
        for chunk in chunks:
            chunk.sequence.cached_len = chunk.end
        self._progress(sum(chunk.end - chunk.start for chunk in chunks))
        return logits

    def _plan(self, sequence: Sequence) -> Chunk:
        cache = self._runner.cache
        end = min(len(sequence.token_ids), sequence.cached_len + TOKEN_BUDGET)
        return cache.plan(sequence, cache.chunk_end(sequence, end))
