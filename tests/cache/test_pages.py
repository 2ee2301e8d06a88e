"""Pages under random traffic and all policies: every key lies where its span says, in the format that it says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.cache.pages import ARENA_PAGES, FREED, PAGE_LEN, KVCache, layer_groups, pages_for, plain_layout
from heedful.errors import CacheFull
from heedful.request import CachePolicy, Chunk, KeySpan, KVFormat, Sequence
from heedful.testing import plain_cache
from policy_cases import chosen, mask, own_windows, policies, run, sequence_of, whole_request

layer_windows = st.lists(own_windows, min_size=1, max_size=3)
head_dims = st.sampled_from([8, 32, 64])  # at 8 a 4-bit row is larger than an 8-bit one
prompts = st.integers(1, 900) | st.integers(2000, 2600)

Memory = dict[int, list[tuple[Sequence, int] | None]]
"""Page → whose key of which position lies in each slot; of all layers of the page's group alike."""


def execute(memory: Memory, chunk: Chunk) -> None:
    """What a runner does with the plan: moves, then the chunk's own keys."""
    for move in chunk.moves:
        memory[move.target] = list(memory[move.source])
    for span in chunk.spans:
        for position in range(span.start, span.end):
            page = span.pages[position // PAGE_LEN - span.first_page]
            memory.setdefault(page, [None] * PAGE_LEN)[position % PAGE_LEN] = (chunk.sequence, position)


def keys_read(span: KeySpan) -> dict[int, int]:
    """Position of every key that the span lets its queries read → the page that holds it."""
    keys = {position: span.sink_pages[position // PAGE_LEN] for position in range(min(span.sinks, span.end))}
    main = range(span.first_key, span.end)
    return keys | {position: span.pages[position // PAGE_LEN - span.first_page] for position in main}


def format_at(span: KeySpan, position: int) -> KVFormat:
    (run,) = (run for run in span.formats if run.begin <= position < run.end)
    return run.format


def check_span(cache: KVCache, memory: Memory, chunk: Chunk, span: KeySpan, own: int | None) -> None:
    sequence = chunk.sequence
    seen = mask(span.start, span.end, own, sequence.request.policy, sequence.prompt_len)
    keys = keys_read(span)
    assert sorted(keys) == seen.any(axis=0).nonzero()[0].tolist()
    for position, page in keys.items():
        assert memory[page][position % PAGE_LEN] == (sequence, position)
        assert cache.arenas[page // ARENA_PAGES].format.name == format_at(span, position).name
    assert span.formats[0].begin == 0
    assert span.formats[-1].end >= span.end
    assert all(before.end == after.begin for before, after in zip(span.formats, span.formats[1:], strict=False))


def check_moves(cache: KVCache, chunk: Chunk, tables_before: list[list[int]]) -> None:
    policy = cache.policy(chunk.sequence.request.policy)
    for move in chunk.moves:
        before, after = tables_before[move.group], chunk.sequence.page_tables[move.group]
        assert move.source in before
        assert after[before.index(move.source)] == move.target
        source, target = cache.arenas[move.source // ARENA_PAGES], cache.arenas[move.target // ARENA_PAGES]
        assert (source.group, target.group) == (move.group, move.group)
        assert (source.format.name, target.format.name) == (policy.precise.name, policy.main.name)


@settings(deadline=None)
@given(layer_windows, policies, prompts, st.integers(1, 700), head_dims, st.data())
def test_every_key_that_a_query_may_see_lies_where_the_span_says(
    own: list[int | None], policy: CachePolicy, prompt: int, output: int, head_dim: int, data: st.DataObject
) -> None:
    cache = plain_cache(tuple(own), 2, head_dim, capacity_tokens=8192)
    sequence, memory = sequence_of(policy, prompt, output), Memory()
    while sequence.cached_len < len(sequence.token_ids):
        before = [list(table) for table in sequence.page_tables]
        in_prompt = sequence.cached_len < prompt
        length = data.draw(st.integers(1, prompt - sequence.cached_len)) if in_prompt else 64
        chunk = run(cache, sequence, length)
        execute(memory, chunk)
        check_moves(cache, chunk, before)
        for span, group in zip(chunk.spans, cache.groups, strict=True):
            assert (span.layers, span.start, span.end) == (group.layers, chunk.start, chunk.end)
            check_span(cache, memory, chunk, span, group.window)


def held_pages(cache: KVCache, sequences: list[Sequence]) -> list[int]:
    return [page for s in sequences for table in s.page_tables for page in table if page != FREED]


def bytes_of(cache: KVCache, pages: list[int]) -> int:
    return sum(cache.arenas[page // ARENA_PAGES].page_bytes for page in pages)


@settings(deadline=None)
@given(st.lists(policies, min_size=2, max_size=4), st.data())
def test_a_page_serves_one_sequence_or_is_free(asked: list[CachePolicy], data: st.DataObject) -> None:
    cache, memory = plain_cache((100, None), 1, data.draw(head_dims), capacity_tokens=1024), Memory()
    sequences = [sequence_of(policy, data.draw(st.integers(1, 1500)), output=40) for policy in asked]
    for _ in range(data.draw(st.integers(1, 25))):
        sequence = data.draw(st.sampled_from(sequences))
        if sequence.cached_len == len(sequence.token_ids):
            cache.release(sequence)
        else:
            try:
                chunk = run(cache, sequence, data.draw(st.integers(1, 600)))
                execute(memory, chunk)
                for span, group in zip(chunk.spans, cache.groups, strict=True):
                    check_span(cache, memory, chunk, span, group.window)
            except CacheFull:  # nothing was moved: the sequence can go on when another has ended
                if data.draw(st.booleans()):
                    cache.release(sequence)
        held = held_pages(cache, sequences)
        assert len(held) == len(set(held))
        assert cache.taken_bytes == bytes_of(cache, held) <= cache.budget_bytes
        for one in sequences:
            assert one.held_bytes == bytes_of(cache, held_pages(cache, [one]))
    for sequence in sequences:
        cache.release(sequence)
    assert cache.taken_bytes == 0
    for arena in cache.arenas:  # every row is there to be taken, once
        rows = {arena.take() % ARENA_PAGES for _ in range(arena.num_pages)}
        assert rows == set(range(arena.num_pages))


@settings(deadline=None)
@given(layer_windows, policies, prompts, st.integers(1, 700), st.integers(1, 600), head_dims)
def test_a_sequence_never_needs_more_than_it_is_admitted_for(
    own: list[int | None], policy: CachePolicy, prompt: int, output: int, step_len: int, head_dim: int
) -> None:
    cache = plain_cache(tuple(own), 2, head_dim, capacity_tokens=8192)
    needed = cache.bytes_needed(policy, prompt + output - 1, step_len)
    cache.budget_bytes = needed  # one byte more would raise CacheFull
    sequence = sequence_of(policy, prompt, output)
    for _ in whole_request(cache, sequence, step_len):
        assert sequence.held_bytes <= needed


def test_the_bytes_that_a_sequence_needs_are_not_far_from_what_it_takes() -> None:
    """64 channels: 36 bytes of a 4-bit row, 68 of an 8-bit one; a key and a value; 64 slots."""
    cache = plain_cache((None,), 1, 64, capacity_tokens=8192)
    assert cache.bytes_needed(CachePolicy("q8"), 1000, 512) == 16 * 64 * 2 * 68
    # the first page, two newest ones, and the eight of a stride that is not over yet
    assert cache.bytes_needed(CachePolicy("q4"), 4096, 512) == 64 * 2 * (53 * 36 + 11 * 68)
    assert cache.bytes_needed(CachePolicy("q4", precise=0), 4096, 512) == 64 * 64 * 2 * 36
    window = CachePolicy("q8", window=1024, sinks=4)
    assert cache.bytes_needed(window, 100_000, 512) == (24 + 1 + 1) * 64 * 2 * 68


def test_layers_group_by_window() -> None:
    groups = layer_groups((512, 512, None, 512))
    assert [(group.layers, group.window) for group in groups] == [((0, 1, 3), 512), ((2,), None)]


def test_pages_behind_the_window_go_back_and_those_of_sinks_stay() -> None:
    cache = plain_cache((None,), 1, 4, capacity_tokens=8192)
    sequence = sequence_of(CachePolicy(window=64, sinks=65), prompt=1, output=5000)
    for chunk in whole_request(cache, sequence, 1):
        table = sequence.page_tables[0]
        assert sum(page != FREED for page in table) <= 2 + 2
        is_beyond = chunk.end > 64  # else the window holds everything, sinks too
        assert chunk.spans[0].sink_pages == (tuple(table[:2]) if is_beyond else ())
    assert sequence.page_tables[0].count(FREED) == pages_for(5000) - 4


def test_pages_become_four_bit_when_a_stride_is_over() -> None:
    cache = plain_cache((None,), 1, 32, capacity_tokens=8192)
    sequence = sequence_of(CachePolicy("q4", precise=100), prompt=2000)
    chunks = list(whole_request(cache, sequence, 512))
    assert [(chunk.start, chunk.end) for chunk in chunks] == [(0, 512), (512, 1024), (1024, 1536), (1536, 2000)]
    # the first page and the newest 128 tokens, whole pages, stay as they are
    assert [len(chunk.moves) for chunk in chunks] == [0, 5, 8, 8]
    runs = [(run.format.name, run.begin, run.end) for run in chunks[3].spans[0].formats]
    assert runs == [("q8", 0, 64), ("q4", 64, 1408), ("q8", 1408, 2000)]


@given(chosen, st.integers(200, 700), st.integers(2, 60))
def test_a_selection_has_room_for_what_is_read_in_any_case(policy: CachePolicy, prompt: int, output: int) -> None:
    cache = plain_cache((None, 50), 2, 8, capacity_tokens=8192)
    sequence = sequence_of(policy, prompt, output)
    budget, renewed = pages_for(policy.budget or 0), []
    for chunk in whole_request(cache, sequence, 512):
        selection, windowed = chunk.spans[0].selection, chunk.spans[1].selection
        assert windowed is None
        assert (selection is not None) == (chunk.start >= prompt and pages_for(chunk.end) > budget)
        if selection is not None:
            assert selection.num_pages == budget
            assert 1 <= selection.local_pages <= budget - 3  # the first page, its own, one that is chosen
            assert selection.chosen.shape == (2, 2, budget)
            renewed.append((chunk.start, selection.renew))
    assert all(renew == (start % 4 == 0 or i == 0) for i, (start, renew) in enumerate(renewed))


def test_held_bytes_counts_keys_and_values_of_every_layer() -> None:
    cache = plain_cache((None, None, 64), 3, 16, capacity_tokens=1024)
    sequence = sequence_of(CachePolicy(), prompt=65)
    run(cache, sequence, 65)
    two_pages = 2 * PAGE_LEN * 3 * 16 * 4 * 2  # pages · slots · heads · channels · float32 · (K and V)
    assert sequence.held_bytes == 3 * two_pages


def test_a_full_cache_says_so_and_recovers() -> None:
    cache = plain_cache((None,), 1, 4, capacity_tokens=2 * PAGE_LEN)
    first, second = sequence_of(CachePolicy(), PAGE_LEN), sequence_of(CachePolicy(), 2 * PAGE_LEN)
    run(cache, first, PAGE_LEN)
    with pytest.raises(CacheFull, match="of the KV cache are taken"):
        run(cache, second, 2 * PAGE_LEN)
    assert second.held_bytes == 0
    cache.release(first)
    assert run(cache, second, 2 * PAGE_LEN).spans[0].pages == tuple(second.page_tables[0])


def test_buffers_are_bytes_of_the_layer_s_pages() -> None:
    cache = plain_cache((None, 8), 3, 16, capacity_tokens=128)
    run(cache, sequence_of(CachePolicy("k=q8,v=f16"), 10), 10)
    assert [list(arena.buffers) for arena in cache.arenas] == [[0], [1]]
    for arena in cache.arenas:
        (buffer,) = arena.buffers.values()
        assert buffer.shape == (arena.num_pages, PAGE_LEN * 3 * (20 + 32))
    assert plain_layout(KVFormat("q8", "q4"), 3, 16).page_bytes == PAGE_LEN * 3 * (20 + 18)


def test_a_sequence_alone_has_its_pages_in_a_row_again_and_again() -> None:
    cache = plain_cache((None,), 1, 4, capacity_tokens=10 * PAGE_LEN)
    for _ in range(3):
        sequence = sequence_of(CachePolicy(), 5 * PAGE_LEN)
        assert run(cache, sequence, 5 * PAGE_LEN).spans[0].pages == (0, 1, 2, 3, 4)
        cache.release(sequence)
