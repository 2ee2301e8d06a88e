"""The KV cache: pages of token slots, a page table per sequence and layer group. Numpy buffers and ints; no kernels.

Layers with the same window form a *group*: they hold the same positions, so one page stands for one page in each of
the group's layers. An *arena* holds a group's pages of one number format. Behind a group's window pages go back at
once; when a sequence ends all of its pages do.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from heedful.cache.policy import (
    DENSE_LAYERS,
    LOCAL_PAGES,
    PAGE_LEN,
    RENEW_STEPS,
    SPARSE_SINKS,
    SPARSE_TAIL,
    SPARSE_WINDOW,
    STRIDE,
    PagePolicy,
    resolve,
)
from heedful.errors import CacheFull
from heedful.request import (
    KV_ROW_BYTES,
    CachePolicy,
    Chunk,
    FormatRun,
    KeySpan,
    KVFormat,
    PageMove,
    Selection,
    Sequence,
)

FREED = -1
"""In a page table: the page lay behind the window and was given back."""
ARENA_PAGES = 1 << 20
"""A page is arena · ARENA_PAGES + its row in the arena's buffers."""


@dataclass(frozen=True)
class LayerGroup:
    layers: tuple[int, ...]
    window: int | None


def layer_groups(windows: tuple[int | None, ...]) -> tuple[LayerGroup, ...]:
    """Layers by window, in order of first appearance."""
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        by_window.setdefault(window, []).append(layer)
    return tuple(LayerGroup(tuple(layers), window) for window, layers in by_window.items())


@dataclass(frozen=True)
class PageLayout:
    """What one page of one layer takes, keys and values, and the bounds of its keys, which lie apart."""

    page_bytes: int
    bounds_bytes: int = 0


def plain_layout(form: KVFormat, kv_heads: int, head_dim: int) -> PageLayout:
    """Rows one after another: keys (PAGE_LEN, K, row bytes), then values, without padding and bounds."""
    row_bytes = KV_ROW_BYTES[form.keys](head_dim) + KV_ROW_BYTES[form.values](head_dim)
    return PageLayout(PAGE_LEN * kv_heads * row_bytes)


class PageArena:
    """A layer group's pages of one format: which are free, and the buffers behind them.

    The memory is reserved, not touched: the system provides it when a page is first written. The lowest free row is
    taken first: touched pages are used again, and a sequence alone has its pages in a row, readable as one block.
    """

    def __init__(self, index: int, group: int, layers: tuple[int, ...], form: KVFormat, layout: PageLayout, rows: int):
        assert rows <= ARENA_PAGES, rows
        self.index = index
        self.group = group
        self.layers = layers
        self.format = form
        self.layout = layout
        self.num_pages = rows
        self.page_bytes = len(layers) * (layout.page_bytes + layout.bounds_bytes)
        """Bytes that one page stands for: keys and values of all the group's layers."""
        self.buffers = {layer: _reserve(rows, layout.page_bytes) for layer in layers}
        self.bounds = {layer: _reserve(rows, layout.bounds_bytes) for layer in layers}
        self._free = list(range(rows))  # a heap

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def take(self) -> int:
        if not self._free:
            raise CacheFull(f"all {self.num_pages} pages of {PAGE_LEN} tokens are taken", "Use a shorter context.")
        return self.index * ARENA_PAGES + heapq.heappop(self._free)

    def give_back(self, page: int) -> None:
        assert page // ARENA_PAGES == self.index, (page, self.index)
        heapq.heappush(self._free, page % ARENA_PAGES)


