"""Thresholds of routes from outcomes, under a bound on the rate of errors, and what they are worth on rows held out.

    report = calibrate(fitting, held_out, policy, error=0.05, margin=0.01)
    report.routes["easy -> small"].threshold, report.curve

A route may be taken where its probability is at least t. Of t some candidates are tried, which depend on the
probabilities and not on the outcomes, from the strictest down, until one fails; the last that passed is taken, for it
saves most. In a fixed order so many tests cost no certainty (Angelopoulos et al., arXiv:2110.01052): of all that the
route takes at most `error` is answered wrongly, by the bound of Clopper and Pearson.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, exp, fsum, lgamma, log, log1p
from typing import Any

import numpy as np

from heedful.decide.calibrate import error_bound
from heedful.router.choose import Choice, Chooser, Thresholds
from heedful.router.curve import Comparison, Point, compared, point_of
from heedful.router.outcomes import Labelled, served
from heedful.router.policy import CALIBRATED, Policy, Route

CERTAINTY = 0.95
CANDIDATES = 10
LEVELS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
"""Of error: one point of the curve each."""


@dataclass(frozen=True)
class RouteThreshold:
    threshold: float | None
    """None: no candidate promises the wanted error, and the route is never taken."""
    rows: int
    """Of the fitting rows, those that came to the route."""
    taken: int
    """Of those, at or above the threshold."""
    errors: int
    held_out_taken: int = 0
    held_out_errors: int = 0
    held_out_bound: float = 1.0
    """By the held-out rows the true rate of errors is at most that, with certainty .95."""


@dataclass(frozen=True)
class RouteReport:
    error: float
    margin: float
    """By how much quality may be lower and still not count as inferior."""
    routes: Mapping[str, RouteThreshold]
    rows_fitted: int
    rows_held_out: int
    rows_left_out: int
    """Held-out rows on which a target is forbidden: there is nothing to compare it with."""
    routed: Point
    baselines: Mapping[str, Point]
    """"always NAME", "random", "oracle"."""
    comparisons: Mapping[str, Comparison]
    curve: tuple[tuple[float, Point], ...]
    """(level of error, what the policy does with the thresholds of that level)"""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def calibrate(
    fitting: Sequence[Labelled], held_out: Sequence[Labelled], policy: Policy, *, error: float, margin: float
) -> RouteReport:
    """Thresholds from the one set, everything else from the other."""
    routes = fit_routes(fitting, policy, error)
    chosen = Thresholds({name: one.threshold for name, one in routes.items()})
    comparable = [one for one in held_out if not one.forbidden]
    choices = replay(comparable, policy, chosen)
    routed = point_of(comparable, choices, policy)
    baselines, comparisons = compared(comparable, choices, policy, list(policy.targets), margin=margin)
    curve = []
    for level in LEVELS:
        found = fit_routes(fitting, policy, level)
        at_level = Thresholds({name: one.threshold for name, one in found.items()})
        curve.append((level, point_of(comparable, replay(comparable, policy, at_level), policy)))
    return RouteReport(
        error=error,
        margin=margin,
        routes={name: _checked(held_out, policy, name, one, chosen) for name, one in routes.items()},
        rows_fitted=len(fitting),
        rows_held_out=len(comparable),
        rows_left_out=len(held_out) - len(comparable),
        routed=routed,
        baselines=baselines,
        comparisons=comparisons,
        curve=tuple(curve),
    )


def fit_routes(rows: Sequence[Labelled], policy: Policy, error: float) -> dict[str, RouteThreshold]:
    """Route by route, in the policy's order: later ones get what earlier ones have left."""
    fitted: dict[str, RouteThreshold] = {}
    for route in policy.routes:
        if route.min_p != CALIBRATED or route.name in fitted:
            continue
        open_wide = {name: one.threshold for name, one in fitted.items()} | {route.name: 0.0}
        mine = _rows_of(rows, policy, route, Thresholds(open_wide))
        fitted[route.name] = _fitted(mine, error)
    return fitted


def _rows_of(
    rows: Sequence[Labelled], policy: Policy, route: Route, thresholds: Thresholds
) -> list[tuple[float, bool]]:
    """(probability, whether the answer is right) of the rows that this route would take."""
    cause = f"route {policy.routes.index(route) + 1}"
    found = []
    for row, choice in zip(rows, replay(rows, policy, thresholds), strict=True):
        if choice.cause == cause and choice.p is not None and route.to in row.outcomes:
            found.append((choice.p, served(row, route.to, policy).is_right))
    return found


def _fitted(rows: Sequence[tuple[float, bool]], error: float) -> RouteThreshold:
    threshold = bounded_threshold([p for p, _ in rows], [right for _, right in rows], error=error)
    taken = [right for p, right in rows if threshold is not None and p >= threshold]
    return RouteThreshold(threshold, len(rows), len(taken), len(taken) - sum(taken))


def bounded_threshold(
    probabilities: Sequence[float],
    right: Sequence[bool],
    *,
    error: float,
    certainty: float = CERTAINTY,
    candidates: int = CANDIDATES,
) -> float | None:
    """The lowest candidate down to which, with this certainty, at most `error` is wrong; None if none.

    Candidates are the probabilities of the rows at even ranks, from the fewest rows that could pass to all of them.
    """
    assert len(probabilities) == len(right), (len(probabilities), len(right))
    fewest = ceil(log(1 - certainty) / log(1 - error))
    if len(right) < fewest:
        return None
    order = sorted(probabilities, reverse=True)
    found = None
    for rank in sorted({round(rank) for rank in np.linspace(fewest, len(right), candidates)}):
        threshold = order[rank - 1]
        taken = [is_right for p, is_right in zip(probabilities, right, strict=True) if p >= threshold]
        if chance_of_at_most(len(taken) - sum(taken), len(taken), error) > 1 - certainty:
            break
        found = threshold  # error_bound(…) <= error, without looking for the bound
    return found


def chance_of_at_most(errors: int, answers: int, rate: float) -> float:
    """That a binomial count is so low, for a rate between 0 and 1."""
    whole = lgamma(answers + 1)
    terms = (whole - lgamma(k + 1) - lgamma(answers - k + 1) for k in range(errors + 1))
    return fsum(exp(term + k * log(rate) + (answers - k) * log1p(-rate)) for k, term in enumerate(terms))


def replay(rows: Sequence[Labelled], policy: Policy, thresholds: Thresholds) -> list[Choice]:
    """Where each row would go, by what the decider has said of it."""
    chooser = Chooser(policy, None, thresholds)
    return [chooser.choose_given(row.row.asked, row.signals, row.answers) for row in rows]


def _checked(
    rows: Sequence[Labelled], policy: Policy, name: str, fitted: RouteThreshold, thresholds: Thresholds
) -> RouteThreshold:
    """With what the held-out rows say of it."""
    route = next(one for one in policy.routes if one.name == name)
    taken = [right for _, right in _rows_of(rows, policy, route, thresholds)]
    errors = len(taken) - sum(taken)
    bound = error_bound(errors, len(taken)) if taken else 1.0
    return RouteThreshold(fitted.threshold, fitted.rows, fitted.taken, fitted.errors, len(taken), errors, bound)
