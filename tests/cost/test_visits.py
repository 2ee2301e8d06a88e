"""Counts of a plan against the mask itself, written out entry by entry, under every policy."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.cache import policy
from heedful.cache.pages import ARENA_PAGES, PAGE_LEN, KVCache
from heedful.cost import visits
from heedful.cost.meter import Meter, key_and_value_bytes, split_evenly
from heedful.request import KV_ROW_BYTES, CachePolicy, Chunk, FormatRun, KeySpan, KVFormat
from heedful.testing import plain_cache
from policy_cases import choose, chosen, config_of, mask, own_windows, policies, run, sequence_of, whole_request

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 32
Q8 = KVFormat("q8", "q8")

layer_windows = st.lists(own_windows, min_size=1, max_size=4)
prompts = st.integers(1, 900) | st.integers(2000, 2600)


def cache_of(windows: list[int | None], capacity_tokens: int = 16384) -> KVCache:
    return plain_cache(tuple(windows), KV_HEADS, HEAD_DIM, capacity_tokens=capacity_tokens)


class BruteForce:
    """Counts of attention, one mask a chunk, layer and KV head."""

    def __init__(self, windows: list[int | None]) -> None:
        self.windows = windows
        self.visits = self.dense = self.bounds = 0
        self.rows_read: Counter[str] = Counter()
        self.keys_listed: Counter[str] = Counter()
        self.rows_written: Counter[str] = Counter()

    def add(self, cache: KVCache, chunk: Chunk) -> None:
        for span, table in zip(chunk.spans, chunk.sequence.page_tables, strict=True):
            formats = [cache.arenas[page // ARENA_PAGES].format.name if page >= 0 else "freed" for page in table]
            own_keys = np.arange(chunk.start, chunk.end)
            for layer in span.layers:
                for head in range(KV_HEADS):
                    seen = self._mask(chunk, span, layer, head)
                    for page in self._listed(span, layer, head):
                        self.keys_listed[formats[page]] += PAGE_LEN
                    self.visits += HEADS // KV_HEADS * int(seen.sum())
                    self.dense += HEADS // KV_HEADS * sum(range(chunk.start + 1, chunk.end + 1))
                    _count(self.rows_read, seen.any(axis=0).nonzero()[0], formats)
                    _count(self.rows_written, own_keys, formats)
        for move in chunk.moves:
            for page, rows in ((move.source, self.rows_read), (move.target, self.rows_written)):
                layers = chunk.spans[move.group].layers
                rows[cache.arenas[page // ARENA_PAGES].format.name] += PAGE_LEN * KV_HEADS * len(layers)

    def _mask(self, chunk: Chunk, span: KeySpan, layer: int, head: int) -> npt.NDArray[np.bool_]:
        sequence = chunk.sequence
        seen = mask(chunk.start, chunk.end, self.windows[layer], sequence.request.policy, sequence.prompt_len)
        if span.selection is None or layer < 1:
            return seen
        pages = np.arange(chunk.end) // PAGE_LEN
        return seen & np.isin(pages, span.selection.chosen[layer, head])

    def _listed(self, span: KeySpan, layer: int, head: int) -> list[int]:
        """Pages whose keys are read to choose: at most so many of those that are neither the first, nor among the
        newest, nor the query's own. Where these are more, the bounds of all of them are read first.
        """
        selection = span.selection
        if selection is None or layer < 1 or not selection.renew:
            return []
        candidates = list(range(1, span.start // PAGE_LEN - selection.local_pages))
        if len(candidates) <= max(policy.LISTED_PAGES, 2 * selection.num_pages):
            return candidates
        self.bounds += len(candidates)
        found: list[int] = selection.listed[layer, head].tolist()
        assert len(set(found)) == max(policy.LISTED_PAGES, 2 * selection.num_pages)
        return found


def _count(rows: Counter[str], keys: npt.NDArray[np.int64], formats: list[str]) -> None:
    for page, count in zip(*np.unique(keys // PAGE_LEN, return_counts=True), strict=True):
        rows[formats[page]] += int(count)


def by_name(rows: Counter[KVFormat]) -> Counter[str]:
    return Counter({form.name: count for form, count in rows.items() if count})


@pytest.mark.parametrize("least_listed", [1, 64])
@settings(deadline=None)
@given(layer_windows, policies | chosen, prompts, st.integers(1, 150), st.integers(1, 600), st.integers(0, 2**32))
def test_the_meter_counts_what_masks_count(
    least_listed: int, windows: list[int | None], asked: CachePolicy, prompt: int, output: int, step_len: int, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "LISTED_PAGES", least_listed)
        check_meter(windows, asked, prompt, output, step_len, seed)


def check_meter(
    windows: list[int | None], policy: CachePolicy, prompt: int, output: int, step_len: int, seed: int
) -> None:
    cache, config, rng = cache_of(windows), config_of(windows, HEADS, KV_HEADS, HEAD_DIM), np.random.default_rng(seed)
    sequence = sequence_of(policy, prompt, output)
    meter, brute, bytes_read = Meter(sequence), BruteForce(windows), 0
    for chunk in whole_request(cache, sequence, step_len):
        choose(chunk, rng)
        bytes_read += meter.count(chunk, config, weight_bytes=0)
        brute.add(cache, chunk)
    assert by_name(meter.rows_read) == brute.rows_read
    assert by_name(meter.rows_written) == brute.rows_written
    receipt = meter.receipt("toy", config, cache.policy(policy))
    assert (receipt.visits.total, receipt.visits.dense) == (brute.visits, brute.dense)
    assert receipt.visits.dense == receipt.visits.total + receipt.visits.saved.window + receipt.visits.saved.pages
    assert receipt.kv.bounds_read == brute.bounds
    assert receipt.kv.rows_read == 2 * brute.rows_read.total()
    sizes = {form.name: key_and_value_bytes(form, HEAD_DIM) for form in meter.rows_read | meter.rows_written}
    assert by_name(meter.keys_listed) == brute.keys_listed
    assert receipt.kv.keys_listed == brute.keys_listed.total()
    of_keys = {form.name: KV_ROW_BYTES[form.keys](HEAD_DIM) for form in meter.keys_listed}
    to_choose = brute.bounds * (2 * HEAD_DIM + 8) + sum(n * of_keys[f] for f, n in brute.keys_listed.items())
    assert receipt.kv.bytes_read == bytes_read == to_choose + sum(n * sizes[f] for f, n in brute.rows_read.items())
    assert receipt.kv.bytes_written == sum(n * sizes[f] for f, n in brute.rows_written.items())
    assert receipt.flops.attention == 4 * HEAD_DIM * brute.visits
    products = 4 * brute.bounds + 2 * brute.keys_listed.total()
    assert receipt.flops.selection == HEAD_DIM * products * (HEADS // KV_HEADS)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=6), own_windows, policies)
def test_cutting_into_chunks_changes_no_visit(cuts: list[int], window: int | None, policy: CachePolicy) -> None:
    def counted(lengths: list[int]) -> tuple[int, int, int]:
        cache, sequence = cache_of([window]), sequence_of(policy, sum(cuts))
        spans = [run(cache, sequence, length).spans[0] for length in lengths if sequence.cached_len < sum(cuts)]
        while sequence.cached_len < sum(cuts):  # a policy stopped a chunk short
            spans.append(run(cache, sequence, sum(cuts)).spans[0])
        made, dense = (sum(count(span, 3) for span in spans) for count in (visits.visits, visits.dense_visits))
        return made, dense, sum(visits.rows_written(span, 3)[1] for span in spans)

    assert counted(cuts) == counted([sum(cuts)])


def test_a_selection_by_hand() -> None:
    """64 tokens a page; 20 pages and 10 tokens of the 21st; 8 pages are read."""
    cache, windows = cache_of([None] * 5), [None] * 5
    sequence = sequence_of(CachePolicy("q8", budget=512), prompt=20 * 64 + 9, output=2)
    chunks = list(whole_request(cache, sequence, 4096))
    span = chunks[-1].spans[0]
    assert (span.start, len(chunks)) == (20 * 64 + 9, 2)
    assert visits.visits(span, 6) == 6 * (1290 + 4 * (7 * 64 + 10))
    assert [(form.name, rows) for form, rows in visits.rows_read(span, 2)] == [
        ("q8", 2 * 1290),
        ("q8", 2 * 4 * (7 * 64 + 10)),
    ]
    assert visits.bounds_read(span, 2) == 0  # so few are all listed
    assert [(form.name, rows) for form, rows in visits.keys_listed(span, 2)] == [("q8", 2 * 4 * (21 - 3) * 64)]
    meter = Meter(sequence)
    for chunk in chunks:
        meter.count(chunk, config_of(windows, HEADS, KV_HEADS, HEAD_DIM), weight_bytes=5)
    assert meter.saved_by_pages == 6 * 4 * (1290 - 458)
    assert meter.saved_by_window == 0


def test_chosen_pages_of_two_formats_by_hand() -> None:
    """Page 0 and those from 14 on are 8-bit; each head reads pages 0, 3, its own choice of 7 and 13 or 8 and 9, …"""
    cache = cache_of([None] * 2)
    sequence = sequence_of(CachePolicy("q4", budget=512), prompt=20 * 64 + 9, output=2)
    *_, chunk = whole_request(cache, sequence, 512)
    span = chunk.spans[0]
    assert span.selection is not None
    assert [(run.format.name, run.begin // 64) for run in span.formats] == [("q8", 0), ("q4", 1), ("q8", 14)]
    span.selection.chosen[1] = [[0, 7, 13, 16, 17, 18, 19, 20], [0, 14, 15, 16, 17, 18, 19, 20]]
    rows: Counter[str] = Counter()
    for form, count in visits.rows_read(span, 2):
        rows[form.name] += count
    in_the_first = Counter(q8=2 * (64 + 1290 - 14 * 64), q4=2 * 13 * 64)
    assert rows == in_the_first + Counter(q8=64 * (5 + 7) + 2 * 10, q4=64 * 2)


def test_by_hand() -> None:
    # queries 4, 5, 6 with a window of 3 see keys 2-4, 3-5, 4-6: 9 entries, 5 columns; dense they see 5 + 6 + 7 = 18
    runs = (FormatRun(Q8, 0, 7),)
    span = KeySpan(layers=(0, 2), window=3, first_key=2, start=4, end=7, pages=(), first_page=0, formats=runs)
    assert visits.visits(span, heads=8) == 9 * 8 * 2
    assert visits.dense_visits(span, heads=8) == 18 * 8 * 2
    assert visits.rows_read(span, kv_heads=2) == [(Q8, 5 * 2 * 2)]
    assert visits.rows_written(span, kv_heads=2) == (Q8, 3 * 2 * 2)


def test_a_million_tokens_are_counted_exactly() -> None:
    last = KeySpan(tuple(range(80)), None, 0, 999_999, 1_000_000, pages=(), first_page=0, formats=())
    assert visits.visits(last, heads=64) == 5_120_000_000  # the number of design.md
    whole = KeySpan((0,), None, 0, 0, 10**15, pages=(), first_page=0, formats=())
    assert visits.visits(whole, heads=1) == 500_000_000_000_000_500_000_000_000_000


@given(st.integers(0, 10**12), st.integers(1, 50))
def test_parts_sum_to_the_whole(whole: int, parts: int) -> None:
    split = split_evenly(whole, parts)
    assert (sum(split), len(split)) == (whole, parts)
    assert max(split) - min(split) <= 1
