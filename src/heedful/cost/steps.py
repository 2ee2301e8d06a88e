"""Keys that the steps of a request see, read and store in one layer, from positions alone: cache/pages.py on paper.

A prompt is computed in steps of STEP_TOKENS, then one token a step. Sums over any number of steps are exact and quick:
between its bends every count grows evenly from one stride of positions to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from heedful.cache.policy import (
    LOCAL_PAGES,
    PAGE_LEN,
    RENEW_STEPS,
    SPARSE_SINKS,
    SPARSE_TAIL,
    SPARSE_WINDOW,
    STRIDE,
    PagePolicy,
    candidate_pages,
    listed_pages,
)
from heedful.cost.visits import attended, selected_keys

STEP_TOKENS = STRIDE
"""The most prompt tokens that the engine computes at once; also the stride at which pages change format."""


class Keys(NamedTuple):
    """Of one head of one layer; rows of keys, with as many rows of values."""

    seen: int = 0
    """(query, key) pairs."""
    main_read: int = 0
    """Rows in the policy's main format."""
    precise_read: int = 0
    main_written: int = 0
    precise_written: int = 0
    bounds_read: int = 0
    main_listed: int = 0
    """Keys that are read alone, to choose pages."""
    precise_listed: int = 0

    def plus(self, other: Keys, times: int = 1) -> Keys:
        return Keys(*(mine + times * more for mine, more in zip(self, other, strict=True)))


def prompt_steps(policy: PagePolicy, prompt: int, cached: int = 0) -> int:
    """Steps that the positions [cached, prompt) take."""
    return sum(count for _, _, _, count in _stretches(policy, prompt, cached))


