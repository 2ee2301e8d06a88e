"""How many replicas a workload needs under a policy, and what that costs: the exact counts of cost/ times a speed.

Every request is taken to find what it shares with earlier ones (simulate.py says whether it does).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from heedful.cache.policy import PAGE_LEN
from heedful.cost.energy import JOULES_PER_KWH, Energy, estimate_energy
from heedful.cost.formulas import Cost, Shape, decode_cost, prefill_cost
from heedful.cost.paper import page_policy
from heedful.cost.quality import measured_quality
from heedful.engine.scheduler import MOST_RUNNING
from heedful.errors import BadParameter
from heedful.plan.speed import Speed
from heedful.plan.workload import DAY_S, Workload
from heedful.request import CachePolicy

POLICIES: Mapping[str, CachePolicy] = {
    "q8": CachePolicy("q8"),
    "q4": CachePolicy("q4"),
    "window": CachePolicy("q8", window=1024, sinks=4),
    "budget": CachePolicy("q8", budget=1024),
    "sparse": CachePolicy("q8", sparse_prefill=True),
}
"""Those that are compared. q8: exact attention over 8-bit keys and values; the others change the output."""
_GRID = 256


@dataclass(frozen=True)
class Replica:
    """One machine, or a part of one, with the model in its memory."""

    memory_bytes: int
    weight_bytes: int
    least_tok_s: float = 5.0
    """Tokens a second that each answer is to have at least while it is written."""
    utilization: float = 0.7
    """Of its capacity, at the peak; the rest is what keeps waiting short."""
    watts: float | None = None
    """While busy; None: estimated from its threads and bytes."""
    price_per_kwh: float | None = None
    price_per_hour: float | None = None


class CountsAt:
    """Counts of one policy by position, for the simulation: worked out at some hundred positions, straight between."""

    def __init__(self, shape: Shape, policy: CachePolicy, longest: int) -> None:
        pages = page_policy(policy)
        step = max(1, longest // _GRID)
        self._at = [*range(1, longest, step), longest]
        self._visits = [prefill_cost(shape, n, policy=pages).visits for n in self._at]
        self._kv_bytes = [(decode_cost(shape, n, 4, pages).kv_bytes_read or 0) / 4 for n in self._at]  # 4: choose once

    def prompt_visits(self, begin: int, end: int) -> float:
        """Of the prompt's tokens [begin, end)."""
        return self._between(self._visits, end) - self._between(self._visits, begin) if end > begin else 0.0

    def step_kv_bytes(self, context: int) -> float:
        """Read by one decoded token that attends to so many."""
        return self._between(self._kv_bytes, context)

    def _between(self, values: list[Any], n: int) -> float:
        if n <= 0:
            return 0.0
        i = min(max(bisect_right(self._at, n), 1), len(self._at) - 1) if len(self._at) > 1 else 0
        if i == 0:
            return float(values[0])
        x0, x1 = self._at[i - 1], self._at[i]
        return float(values[i - 1] + (values[i] - values[i - 1]) * (n - x0) / (x1 - x0))


