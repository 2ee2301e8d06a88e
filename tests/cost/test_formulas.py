"""Closed forms against masks written out entry by entry, against real plans, and against numbers worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.cache.policy import PagePolicy
from heedful.cost.formulas import (
    KV_FORMATS,
    PLAIN,
    Cost,
    Shape,
    decode_cost,
    encoder_cost,
    generation_cost,
    prefill_cost,
    total,
    training_cost,
)
from heedful.cost.paper import page_policy
from heedful.cost.steps import STEP_TOKENS
from heedful.engine.scheduler import TOKEN_BUDGET
from heedful.models.config import config_from_hf
from heedful.request import CachePolicy, KVFormat
from policy_cases import HEAD_BYTES, LINEAR_BYTES, chosen, config_of, counted, dense, mask, sparse

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 32

windows = st.none() | st.integers(1, 20)
layer_windows = st.lists(windows, min_size=1, max_size=4)
page_policies = st.builds(
    lambda window, sinks: replace(PLAIN, window=window, sinks=sinks), st.integers(1, 20), st.integers(0, 6)
) | st.just(PLAIN)


def shape_of(layers: list[int | None], *, causal: bool = True) -> Shape:
    return Shape(
        len(layers),
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        tuple((window, 1) for window in layers),
        dense_layers=layers[:1].count(None),
        linear_weights=LINEAR_BYTES,
        head_weights=HEAD_BYTES,
        causal=causal,
    )


def seen_by_all(layers: list[int | None], policy: PagePolicy, start: int, end: int) -> Iterator[np.ndarray]:
    asked = CachePolicy(window=policy.window, sinks=policy.sinks)
    return (mask(start, end, own, asked, end) for own in layers)


# ---- the mask, entry by entry -------------------------------------------------------------------------------------


@given(layers=layer_windows, policy=page_policies, context=st.integers(1, 60), steps=st.integers(1, 5))
def test_decode_counts_the_entries_of_the_last_rows(
    layers: list[int | None], policy: PagePolicy, context: int, steps: int
) -> None:
    cost = decode_cost(shape_of(layers), context, steps, policy)
    entries = sum(int(seen.sum()) for seen in seen_by_all(layers, policy, context - 1, context - 1 + steps))
    assert cost.visits == HEADS * entries
    assert cost.dense_visits == HEADS * len(layers) * sum(range(context, context + steps))
    assert cost.kv_rows_read == 2 * KV_HEADS * entries  # each step reads each of its keys once, K and V
    assert cost.kv_rows_written == 2 * KV_HEADS * len(layers) * steps


@given(layers=layer_windows, policy=page_policies, cached=st.integers(0, 40), fresh=st.integers(1, 30))
def test_prefill_counts_the_entries_of_its_rows(
    layers: list[int | None], policy: PagePolicy, cached: int, fresh: int
) -> None:
    tokens = cached + fresh
    cost = prefill_cost(shape_of(layers), tokens, cached, policy)
    seen = list(seen_by_all(layers, policy, cached, tokens))
    before = list(seen_by_all(layers, policy, 0, cached))
    assert cost.visits == HEADS * sum(int(of_layer.sum()) for of_layer in seen)
    assert cost.saved_by_prefix == HEADS * sum(int(of_layer.sum()) for of_layer in before)
    assert cost.dense_visits == HEADS * len(layers) * sum(query + 1 for query in range(tokens))
    # a step ends where the window begins to leave sinks behind; each reads what its queries see, once
    cut = policy.window - cached if policy.sinks and policy.window is not None else 0
    steps = (slice(0, cut), slice(cut, None)) if 0 < cut < fresh else (slice(0, None),)
    read = sum(int(of_layer[step].any(axis=0).sum()) for of_layer in seen for step in steps)
    assert cost.kv_rows_read == 2 * KV_HEADS * read
    assert cost.tokens == fresh


@given(layers=layer_windows, policy=page_policies, tokens=st.integers(1, 50))
def test_held_is_what_the_newest_query_sees(layers: list[int | None], policy: PagePolicy, tokens: int) -> None:
    seen = seen_by_all(layers, policy, tokens - 1, tokens)
    held = 2 * KV_HEADS * sum(int(of_layer.sum()) for of_layer in seen)
    assert prefill_cost(shape_of(layers), tokens, policy=policy).kv_rows_held == held
    assert decode_cost(shape_of(layers), tokens, policy=policy).kv_rows_held == held


@given(layers=layer_windows, tokens=st.integers(1, 40))
def test_an_encoder_counts_a_band_on_both_sides(layers: list[int | None], tokens: int) -> None:
    pairs = sum(
        abs(i - j) <= (tokens if window is None else window // 2)
        for window in layers
        for i in range(tokens)
        for j in range(tokens)
    )
    cost = encoder_cost(shape_of(layers, causal=False), tokens)
    assert cost.visits == HEADS * pairs
    assert cost.dense_visits == HEADS * len(layers) * tokens**2
    assert (cost.kv_rows_read, cost.kv_rows_written, cost.kv_rows_held) == (0, 0, 0)
    assert (cost.linear_flops, cost.weights_read) == (2 * 1000 * tokens, 1000)  # no logits, no head


@given(
    layers=layer_windows,
    policy=page_policies,
    documents=st.lists(st.integers(1, 25), min_size=1, max_size=5),
    causal=st.booleans(),
)
def test_training_counts_each_document_alone(
    layers: list[int | None], policy: PagePolicy, documents: list[int], causal: bool
) -> None:
    shape = shape_of(layers, causal=causal)
    cost = training_cost(shape, documents, policy)
    alone = [prefill_cost(shape, n, policy=policy) if causal else encoder_cost(shape, n, policy) for n in documents]
    assert cost.visits == sum(one.visits for one in alone)
    assert cost.dense_visits == sum(one.dense_visits for one in alone)
    assert cost.attention_flops == 3 * sum(one.attention_flops or 0 for one in alone)
    assert cost.linear_flops == 3 * 2 * sum(documents) * (1000 + 100)  # a loss at every token
    assert cost.weights_read == 2 * (1000 + 100)  # forward and backward
    assert cost.kv_rows_held == 0


# ---- the parts fit together ---------------------------------------------------------------------------------------


wide_windows = st.lists(st.none() | st.integers(1, 3000), min_size=1, max_size=4)
wide_windowed = st.builds(
    CachePolicy,
    kv_format=st.sampled_from(["q8", "q4"]),
    precise=st.integers(0, 1200),
    window=st.integers(1, 3000),
    sinks=st.integers(0, 1500),
)
prompts = st.integers(1, 900) | st.integers(2000, 4000) | st.sampled_from([512, 1024, 2048])


@pytest.mark.parametrize("policies", [dense | sparse, wide_windowed, chosen], ids=["dense", "window", "budget"])
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_paper_agrees_with_the_receipt_of_a_real_plan(
    policies: st.SearchStrategy[CachePolicy], data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("heedful.cache.policy.LISTED_PAGES", data.draw(st.sampled_from([1, 64])))
        check_paper(policies, data)


def check_paper(policies: st.SearchStrategy[CachePolicy], data: st.DataObject) -> None:
    layers, policy, prompt = data.draw(wide_windows), data.draw(policies), data.draw(prompts)
    output = data.draw(st.integers(1, 200) | st.integers(1, 2000))
    if policies is chosen:
        layers = [*layers, None, None, None]
    config = config_of(layers, HEADS, KV_HEADS, HEAD_DIM)
    receipt, resolved = counted(config, policy, prompt, output), page_policy(policy)
    cost = generation_cost(shape_of(layers), prompt, output, policy=resolved)
    assert (cost.visits, cost.dense_visits) == (receipt.visits.total, receipt.visits.dense)
    assert cost.saved == {"window": receipt.visits.saved.window, "pages": receipt.visits.saved.pages, "prefix": 0}
    assert cost.kv_rows_read == receipt.kv.rows_read
    assert cost.bounds_read == receipt.kv.bounds_read
    assert cost.keys_listed == receipt.kv.keys_listed
    assert cost.kv_bytes_written == receipt.kv.bytes_written
    assert cost.flops["attention"] == receipt.flops.attention
    assert cost.flops["selection"] == receipt.flops.selection
    assert cost.weights_read == receipt.weights.bytes_read  # one byte a weight
    assert cost.kv_bytes_read is not None
    if resolved.is_mixed and receipt.visits.saved.pages:  # which pages a kernel chooses no paper knows
        assert cost.kv_bytes_read <= receipt.kv.bytes_read
    else:
        assert cost.kv_bytes_read == receipt.kv.bytes_read
    assert prefill_cost(shape_of(layers), prompt, policy=resolved).visits == receipt.visits.prefill


def test_rows_of_chosen_pages_are_as_few_bytes_as_a_kernel_can_make_them() -> None:
    """21 pages, 8 of them read; main ones are 1 to 13. The kernel chooses five of these, and reads the newest one."""
    policy = CachePolicy("q4", budget=512)
    resolved = page_policy(policy)
    cost = decode_cost(shape_of([None] * 2), 20 * 64 + 10, policy=resolved)
    in_the_first = (13 * 64) * 36 + (1290 - 13 * 64) * 72
    in_the_last = 5 * 64 * 36 + (2 * 64 + 10) * 72
    to_choose = 64 * (13 * 18 + 5 * 36)  # keys of all candidates: but the first, the newest full one and its own
    assert cost.kv_bytes_read == KV_HEADS * (in_the_first + in_the_last + to_choose)


def test_a_step_on_paper_is_the_engine_s() -> None:
    assert STEP_TOKENS == TOKEN_BUDGET


@given(layers=layer_windows, policy=page_policies, context=st.integers(1, 50), steps=st.integers(1, 6))
def test_steps_are_the_sum_of_single_steps(
    layers: list[int | None], policy: PagePolicy, context: int, steps: int
) -> None:
    shape = shape_of(layers)
    summed = decode_cost(shape, context, 1, policy)
    for later in range(1, steps):
        summed = total(summed, decode_cost(shape, context + later, 1, policy))
    assert decode_cost(shape, context, steps, policy) == summed


@settings(deadline=None, max_examples=15)
@given(
    policy=st.sampled_from([
        CachePolicy("q4", window=100_000, sinks=4000),
        CachePolicy("k=q8,v=q4", precise=1200, window=1_000_001, sinks=3),
        CachePolicy("q4", precise=100, budget=30_000),
        CachePolicy("q8", budget=300),
    ]),
    context=st.integers(1, 10**6),
    first=st.integers(1, 10**7),
    then=st.integers(1, 10**7),
)  # fmt: skip
def test_millions_of_steps_are_the_sum_of_any_two_parts(
    policy: CachePolicy, context: int, first: int, then: int
) -> None:
    shape, resolved = shape_of([None, None, None, 70_000]), page_policy(policy)
    first += -(context - 1 + first) % 4  # there pages are chosen anew in any case
    parts = decode_cost(shape, context, first, resolved), decode_cost(shape, context + first, then, resolved)
    assert total(*parts) == decode_cost(shape, context, first + then, resolved)


def test_a_request_feeds_all_output_tokens_back_but_the_last() -> None:
    shape = shape_of([None, None])
    cost = generation_cost(shape, prompt=3, output=3)
    # rows of 1 + 2 + 3 keys, then 4 and 5; 6 heads, 2 layers
    assert cost.visits == (1 + 2 + 3 + 4 + 5) * 6 * 2
    assert cost.tokens == 5
    assert cost.linear_flops == 2 * (5 * 1000 + 3 * 100)  # the head once per sampled token
    assert cost.weights_read == 3 * (1000 + 100)  # one prefill step, two decode steps
    assert generation_cost(shape, prompt=3, output=1) == total(prefill_cost(shape, 3), decode_cost(shape, 4, steps=0))


def test_a_long_prompt_takes_steps_that_read_what_is_there() -> None:
    cost = prefill_cost(shape_of([None]), 1300)
    assert cost.kv_rows_read == 2 * KV_HEADS * (512 + 1024 + 1300)
    assert cost.weights_read == 3 * 1000 + 100  # logits only at the end


def test_a_cached_prefix_saves_its_visits_and_not_the_reading() -> None:
    shape = shape_of([None])
    cold, warm = prefill_cost(shape, 10), prefill_cost(shape, 10, cached=7)
    assert warm.visits == 6 * (8 + 9 + 10)
    assert warm.saved == {"window": 0, "pages": 0, "prefix": 6 * 28}
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
    assert cost.flops == {"linear": None, "attention": None, "selection": None}


def plain(kv: str) -> PagePolicy:
    """The same format everywhere."""
    return PagePolicy(KVFormat.parse(kv), KVFormat.parse(kv), precise_len=0)


@pytest.mark.parametrize(
    ("kv", "bytes_read", "of_a_token"),
    [
        ("f32", 655_360_000_000, 655_360),
        ("f16", 327_680_000_000, 327_680),
        ("q8", 168_960_000_000, 168_960),
        ("q4", 92_160_000_000, 92_160),
        ("k=q8,v=q4", 130_560_000_000, 130_560),
    ],
)
def test_bytes_of_a_decoded_token_at_a_million(kv: str, bytes_read: int, of_a_token: int) -> None:
    cost = decode_cost(LARGE, 1_000_000, policy=plain(kv))
    assert cost.kv_rows_read == 1_280_000_000
    assert cost.kv_bytes_read == cost.kv_bytes_held == bytes_read  # without a window all that is held is read
    assert cost.kv_bytes_per_token == of_a_token
    assert cost.attention_flops == 5_120_000_000 * 512  # 2.6 TFLOP


def test_the_newest_tokens_stay_precise() -> None:
    """999,999 = 1953 strides of 512 and 63: 128 + 64 rows are newest, 64 the first page."""
    cost = decode_cost(LARGE, 1_000_000, policy=replace(plain("q4"), precise=KVFormat("q8", "q8"), precise_len=128))
    rows_8_bit = 64 + 128 + 64
    assert cost.kv_bytes_read == 80 * 8 * 2 * ((1_000_000 - rows_8_bit) * 72 + rows_8_bit * 132)
    assert cost.kv_bytes_held == cost.kv_bytes_read


def test_grouped_queries_cut_rows_and_not_visits() -> None:
    grouped, each_its_own = decode_cost(LARGE, 1_000_000), decode_cost(Shape(80, 64, 64, 128), 1_000_000)
    assert grouped.visits == each_its_own.visits
    assert grouped.attention_flops == each_its_own.attention_flops
    in_f16 = decode_cost(Shape(80, 64, 64, 128), 1_000_000, policy=plain("f16"))
    assert in_f16.kv_bytes_read == 2_621_440_000_000  # 2.62 TB
    assert each_its_own.kv_rows_read == 8 * (grouped.kv_rows_read or 0)


def test_a_window_over_a_long_prompt() -> None:
    n, w = 100_000, 4096
    cost = prefill_cost(LARGE, n, policy=replace(PLAIN, window=w))
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
    policy = replace(PLAIN, window=1024, sinks=4)
    assert decode_cost(gemma, 5000, policy=policy).visits == 4 * (5 * 512 + 1024 + 4)  # no sinks beside its own
    assert decode_cost(gemma, 5000, policy=replace(PLAIN, window=256, sinks=4)).visits == 4 * 6 * 260
    assert decode_cost(gemma, 5000).visits == 4 * (5 * 512 + 5000)


def test_sinks_come_on_top_of_the_window() -> None:
    policy = replace(PLAIN, window=10, sinks=4)
    found = [decode_cost(Shape(1, 1), n, policy=policy).visits for n in (5, 10, 12, 14, 15, 1000)]
    assert found == [5, 10, 12, 14, 14, 14]


def test_a_budget_spares_the_first_layer() -> None:
    policy = replace(PLAIN, budget_pages=8)
    of_page = 7 * 64 + (999_999 % 64 + 1)
    cost = decode_cost(LARGE, 1_000_000, policy=policy)
    assert cost.visits == 64 * (1_000_000 + 79 * of_page)
    assert cost.saved_by_pages == 64 * 79 * (1_000_000 - of_page)
    assert cost.bounds_read == 8 * 79 * (15_625 - 3)  # pages but the first, the newest full one and its own
    assert cost.keys_listed == 8 * 79 * 64 * 64  # of 64 of these pages
    assert decode_cost(LARGE, 512, policy=policy).saved_by_pages == 0
    local_first = Shape(layers=6, heads=4, windows=((512, 5), (None, 1)), dense_layers=0)
    assert decode_cost(local_first, 1_000_000, policy=policy).visits == 4 * (5 * 512 + of_page)


def test_a_sparse_prefill_sees_the_first_and_the_newest_tokens() -> None:
    n = 100_000
    cost = prefill_cost(Shape(1, 1), n, policy=replace(PLAIN, sparse_prefill=True))
    rising, level = 2048 * 2049 // 2, (n - 100 - 2048) * 2048
    assert cost.visits == rising + level + sum(range(n - 99, n + 1))
    assert cost.linear_passes == 196 + 1  # 512 at a time, and the last hundred apart


def test_a_window_as_wide_as_the_context_saves_nothing() -> None:
    assert prefill_cost(shape_of([50]), 50).saved_by_window == 0
    assert prefill_cost(shape_of([49]), 50).saved_by_window == 6


@settings(deadline=None)
@given(layers=wide_windows, policy=dense | wide_windowed | chosen, tokens=st.integers(1, 10**15))
def test_dense_is_the_total_and_all_savings_at_any_length(
    layers: list[int | None], policy: CachePolicy, tokens: int
) -> None:
    shape, resolved = shape_of(layers), page_policy(policy)
    costs: list[Cost] = [
        prefill_cost(shape, tokens, tokens // 2, resolved),
        decode_cost(shape, tokens, policy=resolved),
        training_cost(shape, [tokens], resolved),
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
    assert shape.dense_layers == 0  # the one without a window is the last
    everywhere = replace(config, windows=(None,) * 4)
    assert Shape.from_config(everywhere).dense_layers == 1
    assert Shape.from_config(replace(config, windows=(16, None, None, None))).dense_layers == 0
    # q and o: 48 x 64 each, k and v: 48 x 16 each; gate, up and down: 48 x 64 each
    assert shape.linear_weights == 4 * (2 * 48 * 64 + 2 * 48 * 16 + 3 * 48 * 64)
    assert shape.head_weights == 96 * 48
    assert decode_cost(shape, 40).visits == 4 * (40 + 3 * 16)