def _reserve(rows: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    return np.empty((rows, row_bytes), dtype=np.uint8)


class KVCache:
    """All layer groups' pages. A sequence's page tables change only here."""

    def __init__(
        self,
        windows: tuple[int | None, ...],
        kv_heads: int,
        head_dim: int,
        layout_of: Callable[[KVFormat], PageLayout],
        *,
        default: KVFormat,
        numbers: tuple[str, ...],
        capacity_tokens: int,
    ) -> None:
        """`windows` per layer. `layout_of`: how the runner lays out a page. `default`: its format where a request names
        none; `numbers`: the number formats that it can hold. `capacity_tokens`: tokens of the default format that fit
        where no layer has a window, over all sequences.
        """
        self.groups = layer_groups(windows)
        self.default = default
        self.capacity_tokens = capacity_tokens
        self.arenas: list[PageArena] = []
        """By index; grows when a request brings a format that is new. Runners look at it before each step."""
        self.taken_bytes = 0
        self._num_layers = len(windows)
        self._kv_heads = kv_heads
        self._head_dim = head_dim
        self._layout_of = layout_of
        self._numbers = numbers
        self._arenas: dict[tuple[int, str], PageArena] = {}
        self._policies: dict[CachePolicy, PagePolicy] = {}
        self.budget_bytes = pages_for(capacity_tokens) * sum(
            self._page_bytes(group, default) for group in range(len(self.groups))
        )

    def policy(self, asked: CachePolicy) -> PagePolicy:
        """Raises BadParameter for what this cache cannot do."""
        if asked not in self._policies:
            self._policies[asked] = resolve(asked, self.default, self._numbers, self._head_dim)
        return self._policies[asked]

    def bytes_needed(self, asked: CachePolicy, longest: int, chunk_len: int) -> int:
        """The most that a sequence of `longest` tokens can hold, computed in chunks of up to `chunk_len`."""
        policy = self.policy(asked)
        most = 0
        for index, group in enumerate(self.groups):
            pages, window = pages_for(longest), policy.window_of(group.window)
            if window is not None:
                pages = min(pages, pages_for(window + chunk_len) + 1 + pages_for(policy.sinks_of(group.window)))
            most += pages * self._page_bytes(index, policy.main)
            if policy.is_mixed:  # the newest pages are precise, and for a moment in both formats
                precise = min(pages, 1 + (policy.precise_len + STRIDE) // PAGE_LEN)
                most += precise * self._page_bytes(index, policy.precise)
        return most

    def chunk_end(self, sequence: Sequence, end: int) -> int:
        """Where a chunk that wants to reach `end` must stop: formats and the reach of queries change at positions that
        do not depend on how a prompt is cut."""
        policy, start = self.policy(sequence.request.policy), sequence.cached_len
        if policy.is_mixed:
            end = min(end, (start // STRIDE + 1) * STRIDE)
        if policy.sparse_prefill and start < (tail := sequence.prompt_len - SPARSE_TAIL):
            end = min(end, tail)
        return end

    def plan(self, sequence: Sequence, end: int) -> Chunk:
        """Take pages for positions [cached_len, end) and say what the step must store and read.

        Gives back pages that lie behind the window of every query from cached_len on. Raises CacheFull, with the
        pages that were taken kept in the table (a later call uses them, release() returns them).
        """
        if not sequence.page_tables:
            sequence.page_tables = [[] for _ in self.groups]
        start = sequence.cached_len
        assert start < end <= len(sequence.token_ids), (start, end, len(sequence.token_ids))
        assert end <= self.chunk_end(sequence, end), (start, end)
        moves: list[PageMove] = []
        spans = tuple(self._plan_group(group, sequence, end, moves) for group in range(len(self.groups)))
        return Chunk(sequence, start, end, spans, tuple(moves))

    def release(self, sequence: Sequence) -> None:
        """Give back every page of the sequence; its K and V are gone."""
        for table in sequence.page_tables:
            for page in table:
                if page != FREED:
                    self._give_back(sequence, page)
        assert sequence.held_bytes == 0, sequence.held_bytes
        sequence.page_tables = []
        sequence.selected = None
        sequence.cached_len = 0

    def _plan_group(self, index: int, sequence: Sequence, end: int, moves: list[PageMove]) -> KeySpan:
        policy, group = self.policy(sequence.request.policy), self.groups[index]
        table, start = sequence.page_tables[index], sequence.cached_len
        window, sinks, distance = _reach(policy, group.window, sequence)
        kept_window, kept_sinks = policy.window_of(group.window), policy.sinks_of(group.window)
        first_key = 0 if window is None else min(max(sinks, start - window + 1), end)
        first_page = min(first_key, start) // PAGE_LEN
        first_kept = 0 if kept_window is None else max(0, start - kept_window + 1) // PAGE_LEN
        sink_pages = pages_for(kept_sinks)
        self._free_behind(sequence, table, sink_pages, first_kept)
        old_end = _old_end(policy, start)
        self._convert(index, sequence, old_end, max(first_kept, 1), moves)
        while len(table) * PAGE_LEN < end:
            # a page whose every slot lies behind the window is never taken, only marked
            wanted = len(table) >= first_kept or len(table) < sink_pages
            table.append(self._take(index, policy.precise, sequence) if wanted else FREED)
        pages = tuple(table[first_page : pages_for(end)])
        assert FREED not in pages, (pages, first_key, start, end)
        return KeySpan(
            layers=group.layers,
            window=window,
            first_key=first_key,
            start=start,
            end=end,
            pages=pages,
            first_page=first_page,
            formats=_formats(policy, old_end, end),
            sinks=sinks,
            sink_pages=tuple(table[: pages_for(min(sinks, end))]),
            sink_distance=distance,
            selection=self._selection(policy, group, sequence, end),
        )

    def _selection(self, policy: PagePolicy, group: LayerGroup, sequence: Sequence, end: int) -> Selection | None:
        start, wanted = sequence.cached_len, policy.budget_pages
        if wanted is None or group.window is not None or start < sequence.prompt_len or end - start > 1:
            return None
        if pages_for(end) <= wanted:
            return None
        renew = start % RENEW_STEPS == 0 or sequence.selected is None
        if sequence.selected is None:
            sequence.selected = np.zeros((self._num_layers, self._kv_heads, wanted), dtype=np.int32)
        return Selection(wanted, LOCAL_PAGES, DENSE_LAYERS, renew, sequence.selected)

    def _convert(self, index: int, sequence: Sequence, old_end: int, first: int, moves: list[PageMove]) -> None:
        """Pages [first, old_end) of the table take the main format."""
        policy, table = self.policy(sequence.request.policy), sequence.page_tables[index]
        if not policy.is_mixed:
            return
        main = self._arena(index, policy.main).index
        page_index = min(old_end // PAGE_LEN, len(table)) - 1
        while page_index >= first and table[page_index] // ARENA_PAGES != main:  # before it all are main already
            source = table[page_index]
            table[page_index] = self._take(index, policy.main, sequence)
            moves.append(PageMove(index, source, table[page_index]))
            self._give_back(sequence, source)  # moves are done before anything is stored
            page_index -= 1

    def _free_behind(self, sequence: Sequence, table: list[int], sink_pages: int, first_page: int) -> None:
        index = min(first_page, len(table)) - 1
        while index >= sink_pages and table[index] != FREED:  # everything before a freed page is freed already
            self._give_back(sequence, table[index])
            table[index] = FREED
            index -= 1

    def _take(self, group: int, form: KVFormat, sequence: Sequence) -> int:
        arena = self._arena(group, form)
        if self.taken_bytes + arena.page_bytes > self.budget_bytes:
            raise CacheFull(
                f"all {self.budget_bytes / 1e6:,.0f} MB of the KV cache are taken", "Use a shorter context."
            )
        page = arena.take()
        self.taken_bytes += arena.page_bytes
        sequence.held_bytes += arena.page_bytes
        return page

    def _give_back(self, sequence: Sequence, page: int) -> None:
        arena = self.arenas[page // ARENA_PAGES]
        arena.give_back(page)
        self.taken_bytes -= arena.page_bytes
        sequence.held_bytes -= arena.page_bytes

    def _arena(self, group: int, form: KVFormat) -> PageArena:
        """Rotated or not makes no difference to a page."""
        arena = self._arenas.get((group, form.name))
        if arena is None:
            layout, layers = self._layout(group, form), self.groups[group].layers
            rows = max(1, self.budget_bytes // self._page_bytes(group, form))
            arena = PageArena(len(self.arenas), group, layers, form, layout, rows)
            self._arenas[group, form.name] = arena
            self.arenas.append(arena)
        return arena

    def _page_bytes(self, group: int, form: KVFormat) -> int:
        layout = self._layout(group, form)
        return len(self.groups[group].layers) * (layout.page_bytes + layout.bounds_bytes)

    def _layout(self, group: int, form: KVFormat) -> PageLayout:
        """Without bounds where the layers have a window: nothing is selected there."""
        layout = self._layout_of(form)
        return layout if self.groups[group].window is None else replace(layout, bounds_bytes=0)


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE_LEN)


def _reach(policy: PagePolicy, own: int | None, sequence: Sequence) -> tuple[int | None, int, int | None]:
    """(window, sinks, sink distance) of the queries from cached_len on, in layers whose own window is `own`."""
    if policy.sparse_prefill and own is None and sequence.cached_len < sequence.prompt_len - SPARSE_TAIL:
        return SPARSE_WINDOW, SPARSE_SINKS, None
    window, sinks = policy.window_of(own), policy.sinks_of(own)
    return window, sinks, window + sinks - 1 if window is not None and sinks else None


def _old_end(policy: PagePolicy, start: int) -> int:
    """Up to here pages are in the main format when a chunk begins at `start`; the first page never is."""
    return max(PAGE_LEN, start // STRIDE * STRIDE - policy.precise_len)


def _formats(policy: PagePolicy, old_end: int, end: int) -> tuple[FormatRun, ...]:
    if not policy.is_mixed:
        return (FormatRun(policy.main, 0, end),)
    runs = (
        FormatRun(policy.precise, 0, PAGE_LEN),
        FormatRun(policy.main, PAGE_LEN, old_end),
        FormatRun(policy.precise, old_end, max(end, old_end)),
    )
    return tuple(run for run in runs if run.begin < run.end)