@dataclass(frozen=True)
class Plan:
    """One policy. Days are days of the workload, seconds those of its busiest hour where `peak` is in the name."""

    policy: str
    replicas: int
    batch: int
    """Sequences that a replica decodes together where it is full."""
    seconds_per_request: float
    """Of a full replica's time."""
    peak_requests_per_second: float
    memory_bytes: int
    """Of all replicas: weights, and keys and values of full batches."""
    kv_bytes_per_sequence: int
    """At the end of the longest."""
    kept_tokens: int
    """That a replica can keep for later prompts, beside a full batch."""
    visits_per_request: float
    dense_visits_per_request: float
    peak_visits_per_second: float
    energy_per_day: Energy
    price_per_day: float | None
    quality: Mapping[str, Any] | None
    """Measured loss; None: nothing is lost, or nothing was measured (`is_exact` tells)."""
    is_exact: bool
    speed: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan(
    name: str, policy: CachePolicy, shape: Shape, workload: Workload, speed: Speed, replica: Replica, model: str = ""
) -> Plan:
    """Raises BadParameter where a replica has too little memory for one sequence."""
    costs = [_turn(shape, policy, workload, turn) for turn in range(workload.turns)]
    longest = workload.context + workload.output
    held = decode_cost(shape, longest, policy=page_policy(policy)).kv_bytes_held
    assert held is not None, shape
    batch = _batch(held, replica, lambda n: speed.step_seconds(n, n * _mean_kv_bytes(costs)))
    prompt_s = sum(speed.prompt_seconds(prefill.tokens, prefill.visits) for prefill, _ in costs) / len(costs)
    step_s = speed.step_seconds(batch, batch * _mean_kv_bytes(costs))
    seconds = prompt_s + (workload.output - 1) * step_s / batch
    rate = workload.peak_requests_per_second
    replicas = max(1, ceil(rate * seconds / replica.utilization))
    visits, dense = (
        sum(getattr(p, what) + getattr(d, what) for p, d in costs) / len(costs) for what in ("visits", "dense_visits")
    )
    energy = _energy(costs, workload, speed, replica, seconds, batch)
    room = replica.memory_bytes - replica.weight_bytes - batch * held
    quality = measured_quality(model, policy) if model else None
    return Plan(
        policy=name,
        replicas=replicas,
        batch=batch,
        seconds_per_request=seconds,
        peak_requests_per_second=rate,
        memory_bytes=replicas * (replica.weight_bytes + batch * held),
        kv_bytes_per_sequence=held,
        kept_tokens=int(room * longest / held) // PAGE_LEN * PAGE_LEN,
        visits_per_request=visits,
        dense_visits_per_request=dense,
        peak_visits_per_second=rate * visits,
        energy_per_day=energy,
        price_per_day=_price(energy, replicas, replica),
        quality=None if quality is None else asdict(quality),
        is_exact=policy == POLICIES["q8"],
        speed=speed.source,
    )


def cached_tokens(workload: Workload, turn: int) -> int:
    """Whole pages of a turn's prompt that are there already, where the conversation's replica still has them."""
    known = min(workload.known_before(turn), workload.prompts[turn] - 1)
    return known // PAGE_LEN * PAGE_LEN


def _turn(shape: Shape, policy: CachePolicy, workload: Workload, turn: int) -> tuple[Cost, Cost]:
    prompt, pages = workload.prompts[turn], page_policy(policy)
    prefill = prefill_cost(shape, prompt, cached_tokens(workload, turn), pages)
    return prefill, decode_cost(shape, prompt + 1, workload.output - 1, pages)


def _mean_kv_bytes(costs: list[tuple[Cost, Cost]]) -> float:
    """Of a decoded token."""
    steps = sum(decode.tokens for _, decode in costs)
    return sum(decode.kv_bytes_read or 0 for _, decode in costs) / steps if steps else 0.0


def _batch(held: int, replica: Replica, step_seconds: Callable[[int], float]) -> int:
    room = replica.memory_bytes - replica.weight_bytes
    if room < held:
        has, weights, needs = (f"{size / 1e9:,.3g} GB" for size in (replica.memory_bytes, replica.weight_bytes, held))
        what = f"{has} have no room for the weights ({weights}) and a sequence ({needs})"
        raise BadParameter("--memory", what, "Give more, or a smaller --context.")
    fits = [n for n in range(1, min(MOST_RUNNING, room // held) + 1) if step_seconds(n) * replica.least_tok_s <= 1]
    return max(fits, default=1)


def _energy(
    costs: list[tuple[Cost, Cost]], workload: Workload, speed: Speed, replica: Replica, seconds: float, batch: int
) -> Energy:
    """Of a day. Bytes: keys and values, and weights once a step of `batch` sequences; busy threads."""
    kv_bytes = sum((c.kv_bytes_read or 0) + (c.kv_bytes_written or 0) for pair in costs for c in pair) / len(costs)
    passes = sum(p.linear_passes + d.linear_passes / batch for p, d in costs) / len(costs)
    moved = kv_bytes + passes * replica.weight_bytes
    of_one = estimate_energy(speed.threads * seconds, moved)
    if replica.watts is not None:
        joules = replica.watts * seconds
        of_one = Energy(joules, joules, joules, of_one.source)
    day = workload.requests_per_day
    return Energy(day * of_one.joules, day * of_one.low, day * of_one.high, of_one.source)


def _price(energy: Energy, replicas: int, replica: Replica) -> float | None:
    """In the currency of the prices given, those not given left out."""
    if replica.price_per_kwh is None and replica.price_per_hour is None:
        return None
    electricity = energy.joules / JOULES_PER_KWH * (replica.price_per_kwh or 0.0)
    return electricity + replicas * DAY_S / 3600 * (replica.price_per_hour or 0.0)
