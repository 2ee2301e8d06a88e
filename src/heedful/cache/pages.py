"""The KV cache: pages of token slots, a page table per sequence and layer group. Numpy buffers and ints; no kernels.

Layers with the same window form a *group*: they hold the same positions, so one page id stands for one page in each
of the group's layers. Behind a group's window pages go back at once; when a sequence ends all of its pages do.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from heedful.errors import CacheFull
from heedful.request import Chunk, KeySpan, Sequence

PAGE_LEN = 64  # token slots; reference measurements found 64 twice as fast to select from as 16
FREED = -1
"""In a page table: the page lay behind the window and was given back."""


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
    """How the pages of one layer lie in memory: an array (*before, num_pages, *after)."""

    kv_format: str
    dtype: str
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer, keys and values."""
        return prod(self.before) * prod(self.after) * np.dtype(self.dtype).itemsize

    def allocate(self, num_pages: int) -> npt.NDArray[Any]:
        return np.empty((*self.before, num_pages, *self.after), dtype=self.dtype)


def plain_layout(kv_heads: int, head_dim: int) -> PageLayout:
    """float32 keys, then values: (2, num_pages, PAGE_LEN, K, D)."""
    return PageLayout("f32", "float32", (2,), (PAGE_LEN, kv_heads, head_dim))


class PagePool:
    """The pages of one layer group: which ids are free, and the buffers behind the ids.

    The memory is reserved, not touched: the system provides it when a page is first written. The lowest free id is
    taken first: touched pages are used again, and a sequence alone has its pages in a row, readable as one block.
    """

    def __init__(self, group: LayerGroup, num_pages: int, layout: PageLayout) -> None:
        self.group = group
        self.num_pages = num_pages
        self.page_bytes = len(group.layers) * layout.page_bytes
        """Bytes that one page id stands for: keys and values of all the group's layers."""
        self.buffers = {layer: layout.allocate(num_pages) for layer in group.layers}
        self._free = list(range(num_pages))  # a heap

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def take(self) -> int:
        if not self._free:
            raise CacheFull(f"all {self.num_pages} pages of {PAGE_LEN} tokens are taken", "Use a shorter context.")
        return heapq.heappop(self._free)

    def give_back(self, page: int) -> None:
        assert 0 <= page < self.num_pages, (page, self.num_pages)
        heapq.heappush(self._free, page)


class KVCache:
    """All layer groups' pages. A sequence's page tables change only here."""

    def __init__(self, windows: tuple[int | None, ...], layout: PageLayout, *, capacity_tokens: int) -> None:
        """`windows` per layer; `capacity_tokens`: tokens of full-attention layers that fit, over all sequences."""
        self.layout = layout
        self.capacity_tokens = capacity_tokens
        self.num_pages = self.pages_for(capacity_tokens)
        self.pools = tuple(PagePool(group, self.num_pages, layout) for group in layer_groups(windows))

    @staticmethod
    def pages_for(tokens: int) -> int:
        """Pages a group without a window needs for so many tokens of one sequence."""
        return -(-tokens // PAGE_LEN)

    def plan(self, sequence: Sequence, end: int) -> Chunk:
        """Take pages for positions [cached_len, end) and say what the step must store and read.

        Gives back pages that lie behind the window of every query from cached_len on. Raises CacheFull, with the
        pages that were taken kept in the table (a later call uses them, release() returns them).
        """
        if not sequence.page_tables:
            sequence.page_tables = [[] for _ in self.pools]
        start = sequence.cached_len
        assert start < end <= len(sequence.token_ids), (start, end, len(sequence.token_ids))
        spans = [
            _plan_group(pool, table, start, end) for pool, table in zip(self.pools, sequence.page_tables, strict=True)
        ]
        return Chunk(sequence, start, end, tuple(spans))

    def release(self, sequence: Sequence) -> None:
        """Give back every page of the sequence; its K and V are gone."""
        for pool, table in zip(self.pools, sequence.page_tables, strict=False):
            for page in table:
                if page != FREED:
                    pool.give_back(page)
        sequence.page_tables = []
        sequence.cached_len = 0

    def held_bytes(self, sequence: Sequence) -> int:
        """Bytes of the pages in the sequence's tables now."""
        return sum(
            pool.page_bytes * sum(page != FREED for page in table)
            for pool, table in zip(self.pools, sequence.page_tables, strict=False)
        )


def _plan_group(pool: PagePool, table: list[int], start: int, end: int) -> KeySpan:
    window = pool.group.window
    first_key = 0 if window is None else max(0, start - window + 1)
    first_page = first_key // PAGE_LEN
    _free_before(pool, table, first_page)
    while len(table) * PAGE_LEN < end:
        # a page whose every slot lies behind first_key is never taken, only marked
        table.append(pool.take() if len(table) >= first_page else FREED)
    pages = tuple(table[first_page : -(-end // PAGE_LEN)])
    assert FREED not in pages, (pages, first_key, start, end)
    return KeySpan(pool.group.layers, window, first_key, start, end, pages, first_page)


def _free_before(pool: PagePool, table: list[int], first_page: int) -> None:
    index = min(first_page, len(table)) - 1
    while index >= 0 and table[index] != FREED:  # everything before a freed page is freed already
        pool.give_back(table[index])
        table[index] = FREED
        index -= 1


def slots(span: KeySpan) -> npt.NDArray[np.int64]:
    """Where the chunk's new rows go: page · PAGE_LEN + offset for positions [start, end), (end - start,)."""
    positions = np.arange(span.start, span.end)
    pages = np.asarray(span.pages, dtype=np.int64)
    return pages[positions // PAGE_LEN - span.first_page] * PAGE_LEN + positions % PAGE_LEN
