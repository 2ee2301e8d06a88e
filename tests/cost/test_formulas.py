"""Closed forms against masks written out entry by entry, against real plans, and against numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.cost import visits
from heedful.cost.formulas import (
    KV_FORMATS,
    Cost,
    Shape,
    decode_cost,
    encoder_cost,
    generation_cost,
    prefill_cost,
    total,
    training_cost,
)
from heedful.models.config import config_from_hf
from heedful.request import KeySpan, Request, Sequence
from heedful.testing import plain_cache

windows = st.none() | st.integers(1, 20)
layer_windows = st.lists(windows, min_size=1, max_size=4)
sink_counts = st.integers(0, 6)


def shape_of(layers: list[int | None], sinks: int = 0, *, causal: bool = True) -> Shape:
    """6 query heads, 2 KV heads, 8 channels; 1000 and 100 weights."""
    runs = tuple((window, 1) for window in layers)
    return Shape(len(layers), 6, 2, 8, runs, sinks, linear_weights=1000, head_weights=100, causal=causal)


def keys_seen(query: int, window: int | None, sinks: int) -> set[int]:
    return {key for key in range(query + 1) if window is None or query - key < window or key < sinks}


# ---- the mask, entry by entry -------------------------------------------------------------------------------------


@given(layers=layer_windows, sinks=sink_counts, context=st.integers(1, 60), steps=st.integers(1, 5))
def test_decode_counts_the_entries_of_the_last_rows(
    layers: list[int | None], sinks: int, context: int, steps: int
) -> None:
    cost = decode_cost(shape_of(layers, sinks), context, steps)
    rows = [keys_seen(query, w, sinks) for query in range(context - 1, context - 1 + steps) for w in layers]
    assert cost.visits == 6 * sum(map(len, rows))
    assert cost.dense_visits == 6 * len(layers) * sum(range(context, context + steps))
    assert cost.kv_rows_read == 2 * 2 * sum(map(len, rows))  # each step reads each of its keys once, K and V
    assert cost.kv_rows_written == 2 * 2 * len(layers) * steps


@given(layers=layer_windows, sinks=sink_counts, cached=st.integers(0, 40), fresh=st.integers(1, 30))
def test_prefill_counts_the_entries_of_its_rows(layers: list[int | None], sinks: int, cached: int, fresh: int) -> None:
    tokens = cached + fresh
    cost = prefill_cost(shape_of(layers, sinks), tokens, cached)
    rows = {(w_at, query): keys_seen(query, w, sinks) for w_at, w in enumerate(layers) for query in range(tokens)}
    computed = {at: keys for at, keys in rows.items() if at[1] >= cached}
    assert cost.visits == 6 * sum(map(len, computed.values()))
    assert cost.saved_by_prefix == 6 * sum(len(keys) for at, keys in rows.items() if at[1] < cached)
    assert cost.dense_visits == 6 * len(layers) * sum(query + 1 for query in range(tokens))
    columns = [set().union(*(keys for at, keys in computed.items() if at[0] == i)) for i in range(len(layers))]
    assert cost.kv_rows_read == 2 * 2 * sum(map(len, columns))
    assert cost.tokens == fresh


@given(layers=layer_windows, sinks=sink_counts, tokens=st.integers(1, 50))
def test_held_is_what_the_newest_query_sees(layers: list[int | None], sinks: int, tokens: int) -> None:
    held = 2 * 2 * sum(len(keys_seen(tokens - 1, window, sinks)) for window in layers)
    assert prefill_cost(shape_of(layers, sinks), tokens).kv_rows_held == held
    assert decode_cost(shape_of(layers, sinks), tokens).kv_rows_held == held


@given(layers=layer_windows, tokens=st.integers(1, 40))
def test_an_encoder_counts_a_band_on_both_sides(layers: list[int | None], tokens: int) -> None:
    pairs = sum(
        abs(i - j) <= (tokens if window is None else window // 2)
        for window in layers
        for i in range(tokens)
        for j in range(tokens)
    )
    cost = encoder_cost(shape_of(layers, causal=False), tokens)
    assert cost.visits == 6 * pairs
    assert cost.dense_visits == 6 * len(layers) * tokens**2
    assert (cost.kv_rows_read, cost.kv_rows_written, cost.kv_rows_held) == (0, 0, 0)
    assert (cost.linear_flops, cost.weights_read) == (2 * 1000 * tokens, 1000)  # no logits, no head


@given(layers=layer_windows, documents=st.lists(st.integers(1, 25), min_size=1, max_size=5), causal=st.booleans())
def test_training_counts_each_document_alone(layers: list[int | None], documents: list[int], causal: bool) -> None:
    shape = shape_of(layers, causal=causal)
    cost = training_cost(shape, documents)
    alone = [prefill_cost(shape, n) if causal else encoder_cost(shape, n) for n in documents]
    assert cost.visits == sum(one.visits for one in alone)
    assert cost.dense_visits == sum(one.dense_visits for one in alone)
    assert cost.attention_flops == 3 * sum(one.attention_flops or 0 for one in alone)
    assert cost.linear_flops == 3 * 2 * sum(documents) * (1000 + 100)  # a loss at every token
    assert cost.weights_read == 2 * (1000 + 100)  # forward and backward
    assert cost.kv_rows_held == 0


# ---- the parts fit together ---------------------------------------------------------------------------------------


@given(layers=layer_windows, prompt=st.integers(1, 40), output=st.integers(1, 12), chunk=st.integers(1, 16))
def test_paper_agrees_with_the_plan_of_a_real_cache(
    layers: list[int | None], prompt: int, output: int, chunk: int
) -> None:
    """A request planned step by step, as the engine does: prompt in chunks, then all output tokens but the last."""
    cache = plain_cache(tuple(layers), 2, 8, capacity_tokens=64)
    sequence = Sequence(Request(prompt_ids=(1,) * prompt), [1] * (prompt + output - 1))
    spans: list[KeySpan] = []
    decode_rows = 0
    while sequence.cached_len < prompt + output - 1:
        in_prompt = sequence.cached_len < prompt
        end = min(sequence.cached_len + chunk, prompt) if in_prompt else sequence.cached_len + 1
        step = cache.plan(sequence, end).spans
        spans += step
        decode_rows += 0 if in_prompt else sum(2 * visits.rows_read(span, 2).total() for span in step)
        sequence.cached_len = end
    cost = generation_cost(shape_of(layers), prompt, output)
    assert cost.visits == sum(visits.visits(span, 6) for span in spans)
    assert cost.dense_visits == sum(visits.dense_visits(span, 6) for span in spans)
    assert cost.kv_rows_written == sum(2 * visits.rows_written(span, 2).total() for span in spans)
    assert decode_cost(shape_of(layers), prompt + 1, output - 1).kv_rows_read == decode_rows
    if chunk >= prompt:
        assert prefill_cost(shape_of(layers), prompt).kv_rows_read == sum(
            visits.rows_read(span, 2) for span in spans if span.start == 0
        )


@given(layers=layer_windows, sinks=sink_counts, context=st.integers(1, 50), steps=st.integers(1, 6))
def test_steps_are_the_sum_of_single_steps(layers: list[int | None], sinks: int, context: int, steps: int) -> None:
    shape = shape_of(layers, sinks)
    summed = decode_cost(shape, context)
    for later in range(1, steps):
        summed = total(summed, decode_cost(shape, context + later))
    assert decode_cost(shape, context, steps) == summed


def test_a_request_feeds_all_output_tokens_back_but_the_last() -> None:
    shape = shape_of([None, None])
    cost = generation_cost(shape, prompt=3, output=3)
    # rows of 1 + 2 + 3 keys, then 4 and 5; 6 heads, 2 layers
    assert cost.visits == (1 + 2 + 3 + 4 + 5) * 6 * 2
    assert cost.tokens == 5
    assert cost.linear_flops == 2 * (5 * 1000 + 3 * 100)  # the head once per sampled token
    assert cost.weights_read == 3 * (1000 + 100)  # one prefill step, two decode steps
    assert generation_cost(shape, prompt=3, output=1) == total(prefill_cost(shape, 3), decode_cost(shape, 4, steps=0))


def test_a_cached_prefix_saves_its_visits_and_not_the_reading() -> None:
    shape = shape_of([None])
    cold, warm = prefill_cost(shape, 10), prefill_cost(shape, 10, cached=7)
    assert warm.visits == 6 * (8 + 9 + 10)
    assert warm.saved == {"window": 0, "prefix": 6 * 28}
    assert warm.dense_visits == cold.dense_visits == 6 * 55
    assert warm.kv_rows_read == cold.kv_rows_read
    assert warm.kv_rows_written == 2 * 2 * 3


# ---- numbers worked out by hand -----------------------------------------------------------------------------------

LARGE = Shape(layers=80, heads=64, kv_heads=8, head_dim=128)


def test_the_number_of_the_design() -> None:
    cost = decode_cost(Shape(layers=80, heads=64), 1_000_000)
    assert cost.visits == cost.dense_visits == 5_120_000_000
    assert cost.kv_rows_read is cost.kv_bytes_read is cost.attention_flops is cost.linear_flops is None
    assert cost.weight_bytes_read is cost.kv_bytes_held is cost.kv_bytes_per_token is None


def test_bytes_of_a_decoded_token_at_a_million() -> None:
    cost = decode_cost(LARGE, 1_000_000)
    assert cost.kv_rows_read == 1_280_000_000
    assert cost.kv_bytes_read == {
        "f32": 655_360_000_000,
        "f16": 327_680_000_000,
        "q8": 168_960_000_000,
        "q4": 92_160_000_000,
    }
    assert cost.kv_bytes_held == cost.kv_bytes_read  # without a window all that is held is read
    assert cost.kv_bytes_per_token == {"f32": 655_360, "f16": 327_680, "q8": 168_960, "q4": 92_160}
    assert cost.attention_flops == 5_120_000_000 * 512  # 2.6 TFLOP


def test_grouped_queries_cut_rows_and_not_visits() -> None:
    grouped, each_its_own = decode_cost(LARGE, 1_000_000), decode_cost(Shape(80, 64, 64, 128), 1_000_000)
    assert grouped.visits == each_its_own.visits
    assert grouped.attention_flops == each_its_own.attention_flops
    assert each_its_own.kv_bytes_read is not None
    assert each_its_own.kv_bytes_read["f16"] == 2_621_440_000_000  # 2.62 TB
    assert each_its_own.kv_rows_read == 8 * (grouped.kv_rows_read or 0)


def test_a_window_over_a_long_prompt() -> None:
    n, w = 100_000, 4096
    cost = prefill_cost(LARGE.with_policy(w), n)
    assert cost.visits == 64 * 80 * (w * n - w * (w - 1) // 2)
    assert cost.saved_by_window == 64 * 80 * (n * (n + 1) // 2) - cost.visits
    assert cost.kv_rows_held == 2 * 8 * 80 * w


def test_five_local_layers_to_a_global_one() -> None:
    mixed = Shape(layers=18, heads=4, kv_heads=1, head_dim=256, windows=((512, 15), (None, 3)))
    assert decode_cost(mixed, 32_768).visits == 4 * (3 * 32_768 + 15 * 512)
    assert decode_cost(mixed, 100).visits == 4 * 18 * 100


@pytest.mark.parametrize(
    ("name", "head_dim", "expected"),
    [("f32", 64, 256), ("f16", 64, 128), ("q8", 64, 68), ("q4", 64, 36), ("q4", 80, 54), ("q8", 1, 5), ("q4", 1, 18)],
)
def test_bytes_of_a_row(name: str, head_dim: int, expected: int) -> None:
    assert KV_FORMATS[name](head_dim) == expected


def test_bytes_of_weights() -> None:
    cost = decode_cost(shape_of([None]), 5)
    assert cost.weights_read == 1100
    # 1100 weights in blocks of 32: 34 bytes a block for q8, 18 for q4, rounded up
    assert cost.weight_bytes_read == {"f32": 4400, "f16": 2200, "q8": 1169, "q4": 619}


# ---- policies -----------------------------------------------------------------------------------------------------


def test_a_policy_narrows_layers_and_never_widens_them() -> None:
    gemma = Shape(layers=6, heads=4, windows=((512, 5), (None, 1)))
    assert dict(gemma.with_policy(1024, sinks=4).windows) == {512: 5, 1024: 1}
    assert dict(gemma.with_policy(256).windows) == {256: 6}
    assert gemma.with_policy(None) == gemma
    assert dict(Shape(layers=3, heads=4).with_policy(8).windows) == {8: 3}


def test_sinks_come_on_top_of_the_window() -> None:
    shape = Shape(layers=1, heads=1).with_policy(10, sinks=4)
    assert [decode_cost(shape, n).visits for n in (5, 10, 12, 14, 15, 1000)] == [5, 10, 12, 14, 14, 14]


def test_a_window_as_wide_as_the_context_saves_nothing() -> None:
    assert prefill_cost(shape_of([50]), 50).saved_by_window == 0
    assert prefill_cost(shape_of([49]), 50).saved_by_window == 6


@given(layers=layer_windows, sinks=sink_counts, tokens=st.integers(1, 10**15))
def test_dense_is_the_total_and_all_savings_at_any_length(layers: list[int | None], sinks: int, tokens: int) -> None:
    shape = shape_of(layers, sinks)
    costs: list[Cost] = [
        prefill_cost(shape, tokens, tokens // 2),
        decode_cost(shape, tokens),
        training_cost(shape, [tokens]),
    ]
    for cost in costs:
        assert cost.dense_visits == cost.visits + sum(cost.saved.values())
        assert min(cost.visits, *cost.saved.values()) >= 0


def test_documents_as_counts_or_one_by_one() -> None:
    shape = shape_of([None, 7])
    assert training_cost(shape, {20: 3, 5: 1}) == training_cost(shape, [20, 5, 20, 20])
    assert training_cost(shape, {2048: 10**9}).tokens == 2048 * 10**9


# ---- from a model's config ----------------------------------------------------------------------------------------


def test_shape_of_a_config(golden: Path) -> None:
    config = config_from_hf(json.loads((golden / "tiny_decoders/gemma3_text/config.json").read_text()))
    shape = Shape.from_config(config)
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (4, 4, 1, 16)
    assert dict(shape.windows) == {16: 3, None: 1}
    # q and o: 48 x 64 each, k and v: 48 x 16 each; gate, up and down: 48 x 64 each
    assert shape.linear_weights == 4 * (2 * 48 * 64 + 2 * 48 * 16 + 3 * 48 * 64)
    assert shape.head_weights == 96 * 48
    assert decode_cost(shape, 40).visits == 4 * (40 + 3 * 16)
