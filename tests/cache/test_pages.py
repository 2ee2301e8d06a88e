"""Pages under random traffic: every position is held by one page of one sequence, and every page comes back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.cache.pages import FREED, PAGE_LEN, KVCache, layer_groups, plain_layout, slots
from heedful.errors import CacheFull
from heedful.request import Chunk, Request, Sequence


def new_sequence(length: int) -> Sequence:
    return Sequence(Request(tuple(range(length))), list(range(length)))


def run(cache: KVCache, sequence: Sequence, end: int) -> Chunk:
    chunk = cache.plan(sequence, end)
    sequence.cached_len = end
    return chunk


def test_layers_group_by_window() -> None:
    groups = layer_groups((512, 512, None, 512))
    assert [(group.layers, group.window) for group in groups] == [((0, 1, 3), 512), ((2,), None)]


@given(
    window=st.one_of(st.none(), st.integers(1, 300)),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=12),
)
def test_a_span_holds_exactly_the_keys_that_its_queries_may_see(window: int | None, lengths: list[int]) -> None:
    cache = KVCache((window, None), plain_layout(1, 4), capacity_tokens=4096)
    sequence = new_sequence(sum(lengths))
    where: dict[int, int] = {}  # position → slot, as stored
    end = 0
    for length in lengths:
        end += length
        span = run(cache, sequence, end).spans[0]
        assert (span.start, span.end) == (end - length, end)
        for position, slot in zip(range(span.start, span.end), slots(span), strict=True):
            where[position] = int(slot)
        oldest_seen = 0 if window is None else max(0, span.start - window + 1)
        assert span.first_key == oldest_seen
        for position in range(span.first_key, span.end):  # the page list leads back to where each key was stored
            page = span.pages[position // PAGE_LEN - span.first_page]
            assert page * PAGE_LEN + position % PAGE_LEN == where[position]


@given(st.data())
def test_no_page_serves_two_and_all_come_back(data: st.DataObject) -> None:
    cache = KVCache((100, None), plain_layout(1, 4), capacity_tokens=1024)
    sequences = [new_sequence(data.draw(st.integers(1, 400))) for _ in range(4)]
    for _ in range(data.draw(st.integers(1, 25))):
        sequence = data.draw(st.sampled_from(sequences))
        if sequence.cached_len == len(sequence.token_ids):
            cache.release(sequence)
        else:
            end = min(len(sequence.token_ids), sequence.cached_len + data.draw(st.integers(1, 150)))
            try:
                run(cache, sequence, end)
            except CacheFull:
                cache.release(sequence)
        for group, pool in enumerate(cache.pools):
            held = [p for s in sequences if s.page_tables for p in s.page_tables[group] if p != FREED]
            assert len(held) == len(set(held))
            assert len(held) + pool.free_pages == pool.num_pages
    for sequence in sequences:
        cache.release(sequence)
    assert cache.taken_bytes == 0


def test_pages_behind_the_window_go_back() -> None:
    cache = KVCache((64,), plain_layout(1, 4), capacity_tokens=8192)
    sequence = new_sequence(5000)
    for end in range(1, 5001):
        run(cache, sequence, end)
        assert sum(page != FREED for page in sequence.page_tables[0]) <= 2
    assert sequence.page_tables[0].count(FREED) == 5000 // PAGE_LEN - 1


def test_held_bytes_counts_keys_and_values_of_every_layer() -> None:
    cache = KVCache((None, None, 64), plain_layout(3, 16), capacity_tokens=1024)
    sequence = new_sequence(65)
    run(cache, sequence, 65)
    two_pages = 2 * PAGE_LEN * 3 * 16 * 4 * 2  # pages · slots · heads · channels · float32 · (K and V)
    assert cache.held_bytes(sequence) == 3 * two_pages


def test_a_full_cache_says_so_and_recovers() -> None:
    cache = KVCache((None,), plain_layout(1, 4), capacity_tokens=2 * PAGE_LEN)
    first, second = new_sequence(PAGE_LEN), new_sequence(2 * PAGE_LEN)
    run(cache, first, PAGE_LEN)
    with pytest.raises(CacheFull, match="all 2 pages of 64 tokens"):
        cache.plan(second, 2 * PAGE_LEN)
    cache.release(first)
    assert run(cache, second, 2 * PAGE_LEN).spans[0].pages == tuple(second.page_tables[0])


def test_buffers_are_float32_pages_of_the_layer() -> None:
    cache = KVCache((None, 8), plain_layout(3, 16), capacity_tokens=100)
    assert cache.pools[1].buffers[1].shape == (2, 2, PAGE_LEN, 3, 16)  # keys and values, pages, slots, heads, channels
    assert cache.pools[1].buffers[1].dtype == np.float32


def test_a_sequence_alone_has_its_pages_in_a_row_again_and_again() -> None:
    cache = KVCache((None,), plain_layout(1, 4), capacity_tokens=10 * PAGE_LEN)
    for _ in range(3):
        sequence = new_sequence(5 * PAGE_LEN)
        assert run(cache, sequence, 5 * PAGE_LEN).spans[0].pages == (0, 1, 2, 3, 4)
        cache.release(sequence)
