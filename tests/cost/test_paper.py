"""Estimates worked out by hand, and which change the hint proposes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heedful.cost.energy import Machine
from heedful.cost.formulas import Shape, decode_cost, encoder_cost, prefill_cost
from heedful.cost.paper import Question, Setting, cheaper, dram_bytes, duration, estimate, percent, report
from heedful.cost.shapes import KNOWN

SLOW = Machine(bytes_per_second=1000.0, flops_per_second=1e15)
"""Memory decides."""
SETTING = Setting("f16", "f32", SLOW)
LARGE = Shape(layers=80, heads=64, kv_heads=8, head_dim=128)
SMALL = Shape(layers=1, heads=2, kv_heads=1, head_dim=32, linear_weights=320, head_weights=64)


def test_bytes_are_rows_read_and_written_and_weights() -> None:
    # 10 keys and values read, one of each written, at 64 bytes; 384 weights of 4 bytes
    assert dram_bytes(decode_cost(SMALL, 10), SETTING) == (20 + 2) * 64 + 384 * 4
    # int8 rows of 36 bytes; 34 bytes for 32 weights
    assert dram_bytes(decode_cost(SMALL, 10), Setting("q8", "q8", SLOW)) == (20 + 2) * 36 + 384 * 34 // 32


def test_seconds_of_memory_and_of_arithmetic() -> None:
    cost = decode_cost(SMALL, 10)
    by_memory = estimate([cost], SETTING)
    assert by_memory is not None
    assert by_memory.seconds == pytest.approx(2.944)
    by_arithmetic = estimate([cost], replace(SETTING, machine=Machine(bytes_per_second=1e15, flops_per_second=100.0)))
    assert by_arithmetic is not None
    assert by_arithmetic.seconds == pytest.approx((2 * 384 + 20 * 4 * 32) / 100)
    assert by_arithmetic.covers == "attention and weights"


def test_without_weights_only_attention_is_covered() -> None:
    machine = Machine(bytes_per_second=32.768e9, flops_per_second=1e12)
    found = estimate([decode_cost(LARGE, 1_000_000)], Setting("f16", "f32", machine))
    assert found is not None
    assert found.covers == "attention"
    assert found.seconds == pytest.approx(10, rel=1e-5)  # 327.68 GB, and one row of each kind written
    assert estimate([decode_cost(replace(LARGE, kv_heads=None), 10)], SETTING) is None


def test_a_request_takes_its_prefill_and_then_its_decoding() -> None:
    machine = Machine(bytes_per_second=1000.0, flops_per_second=3000.0)
    setting = replace(SETTING, machine=machine)
    found = report(Question("request", 100, output=20), SMALL, setting)
    assert found["seconds"] == pytest.approx(found["prefill"]["seconds"] + found["decode"]["seconds"])
    assert found["visits"] == found["prefill"]["visits"] + found["decode"]["visits"]
    # arithmetic decides one and memory the other, so the sum is more than the roofline of the sums
    assert found["prefill"]["seconds"] == pytest.approx((2 * (100 * 320 + 64) + 5050 * 2 * 128) / 3000)
    keys_read = sum(range(101, 120))
    assert found["decode"]["seconds"] == pytest.approx((2 * (keys_read + 19) * 64 + 19 * 384 * 4) / 1000)


def test_price() -> None:
    setting = replace(SETTING, machine=Machine(watts=3.6e6, bytes_per_second=1000.0), price_per_kwh=0.5)
    found = report(Question("request", 10, output=4), SMALL, setting)
    # a kWh a second
    assert found["price"]["per_token"] == pytest.approx(0.5 * found["seconds"] / 4)
    assert found["price"]["per_million_tokens"] == pytest.approx(1e6 * found["price"]["per_token"])
    assert found["price"]["per_million_tokens_high"] == pytest.approx(2e6 * found["price"]["per_token"])
    assert found["prefill"]["price"]["per_token"] == pytest.approx(0.5 * found["prefill"]["seconds"] / 10)
    assert report(Question("request", 10), SMALL, SETTING)["price"] is None


def test_the_answer_of_each_kind() -> None:
    encoder = KNOWN["minilm"].shape()
    assert Question("decode", 50).answer(LARGE) == decode_cost(LARGE, 50)
    assert Question("request", 50).answer(LARGE).visits == prefill_cost(LARGE, 50).visits
    assert Question("encoder", 50).answer(encoder) == encoder_cost(encoder, 50)
    assert Question("training", 50, documents=3).answer(LARGE).tokens == 150
    assert Question("training", 50, documents=3).paid_tokens == 150
    assert Question("request", 50, output=7).paid_tokens == 7


def test_a_long_context_wants_a_window() -> None:
    hint = cheaper(Question("decode", 1_000_000), LARGE, Setting("f16", "f32", Machine(bytes_per_second=1e9)))
    # 4100 keys of 64 x 80; 16 x 80 rows of 256 bytes a key, one key written
    assert hint.startswith("Cheaper: --window 4096 --sinks 4 would make 21 M visits instead of 5.12 G")
    assert "take 1.34 s instead of 5.46 min, 99.6 % less" in hint


def test_where_a_window_is_in_force_smaller_rows_help() -> None:
    hint = cheaper(Question("decode", 1_000_000), LARGE.with_policy(256), Setting("f16", "f32", SLOW))
    assert hint.startswith("Cheaper: --kv q8 would move 43.4 MB instead of 84.2 MB")


def test_a_wide_window_wants_half_of_it() -> None:
    hint = cheaper(Question("decode", 1_000_000), LARGE.with_policy(4096), Setting("q4", "q4", SLOW))
    assert hint.startswith("Cheaper: --window 2048 --sinks 4 would make 10.5 M visits instead of 21 M")


def test_a_short_context_wants_smaller_weights() -> None:
    hint = cheaper(Question("decode", 64), KNOWN["smollm2"].shape(), SETTING)
    assert hint.startswith("Cheaper: --weights q8 would move ")


def test_without_bytes_visits_decide() -> None:
    hint = cheaper(Question("decode", 1_000_000), Shape(layers=80, heads=64), SETTING)
    assert "visits instead of 5.12 G, 99.6 % less" in hint
    assert " s " not in hint


def test_nothing_to_propose() -> None:
    hint = cheaper(Question("decode", 10), Shape(layers=2, heads=2), SETTING)
    assert hint == "Cheaper: no change that heedful would propose saves 2.0 % here."
    assert cheaper(Question("decode", 10), SMALL, Setting("q4", "q4", SLOW)) == hint


def test_encoders_and_training_want_shorter_texts() -> None:
    quick = replace(SETTING, machine=Machine())
    assert "--context 128 would make" in cheaper(Question("encoder", 256), KNOWN["minilm"].shape(), quick)
    assert "--train-length 4 --documents 6" in cheaper(Question("training", 8, documents=3), Shape(2, 2), quick)
    assert "Cheaper: no change" in cheaper(Question("encoder", 1), Shape(2, 2, causal=False), quick)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0105, "10.5 ms"), (1.5, "1.5 s"), (119, "119 s"), (600, "10 min"), (9000, "2.5 h"), (864_000, "10 days")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_shares_are_not_rounded_to_all() -> None:
    assert [percent(share) for share in (0.5, 0.99959, 1.0)] == ["50.0 %", "over 99.9 %", "100.0 %"]