@dataclass(frozen=True)
class LayerOnPaper:
    policy: PagePolicy
    own_window: int | None
    chooses: bool
    """Under a budget, decoding reads chosen pages here."""

    def prompt_keys(self, prompt: int, cached: int = 0) -> Keys:
        """Of the steps that compute the positions [cached, prompt)."""
        total = Keys()
        for begin, end, origin, count in _stretches(self.policy, prompt, cached):

            def step(index: int, begin: int = begin, end: int = end, origin: int = origin) -> Keys:
                first = max(begin, origin + STEP_TOKENS * index)
                last = min(end, origin + STEP_TOKENS * (index + 1))
                return self._step(first, last, prompt, may_move=first > cached)

            bends = ((position - origin) // STEP_TOKENS for position in self._bends())
            total = total.plus(_summed(step, 0, count, bends))
        return total

    def decode_keys(self, prompt: int, steps: int) -> Keys:
        """Of the steps that compute the positions [prompt, prompt + steps) one by one."""
        end = prompt + steps

        def stride(index: int) -> Keys:
            total = Keys()
            for position in range(max(prompt, index * STRIDE), min(end, (index + 1) * STRIDE)):
                total = total.plus(self._decode_step(position, prompt))
            return total

        if self._is_plain:
            seen = attended(prompt, end, self._most_seen)
            return Keys(seen=seen, main_read=seen, main_written=steps)
        bends = (position // STRIDE for position in self._bends())
        return _summed(stride, prompt // STRIDE, -(-end // STRIDE), bends) if steps else Keys()

    def held_keys(self, tokens: int) -> tuple[int, int]:
        """Rows (main, precise) that the newest of `tokens` tokens may still see."""
        return self._read(tokens - 1, tokens, self._window, self._sinks)

    @property
    def _is_plain(self) -> bool:
        """Whether a decoded token reads what it sees, in one format."""
        return not self.policy.is_mixed and not self.chooses

    @property
    def _window(self) -> int | None:
        return self.policy.window_of(self.own_window)

    @property
    def _sinks(self) -> int:
        return self.policy.sinks_of(self.own_window)

    @property
    def _most_seen(self) -> int | None:
        return None if self._window is None else self._window + self._sinks

    def _step(self, start: int, end: int, prompt: int, may_move: bool = True) -> Keys:
        """Of one step without a choice of pages, over the positions [start, end)."""
        window, sinks = self._window, self._sinks
        if self.policy.sparse_prefill and self.own_window is None and start < prompt - SPARSE_TAIL:
            window, sinks = SPARSE_WINDOW, SPARSE_SINKS
        seen = attended(start, end, None if window is None else window + sinks)
        main, precise = self._read(start, end, window, sinks)
        if not self.policy.is_mixed:
            return Keys(seen, main, precise, main_written=end - start)
        moved = self._moved(start) if may_move else 0
        return Keys(seen, main, precise + moved, moved, end - start)

    def _decode_step(self, position: int, prompt: int) -> Keys:
        step, budget = self._step(position, position + 1, prompt), self.policy.budget_pages
        own = position // PAGE_LEN
        if not self.chooses or budget is None or own < budget:
            return step
        seen, local = selected_keys(budget, position), min(LOCAL_PAGES, budget - 3)
        if position % RENEW_STEPS == 0 or position == prompt:
            step = self._choosing(step, position, budget, local)
        if not self.policy.is_mixed:
            return step._replace(seen=seen, main_read=seen)
        main, moved = self._main_of_chosen(position, budget, local), step.main_written
        return step._replace(seen=seen, main_read=main, precise_read=seen - main + moved)

    def _choosing(self, step: Keys, position: int, budget: int, local: int) -> Keys:
        candidates = candidate_pages(position // PAGE_LEN + 1, local)
        listed = listed_pages(budget, candidates)
        main = min(listed, self._main_candidates(position, local)) if self.policy.is_mixed else listed
        return step._replace(
            bounds_read=candidates if listed < candidates else 0,
            main_listed=PAGE_LEN * main,
            precise_listed=PAGE_LEN * (listed - main),
        )

    def _main_candidates(self, position: int, local: int) -> int:
        return min(self._old_end(position) // PAGE_LEN, position // PAGE_LEN - local) - 1

    def _main_of_chosen(self, position: int, budget: int, local: int) -> int:
        """Rows in main pages, where the kernel chooses as many of these as there are; it may choose fewer."""
        own, old = position // PAGE_LEN, self._old_end(position) // PAGE_LEN
        candidates = self._main_candidates(position, local)
        return PAGE_LEN * (max(0, old - (own - local)) + min(budget - local - 2, candidates))

    def _read(self, start: int, end: int, window: int | None, sinks: int) -> tuple[int, int]:
        """Rows (main, precise) that the queries at [start, end) see between them."""
        first = 0 if window is None else min(max(sinks, start - window + 1), end)
        sinks = min(sinks, end)
        rows = sinks + end - first
        if not self.policy.is_mixed:
            return rows, 0
        old = self._old_end(start)
        main = _overlap(PAGE_LEN, old, 0, sinks) + _overlap(PAGE_LEN, old, first, end)
        return main, rows - main

    def _moved(self, start: int) -> int:
        """Rows that take the main format before a step that begins at `start`."""
        if start == 0 or start % STRIDE:
            return 0
        before, old = self._old_end(start - 1) // PAGE_LEN, self._old_end(start) // PAGE_LEN
        sink_pages = -(-self._sinks // PAGE_LEN)
        first_kept = 0 if self._window is None else max(0, start - self._window + 1) // PAGE_LEN
        kept = _overlap(before, old, 0, sink_pages) + _overlap(before, old, max(sink_pages, first_kept), old)
        return PAGE_LEN * kept

    def _old_end(self, start: int) -> int:
        """Positions from the second page up to here are in main pages when a step begins at `start`."""
        return max(PAGE_LEN, start // STRIDE * STRIDE - self.policy.precise_len)

    def _bends(self) -> set[int]:
        """Positions at which, up to a stride, a count may begin to grow at another rate."""
        sparse = (SPARSE_WINDOW, SPARSE_SINKS) if self.policy.sparse_prefill else (0, 0)
        budget = self.policy.budget_pages or 0
        bends = {PAGE_LEN * (budget + pages) for pages in (0, 1)}
        bends |= {PAGE_LEN * (listed_pages(budget, 1 << 62) + LOCAL_PAGES + pages) for pages in (0, 1, 2, 3)}
        for window, sinks in ((self._window or 0, self._sinks), sparse):
            firsts = (0, sinks, -(-sinks // PAGE_LEN) * PAGE_LEN, PAGE_LEN)
            bends |= {reach + first for reach in (0, window) for first in firsts}
        return {bend + precise for bend in bends for precise in (0, self.policy.precise_len)}


def _stretches(policy: PagePolicy, prompt: int, cached: int) -> Iterable[tuple[int, int, int, int]]:
    """(begin, end, origin, steps): positions [begin, end), cut at origin + i · STEP_TOKENS."""
    cuts = {cached, prompt}
    if policy.sparse_prefill:
        cuts.add(prompt - SPARSE_TAIL)
    if policy.sinks and policy.window is not None:
        cuts.add(policy.window)
    for begin, end in pairwise(sorted(cut for cut in cuts if cached <= cut <= prompt)):
        origin = begin // STRIDE * STRIDE if policy.is_mixed else begin
        yield begin, end, origin, -(-(end - origin) // STEP_TOKENS)


def _summed(counts: Callable[[int], Keys], first: int, end: int, bends: Iterable[int]) -> Keys:
    """Σ counts(i) for first <= i < end, where counts are linear in i but for the first and last one and about bends."""
    about = {bend + offset for bend in bends for offset in (-1, 0, 1, 2, 3)} | {first + 1, end - 1}
    total = Keys()
    for begin, until in pairwise(sorted({first, end} | {cut for cut in about if first < cut < end})):
        least = counts(begin)
        both = least.plus(least if until == begin + 1 else counts(until - 1))
        total = Keys(*(sofar + (until - begin) * more // 2 for sofar, more in zip(total, both, strict=True)))
    return total


def _overlap(begin: int, end: int, other_begin: int, other_end: int) -> int:
    return max(0, min(end, other_end) - max(begin, other_begin))
