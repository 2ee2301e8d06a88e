"""Plans worked out by hand from the formulas of cost/, and speeds found again in figures that were made from them."""

from __future__ import annotations

import random
from math import ceil
from typing import Any

import pytest

from heedful.cost.energy import Machine
from heedful.cost.formulas import PLAIN, Shape, decode_cost, generation_cost, prefill_cost
from heedful.cost.paper import page_policy
from heedful.cost.shapes import KNOWN
from heedful.errors import BadParameter
from heedful.plan.capacity import POLICIES, CountsAt, Replica, plan
from heedful.plan.speed import Speed, assumed_speed, measured_speed
from heedful.plan.workload import Workload, block_names, first_turns, next_turn
from heedful.request import CachePolicy

SHAPE = Shape(layers=2, heads=4, kv_heads=2, head_dim=16, linear_weights=4096, head_weights=2048)
SPEED = Speed("made up", ((1, 0.004), (4, 0.01), (16, 0.022)), 2e-8, 4e-4, 1e-8, threads=3)


def test_a_plan_by_hand() -> None:
    workload = Workload(users=1000, tokens_per_user=8640, context=1000, output=100, peak=2.0)
    replica = Replica(10**9, 10**8, least_tok_s=40.0, utilization=0.5, price_per_kwh=0.25, price_per_hour=2.0)
    found = plan("q8", POLICIES["q8"], SHAPE, workload, SPEED, replica)
    whole = generation_cost(SHAPE, 1000, 100, policy=PLAIN)
    kv_bytes = (decode_cost(SHAPE, 1001, 99, PLAIN).kv_bytes_read or 0) / 99
    # 4 sequences need 10 ms and their keys and values: over 40 tokens/s each; a fifth one takes 1 ms more
    assert found.batch == 4
    assert 1 / (0.01 + 4 * kv_bytes * 2e-8) > 40 > 1 / (0.011 + 5 * kv_bytes * 2e-8)
    prompt_s = 1000 * 4e-4 + prefill_cost(SHAPE, 1000).visits * 1e-8
    seconds = prompt_s + 99 * (0.01 / 4 + kv_bytes * 2e-8)
    assert found.seconds_per_request == pytest.approx(seconds)
    assert found.peak_requests_per_second == pytest.approx(2.0)  # 86,400 requests a day, twice at the peak
    assert found.replicas == ceil(2.0 * seconds / 0.5)
    assert found.visits_per_request == whole.visits == found.dense_visits_per_request
    assert found.kv_bytes_per_sequence == 1100 * 2 * 2 * 2 * (16 + 4)  # tokens, layers, keys and values, KV heads, row
    assert found.memory_bytes == found.replicas * (10**8 + 4 * found.kv_bytes_per_sequence)
    # 4 W for each of 3 threads, 0.1 nJ a byte; weights once a prompt step of 512, and by fours while decoding
    moved = (whole.kv_bytes_read or 0) + (whole.kv_bytes_written or 0) + (2 + 99 / 4) * 10**8
    joules = 86_400 * (12 * seconds + 1e-10 * moved)
    assert found.energy_per_day.joules == pytest.approx(joules)
    assert found.price_per_day == pytest.approx(joules / 3.6e6 * 0.25 + found.replicas * 48)


def test_turns_and_prefixes_are_visits_saved() -> None:
    workload = Workload(1, 1, context=1024, output=65, turns=2, shared=256)
    assert workload.prompts == (640, 1024)
    found = plan("q8", POLICIES["q8"], SHAPE, workload, SPEED, Replica(10**9, 10**8))
    # of the first turn the 4 shared pages are there, of the second 640 tokens and the 64 that were fed back: 11 pages
    first = generation_cost(SHAPE, 640, 65, cached=256)
    second = generation_cost(SHAPE, 1024, 65, cached=704)
    assert found.visits_per_request == (first.visits + second.visits) / 2
    assert found.dense_visits_per_request == (first.dense_visits + second.dense_visits) / 2


def test_policies_cost_what_the_formulas_say() -> None:
    shape = KNOWN["smollm2"].shape()
    workload = Workload(users=10_000, tokens_per_user=10_000, context=6000, output=200)
    plans = {
        name: plan(name, policy, shape, workload, SPEED, Replica(8 << 30, 10**8), "smollm2")
        for name, policy in POLICIES.items()
    }
    assert plans["window"].replicas < plans["q8"].replicas
    assert plans["budget"].visits_per_request < plans["q8"].visits_per_request
    assert plans["q4"].kv_bytes_per_sequence < 0.6 * plans["q8"].kv_bytes_per_sequence
    assert plans["q8"].is_exact
    assert plans["q4"].quality is not None


