"""Which tokens of which sequences run now. Pure Python on integers; no tensors, no text.

Every sequence has tokens known and tokens computed (`cached_len`); a step closes the gap within a token budget, so
chunked prefill and decode are one case.
"""

from __future__ import annotations

from collections import deque

from heedful.cache.disk import DiskTier
from heedful.cache.pages import KVCache
from heedful.cache.sharing import PrefixSharing
from heedful.errors import CacheFull
from heedful.request import Batch, Sequence

TOKEN_BUDGET = 512  # tokens a step: matrix products are near their best speed, and a step stays short


class Scheduler:
    """First come, first served. A sequence is admitted when the cache can hold all that it may ever need.

    It then begins behind the longest prefix of its prompt whose pages are there; `disk` keeps them beyond the process.
    """

    def __init__(self, cache: KVCache, token_budget: int = TOKEN_BUDGET, disk: DiskTier | None = None) -> None:
        self.cache = cache
        self.sharing = PrefixSharing(cache, disk)
        self.token_budget = token_budget
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._bytes_needed: dict[Sequence, int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, sequence: Sequence, longest: int) -> None:
        """`longest`: the most tokens whose K and V the sequence will hold. Raises CacheFull when that can never fit."""
        needed = self.cache.bytes_needed(sequence.request.policy, longest, self.token_budget)
        if needed > self.cache.budget_bytes:
            room = self.cache.budget_bytes
            raise CacheFull(
                f"{longest:,} tokens need {needed / 1e6:,.3g} MB of KV cache and there are {room / 1e6:,.3g}",
                "Ask for a shorter prompt or answer, a smaller --kv format or a --window, or free memory: the cache is "
                "sized from what is available.",
            )
        self._bytes_needed[sequence] = needed
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """The sequence has ended, or is aborted; its pages go back at once. Removing twice does nothing."""
        if self._bytes_needed.pop(sequence, None) is None:
            return
        (self._running if sequence in self._running else self._waiting).remove(sequence)
        self.sharing.end(sequence)

    def schedule(self) -> Batch:
        """The next step's chunks. Decoding sequences come first, so a long prefill never starves them."""
        self._admit()
        budget, chunks = self.token_budget, []
        for sequence in sorted(self._running, key=_missing):
            length = min(_missing(sequence), budget)
            if length:
                end = self.cache.chunk_end(sequence, sequence.cached_len + length)
                self.sharing.register(sequence)
                chunks.append(self.cache.plan(sequence, end))
                self.sharing.note_moves(chunks[-1])
                budget -= end - sequence.cached_len
        return Batch(tuple(chunks))

    def _admit(self) -> None:
        promised = sum(self._bytes_needed[sequence] for sequence in self._running)
        while self._waiting and promised + self._bytes_needed[self._waiting[0]] <= self.cache.budget_bytes:
            sequence = self._waiting.popleft()
            promised += self._bytes_needed[sequence]
            self._running.append(sequence)
            sequence.prefix = self.sharing.begin(sequence)


def _missing(sequence: Sequence) -> int:
    return len(sequence.token_ids) - sequence.cached_len
