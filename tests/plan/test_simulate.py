"""The simulation, held to queueing theory, to one that does every step by itself, and to what prefixes can give."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from heedful.cost.formulas import Shape, decode_cost, prefill_cost
from heedful.plan.capacity import CountsAt
from heedful.plan.simulate import COOL_SHARE, WARM_SHARE, Fleet, Simulated, simulate
from heedful.plan.speed import Speed
from heedful.plan.workload import Workload, first_turns
from heedful.request import CachePolicy

SHAPE = Shape(layers=2, heads=4, kv_heads=2, head_dim=16, linear_weights=4096, head_weights=2048)
Q8 = CachePolicy("q8")
ONE_SECOND_A_PROMPT = Speed("made up", ((1, 1e-9),), 0.0, 1 / 512, 0.0)


def run(workload: Workload, fleet: Fleet, speed: Speed, requests: int, per_second: float, seed: int = 0) -> Simulated:
    counts = CountsAt(SHAPE, Q8, workload.context + workload.output)
    return simulate(workload, fleet, speed, counts, requests=requests, per_second=per_second, seed=seed)


@pytest.mark.parametrize("busy", [0.3, 0.7])
def test_a_queue_is_what_theory_says(busy: float) -> None:
    """M/D/1: Poisson arrivals, a service of one second, one server: mean wait = ρ / (2 (1 - ρ))."""
    workload = Workload(users=1, tokens_per_user=1, context=512, output=1)
    found = run(workload, Fleet(1, 100_000), ONE_SECOND_A_PROMPT, 30_000, busy)
    assert found.first_token_mean == pytest.approx(1 + busy / (2 * (1 - busy)), rel=0.08)
    assert found.busy_share == pytest.approx(busy, rel=0.03)
    assert found.cached_share == 0


def step_by_step(workload: Workload, speed: Speed, arrivals: list[float]) -> list[tuple[float, float]]:
    """(first token, end) of each request on one replica without a cache: every step computed by itself."""
    now, waiting, running, came = 0.0, list(range(len(arrivals))), [], dict[int, list[float]]()
    missing = dict.fromkeys(waiting, workload.context)
    left = dict.fromkeys(waiting, workload.output)
    while waiting or running:
        if not running:
            now = max(now, arrivals[waiting[0]])
        while waiting and arrivals[waiting[0]] <= now:
            running.append(waiting.pop(0))
        decoding = [i for i in running if not missing[i]]
        budget = 128 if decoding else 512
        kv_bytes = [
            decode_cost(SHAPE, workload.context + 1 + workload.output - 1 - left[i]).kv_bytes_read or 0
            for i in decoding
        ]
        seconds = speed.batch_seconds(len(decoding)) + sum(kv_bytes) * speed.seconds_per_kv_byte if decoding else 0.0
        for i in running:
            read = min(budget, missing[i]) if i not in decoding else 0
            if read:
                begin = workload.context - missing[i]
                visits = prefill_cost(SHAPE, begin + read).visits - (prefill_cost(SHAPE, begin).visits if begin else 0)
                seconds += read * speed.seconds_per_token + visits * speed.seconds_per_visit
                missing[i] -= read
                budget -= read
        now += seconds
        for i in list(running):
            if i in decoding or not missing[i]:
                left[i] -= 1
                came.setdefault(i, []).append(now)
            if not left[i]:
                running.remove(i)
    return [(came[i][0], came[i][-1]) for i in range(len(arrivals))]


@pytest.mark.parametrize("per_second", [0.5, 3.0, 20.0])
def test_many_steps_at_once_are_as_one_by_one(per_second: float) -> None:
    workload = Workload(users=1, tokens_per_user=1, context=700, output=30)
    speed = Speed("made up", ((1, 0.004), (4, 0.006), (64, 0.05)), 2e-8, 4e-4, 1e-8)
    found = run(workload, Fleet(1, 10**9), speed, 80, per_second, seed=3)
    arrivals = [at for at, _ in first_turns(workload, 80, per_second, random.Random(3))]
    true = step_by_step(workload, speed, arrivals)
    measured = [i for i, at in enumerate(arrivals) if WARM_SHARE <= at / arrivals[-1] <= 1 - COOL_SHARE]
    first, total = ([true[i][k] - arrivals[i] for i in measured] for k in (0, 1))
    assert found.requests == len(measured)
    assert found.first_token_mean == pytest.approx(sum(first) / len(first), rel=0.02)
    assert found.total_p50 == pytest.approx(sorted(total)[len(total) // 2], rel=0.03)


def test_affinity_finds_what_chance_does_not() -> None:
    """40 system prompts, 10 replicas: by chance a prompt is where it was sent before one time in ten at first."""
    workload = Workload(1, 1, context=2048, output=20, shared=1536, prefixes=40)
    speed = replace(ONE_SECOND_A_PROMPT, seconds_per_token=1e-4, batches=((1, 0.004), (64, 0.02)))
    fleet = Fleet(10, kv_tokens=12 * 2048)  # room for a few of them
    by_affinity, by_chance = (
        run(workload, replace(fleet, routing=how), speed, 4000, 20.0) for how in ("affinity", "random")
    )  # type: ignore[arg-type]
    assert by_affinity.reachable_share == by_chance.reachable_share == pytest.approx(1536 / 2048)
    assert by_affinity.hit_share > 0.9
    assert by_chance.hit_share < 0.5
    assert by_affinity.first_token_mean < by_chance.first_token_mean


def test_conversations_stay_where_they_are() -> None:
    workload = Workload(1, 1, context=4096, output=64, turns=8, think_s=1.0)
    speed = replace(ONE_SECOND_A_PROMPT, seconds_per_token=1e-4, batches=((1, 0.004), (64, 0.02)))
    found = run(workload, Fleet(5, 10**6), speed, 1600, 5.0)
    assert found.hit_share > 0.95
    assert found.reachable_share > 0.6  # of the 512 tokens a turn brings, 63 are the answer before, and there already


def test_a_seed_says_all() -> None:
    workload = Workload(1, 1, context=900, output=40, shared=300, prefixes=3)
    speed = Speed("made up", ((1, 0.004), (64, 0.05)), 2e-8, 4e-4, 1e-8)
    one, again, other = (run(workload, Fleet(4, 50_000), speed, 300, 5.0, seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other