def test_too_little_memory_is_said() -> None:
    workload = Workload(1, 1, context=10**6)
    with pytest.raises(BadParameter, match="have no room for the weights"):
        plan("q8", POLICIES["q8"], SHAPE, workload, SPEED, Replica(10**8 + 10**6, 10**8))


def test_counts_between_the_points_of_the_grid() -> None:
    counts = CountsAt(SHAPE, CachePolicy("q8", window=512, sinks=4), 5000)
    pages = CachePolicy("q8", window=512, sinks=4)
    for begin, end in ((0, 5000), (0, 512), (700, 1300), (4999, 5000)):
        whole = [prefill_cost(SHAPE, n, policy=page_policy(pages)).visits if n else 0 for n in (begin, end)]
        assert counts.prompt_visits(begin, end) == pytest.approx(whole[1] - whole[0], rel=0.02)
    for context in (1, 300, 3000, 5000):
        true = decode_cost(SHAPE, context, policy=page_policy(pages)).kv_bytes_read
        assert counts.step_kv_bytes(context) == pytest.approx(true, rel=0.03, abs=4 * 2 * 2 * 2 * 20)


def bench_of(speed: Speed) -> dict[str, Any]:
    """What `heedful bench --save` would write of a machine that is exactly so fast."""
    contexts = (64, 512, 2048)
    kv_bytes = {n: decode_cost(SHAPE, n).kv_bytes_read or 0 for n in contexts}
    cases = [
        {
            "context": n,
            "prefill_tok_s": n / speed.prompt_seconds(n, prefill_cost(SHAPE, n).visits),
            "decode_tok_s": 1 / speed.step_seconds(1, kv_bytes[n]),
        }
        for n in contexts
    ]
    batches = [
        {"sequences": n, "context": 64, "step_seconds": speed.step_seconds(n, n * kv_bytes[64])}
        for n, _ in speed.batches
    ]
    return {"model": "m", "kv_format": "q8", "threads": 3, "cases": cases, "batches": batches}


def test_a_speed_is_found_in_its_figures() -> None:
    found = measured_speed(bench_of(SPEED), SHAPE)
    assert found.seconds_per_token == pytest.approx(SPEED.seconds_per_token, rel=1e-6)
    assert found.seconds_per_visit == pytest.approx(SPEED.seconds_per_visit, rel=1e-6)
    assert found.seconds_per_kv_byte == pytest.approx(SPEED.seconds_per_kv_byte, rel=1e-6)
    for (count, seconds), (expected, true) in zip(found.batches, SPEED.batches, strict=True):
        assert (count, seconds) == (expected, pytest.approx(true, rel=1e-6))
    assert found.step_seconds(10, 0) == pytest.approx(0.016)
    assert found.step_seconds(28, 0) == pytest.approx(0.034), "beyond the largest it goes straight on"


@pytest.mark.parametrize("without", ["cases", "batches", "kv_format"])
def test_figures_that_are_not_enough(without: str) -> None:
    bench = bench_of(SPEED)
    del bench[without]
    with pytest.raises(BadParameter, match="has not what a plan needs"):
        measured_speed(bench, SHAPE)


def test_an_assumed_speed_is_the_roofline() -> None:
    speed = assumed_speed(SHAPE, "f32", Machine(bytes_per_second=1e6, flops_per_second=1e9))
    assert speed.step_seconds(1, 0) == pytest.approx(6144 * 4 / 0.7e6)
    assert speed.step_seconds(1, 7000) - speed.step_seconds(1, 0) == pytest.approx(0.01)
    assert speed.prompt_seconds(100, 0) == pytest.approx(100 * 2 * 4096 / 0.7e9)
    assert speed.prompt_seconds(0, 1000) == pytest.approx(1000 * 64 / 0.7e9)
    with pytest.raises(BadParameter, match="not known well enough"):
        assumed_speed(Shape(layers=2, heads=4), "f32", Machine())


def test_conversations() -> None:
    workload = Workload(1, 1, context=1000, output=50, turns=3, shared=100, prefixes=2)
    assert workload.prompts == (400, 700, 1000)
    drawn = list(first_turns(workload, 2000, 4.0, random.Random(0)))
    assert drawn[-1][0] == pytest.approx(500, rel=0.1)
    assert {asked.prefix for _, asked in drawn} == {0, 1}
    first = drawn[0][1]
    second = next_turn(workload, first)
    assert second is not None
    assert second.prompt == 700
    blocks = block_names(workload, first, 400, 64)
    assert block_names(workload, second, 700, 64)[:6] == blocks
    same, other = (
        next(asked for _, asked in drawn[1:] if (asked.prefix == first.prefix) is equal) for equal in (True, False)
    )
    shared = [a == b for a, b in zip(blocks, block_names(workload, same, 400, 64), strict=True)]
    assert shared == [True, False, False, False, False, False]  # 100 tokens are one whole block
    assert not set(blocks) & set(block_names(workload, other, 400, 64))
