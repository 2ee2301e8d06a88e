"""Quality and cost of ways to route the same rows, with bootstrap intervals; savings only where quality is kept.

Differences are paired: the same rows, resampled together. Quality is the share of right answers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from heedful.router.choose import Choice
from heedful.router.outcomes import COSTS, Labelled, Outcome, served
from heedful.router.policy import Policy

RESAMPLES = 2_000
SEED = 1

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A mean, and where 95 % of resampled means lie."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Point:
    rows: int
    quality: Interval
    cost: Mapping[str, Interval | None]
    """By COSTS, a row; None where somebody does not say."""
    shares: Mapping[str, float]
    """Target → of how many rows."""


@dataclass(frozen=True)
class Comparison:
    """The routed rows less the same rows under a baseline."""

    quality: Interval
    is_non_inferior: bool
    """The lower end of the interval is not below −margin: only then the costs' differences are savings."""
    saved: Mapping[str, Interval | None]
    """By COSTS, a row: baseline less routed."""


def point_of(rows: Sequence[Labelled], choices: Sequence[Choice], policy: Policy) -> Point:
    """`choices`: one a row. What the decider cost is in it, where it was asked; so are answers that were not taken."""
    quality, costs = _routed(rows, choices, policy)
    targets = [choice.target for choice in choices]
    shares = {name: targets.count(name) / len(targets) for name in dict.fromkeys(targets)} if targets else {}
    return Point(len(rows), interval(quality), _intervals(costs), shares)


def compared(
    rows: Sequence[Labelled], choices: Sequence[Choice], policy: Policy, names: Sequence[str], *, margin: float
) -> tuple[dict[str, Point], dict[str, Comparison]]:
    """Baselines by name, and the routed rows against each. `names`: of all targets, the cheapest first."""
    routed = _routed(rows, choices, policy)
    targets = [choice.target for choice in choices]
    shares = {name: targets.count(name) / max(1, len(targets)) for name in names}
    columns = {f"always {name}": _columns([row.outcomes[name] for row in rows]) for name in names}
    columns["random"] = _mixed([columns[f"always {name}"] for name in names], [shares[name] for name in names])
    best = [oracle(row, names) for row in rows]
    columns["oracle"] = _columns([row.outcomes[name] for row, name in zip(rows, best, strict=True)])
    of_baseline = {f"always {name}": {name: 1.0} for name in names} | {"random": shares}
    of_baseline["oracle"] = {name: best.count(name) / max(1, len(best)) for name in names}
    points = {
        name: Point(len(rows), interval(quality), _intervals(costs), of_baseline[name])
        for name, (quality, costs) in columns.items()
    }
    return points, {name: _comparison(routed, one, margin) for name, one in columns.items()}


def oracle(row: Labelled, names: Sequence[str]) -> str:
    """The cheapest target that is right, by joules where all say them, else by seconds; the cheapest where none is."""
    right = [name for name in names if row.outcomes[name].is_right] or list(names)

    def cost(name: str) -> float:
        known = all(row.outcomes[one].cost["joules"] is not None for one in names)
        return float(row.outcomes[name].cost["joules" if known else "seconds"] or 0.0)

    return min(right, key=cost)


def interval(values: Floats) -> Interval:
    """By percentiles of resampled means; of no rows, all unknown as 0."""
    if not len(values):
        return Interval(0.0, 0.0, 0.0)
    means = _resampled(len(values)) @ values
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(values.mean()), float(low), float(high))


@functools.lru_cache(maxsize=4)
def _resampled(rows: int) -> Floats:
    """(RESAMPLES, rows): each row's share in each resample."""
    counts = np.random.default_rng(SEED).multinomial(rows, np.full(rows, 1 / rows), RESAMPLES)
    return counts / np.float64(rows)


Columns = tuple[Floats, Mapping[str, Floats | None]]
"""(right or not, cost by COSTS), a row each."""


def _routed(rows: Sequence[Labelled], choices: Sequence[Choice], policy: Policy) -> Columns:
    pairs = list(zip(rows, choices, strict=True))
    routers = [row.router if choice.answers else None for row, choice in pairs]
    return _columns([served(row, choice.target, policy) for row, choice in pairs], routers)


def _columns(
    outcomes: Sequence[Outcome], routers: Sequence[Mapping[str, float | None] | None] | None = None
) -> Columns:
    """`outcomes`: one a row; `routers`: what asking the decider cost, one a row; None: it was not asked."""
    quality = np.array([one.is_right for one in outcomes], dtype=np.float64)
    asking = routers or [None] * len(outcomes)
    return quality, {name: _column(name, outcomes, asking) for name in COSTS}


def _column(name: str, outcomes: Sequence[Outcome], routers: Sequence[Mapping[str, Any] | None]) -> Floats | None:
    found = []
    for outcome, router in zip(outcomes, routers, strict=True):
        mine, asking = outcome.cost[name], 0.0 if router is None else router[name]
        if mine is None or asking is None:
            return None
        found.append(mine + asking)
    return np.array(found, dtype=np.float64)


def _mixed(columns: Sequence[Columns], shares: Sequence[float]) -> Columns:
    """What each row costs on average where its target is drawn."""
    quality = np.sum([share * one for share, (one, _) in zip(shares, columns, strict=True)], axis=0)
    costs: dict[str, Floats | None] = {}
    for name in COSTS:
        parts = [(share, costs_of[name]) for share, (_, costs_of) in zip(shares, columns, strict=True) if share]
        known = [share * part for share, part in parts if part is not None]
        costs[name] = np.sum(known, axis=0) if len(known) == len(parts) and known else None
    return np.asarray(quality, dtype=np.float64), costs


def _comparison(routed: Columns, baseline: Columns, margin: float) -> Comparison:
    quality = interval(routed[0] - baseline[0])
    saved = {}
    for name in COSTS:
        mine, theirs = routed[1][name], baseline[1][name]
        saved[name] = None if mine is None or theirs is None else interval(theirs - mine)
    return Comparison(quality, bool(len(routed[0])) and quality.low >= -margin, saved)


def _intervals(costs: Mapping[str, Floats | None]) -> dict[str, Interval | None]:
    return {name: None if values is None else interval(values) for name, values in costs.items()}
