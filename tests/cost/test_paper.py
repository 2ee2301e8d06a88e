"""Estimates worked out by hand, and which change the hint proposes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heedful.cost.energy import Machine
from heedful.cost.formulas import PLAIN, Cost, Shape, decode_cost, encoder_cost, generation_cost
from heedful.cost.paper import Case, Question, Setting, cheaper, dram_bytes, duration, estimate, percent, report
from heedful.cost.shapes import KNOWN
from heedful.request import CachePolicy, KVFormat

SLOW = Machine(bytes_per_second=1000.0, flops_per_second=1e15)
"""Memory decides."""
SETTING = Setting("f32", SLOW)
F16 = CachePolicy("f16")
F16_PAGES = replace(PLAIN, main=KVFormat("f16", "f16"), precise=KVFormat("f16", "f16"))
LARGE = Shape(layers=80, heads=64, kv_heads=8, head_dim=128)
SMALL = Shape(layers=1, heads=2, kv_heads=1, head_dim=32, linear_weights=320, head_weights=64)


def hint_of(
    question: Question, shape: Shape, policy: CachePolicy = F16, weights: str = "f32", machine: Machine = SLOW
) -> str:
    return cheaper(Case(question, shape, policy, Setting(weights, machine)))


def test_bytes_are_rows_read_and_written_and_weights() -> None:
    # 10 keys and values read, one of each written, at 64 bytes; 384 weights of 4 bytes
    assert dram_bytes(decode_cost(SMALL, 10, policy=F16_PAGES), SETTING) == (20 + 2) * 64 + 384 * 4
    # int8 rows of 36 bytes; 34 bytes for 32 weights
    assert dram_bytes(decode_cost(SMALL, 10), Setting("q8", SLOW)) == (20 + 2) * 36 + 384 * 34 // 32


def test_seconds_of_memory_and_of_arithmetic() -> None:
    cost = decode_cost(SMALL, 10, policy=F16_PAGES)
    by_memory = estimate([cost], SETTING)
    assert by_memory is not None
    assert by_memory.seconds == pytest.approx(2.944)
    by_arithmetic = estimate([cost], replace(SETTING, machine=Machine(bytes_per_second=1e15, flops_per_second=100.0)))
    assert by_arithmetic is not None
    assert by_arithmetic.seconds == pytest.approx((2 * 384 + 20 * 4 * 32) / 100)
    assert by_arithmetic.covers == "attention and weights"


def test_without_weights_only_attention_is_covered() -> None:
    machine = Machine(bytes_per_second=32.768e9, flops_per_second=1e12)
    found = estimate([decode_cost(LARGE, 1_000_000, policy=F16_PAGES)], Setting("f32", machine))
    assert found is not None
    assert found.covers == "attention"
    assert found.seconds == pytest.approx(10, rel=1e-5)  # 327.68 GB, and one row of each kind written
    assert estimate([decode_cost(replace(LARGE, kv_heads=None), 10)], SETTING) is None


def test_a_request_takes_its_prefill_and_then_its_decoding() -> None:
    setting = replace(SETTING, machine=Machine(bytes_per_second=1000.0, flops_per_second=3000.0))
    found = report(Case(Question("request", 100, output=20), SMALL, F16, setting))
    assert found["seconds"] == pytest.approx(found["prefill"]["seconds"] + found["decode"]["seconds"])
    assert found["visits"] == found["prefill"]["visits"] + found["decode"]["visits"]
    # arithmetic decides one and memory the other, so the sum is more than the roofline of the sums
    assert found["prefill"]["seconds"] == pytest.approx((2 * (100 * 320 + 64) + 5050 * 2 * 128) / 3000)
    keys_read = sum(range(101, 120))
    assert found["decode"]["seconds"] == pytest.approx((2 * (keys_read + 19) * 64 + 19 * 384 * 4) / 1000)


def test_bytes_of_each_format_are_those_of_the_same_policy_in_it() -> None:
    """After a million tokens 8 pages are read in 79 layers, all in one; of 4-bit pages some are precise."""
    policy = CachePolicy("k=q8,v=q4", precise=0, budget=512)
    found = report(Case(Question("decode", 1_000_000), LARGE, policy, SETTING))
    assert list(found["kv_bytes_read"]) == ["f32", "f16", "q8", "q4", "k=q8,v=q4"]
    keys = 8 * (1_000_000 + 79 * (7 * 64 + 64))
    bounds, listed = 8 * 79 * (15_625 - 3), 8 * 79 * 64 * 64
    sizes = {"f32": 1024, "f16": 512, "q8": 264, "q4": 144, "k=q8,v=q4": 132 + 72}
    of_keys = {"f32": 512, "f16": 256, "q8": 132, "q4": 72, "k=q8,v=q4": 132}
    assert found["kv_bytes_read"] == {
        name: keys * size + bounds * 264 + listed * of_keys[name] for name, size in sizes.items()
    }
    assert found["flops"]["selection"] == 8 * 128 * (4 * bounds + 2 * listed)
    with_precise = report(Case(Question("decode", 1_000_000), LARGE, replace(policy, precise=None), SETTING))
    assert with_precise["kv_bytes_read"]["q8"] == found["kv_bytes_read"]["q8"]
    assert with_precise["kv_bytes_read"]["q4"] > found["kv_bytes_read"]["q4"]


def test_price() -> None:
    setting = replace(SETTING, machine=Machine(watts=3.6e6, bytes_per_second=1000.0), price_per_kwh=0.5)
    found = report(Case(Question("request", 10, output=4), SMALL, F16, setting))
    # a kWh a second
    assert found["price"]["per_token"] == pytest.approx(0.5 * found["seconds"] / 4)
    assert found["price"]["per_million_tokens"] == pytest.approx(1e6 * found["price"]["per_token"])
    assert found["price"]["per_million_tokens_high"] == pytest.approx(2e6 * found["price"]["per_token"])
    assert found["prefill"]["price"]["per_token"] == pytest.approx(0.5 * found["prefill"]["seconds"] / 10)
    assert report(Case(Question("request", 10), SMALL, F16, SETTING))["price"] is None


def test_the_answer_of_each_kind() -> None:
    encoder = KNOWN["minilm"].shape()

    def answer(question: Question, shape: Shape) -> Cost:
        return Case(question, shape, CachePolicy(), SETTING).answer()

    assert answer(Question("decode", 50), LARGE) == decode_cost(LARGE, 50)
    assert answer(Question("request", 50, output=3), LARGE) == generation_cost(LARGE, 50, 3)
    assert answer(Question("request", 50, cached=32), LARGE).visits == 64 * 80 * sum(range(33, 51))
    assert answer(Question("encoder", 50), encoder) == encoder_cost(encoder, 50)
    assert answer(Question("training", 50, documents=3), LARGE).tokens == 150
    assert Question("training", 50, documents=3).paid_tokens == 150
    assert Question("request", 50, output=7).paid_tokens == 7


def test_a_long_context_wants_a_window() -> None:
    hint = hint_of(Question("decode", 1_000_000), LARGE, machine=Machine(bytes_per_second=1e9))
    # 4100 keys of 64 x 80; 16 x 80 rows of 256 bytes a key, one key written
    assert hint.startswith("Cheaper: --window 4096 --sinks 4 would make 21 M visits instead of 5.12 G")
    assert "take 1.34 s instead of 5.46 min, 99.6 % less" in hint


def test_where_a_window_is_in_force_smaller_rows_help() -> None:
    hint = hint_of(Question("decode", 1_000_000), LARGE, CachePolicy("f16", window=256))
    assert hint.startswith("Cheaper: --kv q8 would move 43.4 MB instead of 84.2 MB")


def test_a_wide_window_wants_half_of_it() -> None:
    policy = CachePolicy("q4", window=4096)
    hint = hint_of(Question("decode", 1_000_000), LARGE, policy, weights="q4")
    assert hint.startswith("Cheaper: --window 2048 --sinks 4 would make 10.5 M visits instead of 21 M")


def test_a_budget_is_not_to_be_replaced_by_a_window() -> None:
    hint = hint_of(Question("decode", 1_000_000), LARGE, CachePolicy("f16", budget=1024))
    assert hint.startswith("Cheaper: --kv q8 would move ")


def test_a_short_context_wants_smaller_weights() -> None:
    hint = hint_of(Question("decode", 64), KNOWN["smollm2"].shape())
    assert hint.startswith("Cheaper: --weights q8 would move ")


def test_without_bytes_visits_decide() -> None:
    hint = hint_of(Question("decode", 1_000_000), Shape(layers=80, heads=64))
    assert "visits instead of 5.12 G, 99.6 % less" in hint
    assert " s " not in hint


def test_nothing_to_propose() -> None:
    hint = hint_of(Question("decode", 10), Shape(layers=2, heads=2))
    assert hint == "Cheaper: no change that heedful would propose saves 2.0 % here."
    assert hint_of(Question("decode", 10), SMALL, CachePolicy("q4"), weights="q4") == hint


def test_encoders_and_training_want_shorter_texts() -> None:
    def quick(question: Question, shape: Shape) -> str:
        return hint_of(question, shape, CachePolicy(), machine=Machine())

    assert "--context 128 would make" in quick(Question("encoder", 256), KNOWN["minilm"].shape())
    assert "--train-length 4 --documents 6" in quick(Question("training", 8, documents=3), Shape(2, 2))
    assert "Cheaper: no change" in quick(Question("encoder", 1), Shape(2, 2, causal=False))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0105, "10.5 ms"), (1.5, "1.5 s"), (119, "119 s"), (600, "10 min"), (9000, "2.5 h"), (864_000, "10 days")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_shares_are_not_rounded_to_all() -> None:
    assert [percent(share) for share in (0.5, 0.99959, 1.0)] == ["50.0 %", "over 99.9 %", "100.0 %"]
