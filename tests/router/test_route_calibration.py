"""Thresholds keep their promise on data whose truth is known; savings are claimed only where quality is kept."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.router.policies import policy_of

from heedful.decide.answer import NoulAnswer
from heedful.errors import BadParameter, PolicyError
from heedful.router.calibrate import RouteReport, bounded_threshold, calibrate, fit_routes
from heedful.router.choose import Thresholds
from heedful.router.curve import interval, oracle
from heedful.router.outcomes import COSTS, Labelled, Outcome, Row, row_from_json, served
from heedful.router.policy import Policy
from heedful.router.signals import Asked, signals_of
from heedful.router.thresholds import thresholds_of, write_calibration
from heedful.router.verify import Exact, check_from_json

POLICY = """\
version: 1
targets:
  small: {kind: local, model: s}
  big: {kind: local, model: b}
decision: {questions: {easy: "Is it easy?"}, calibration: cal.json}
routes:
  - {to: small, when: p_easy >= 0.0, min_p: calibrated}
default: big
"""


def cost(amount: float | None) -> dict[str, float | None]:
    return dict.fromkeys(COSTS, amount)


def rows(
    draw: random.Random, count: int, *, skill: float = 1.0, big_right: float = 1.0, big_cost: float | None = 10.0
) -> list[Labelled]:
    """Small is right with a chance that rises with p: what a decider with some skill would see."""
    found = []
    for number in range(count):
        p = draw.uniform(0.5, 1.0)
        chance = 1 - skill * wrong_at(p)
        asked = Asked.of_text(f"row {number} of {draw.random()}")
        outcomes = {
            "small": Outcome(draw.random() < chance, cost(1.0)),
            "big": Outcome(draw.random() < big_right, cost(big_cost)),
        }
        row = Row(asked, Exact(("x",)))
        found.append(Labelled(row, signals_of(asked), (), {"easy": NoulAnswer(p)}, cost(0.1), outcomes))
    return found


def wrong_at(p: float) -> float:
    """The truth: the chance that small is wrong."""
    return 4.8 * (1 - p) ** 3


def true_error(threshold: float) -> float:
    """Of all p at or above it, which are uniform: the mean chance to be wrong, in closed form."""
    return 1.2 * (1 - threshold) ** 3


@pytest.mark.parametrize("error", [0.05, 0.1])
def test_the_promise_holds_on_the_truth(error: float) -> None:
    """Of 300 calibrations at most 5 % may break it; more than 9 % of them by chance once in a thousand times."""
    broken, found = 0, 0
    for seed in range(300):
        draw = random.Random(seed)
        p = [draw.uniform(0.5, 1.0) for _ in range(250)]
        right = [draw.random() >= wrong_at(one) for one in p]
        threshold = bounded_threshold(p, right, error=error)
        if threshold is not None:
            found += 1
            broken += true_error(threshold) > error
    assert found > 150
    assert broken / 300 <= 0.09


def test_few_rows_or_many_errors_promise_nothing() -> None:
    assert bounded_threshold([0.9] * 58, [True] * 58, error=0.05) is None
    assert bounded_threshold([0.9] * 59, [True] * 59, error=0.05) == 0.9  # 0 of 59: at most 5 %
    assert bounded_threshold([0.9] * 59, [True] * 58 + [False], error=0.05) is None
    assert bounded_threshold([0.9] * 400, [False] * 400, error=0.05) is None
    assert bounded_threshold([], [], error=0.05) is None


def run(fitting: Sequence[Labelled], held: Sequence[Labelled], policy: Policy, *, error: float = 0.1) -> RouteReport:
    return calibrate(fitting, held, policy, error=error, margin=0.02)


def test_a_report_by_hand(tmp_path: Path) -> None:
    """Everything is right above .8 and wrong below it: the numbers follow by counting."""
    policy = policy_of(tmp_path, POLICY)

    def made(count: int, begin: int) -> list[Labelled]:
        found = []
        for number in range(begin, begin + count):
            p = 0.9 if number % 2 else 0.6
            asked = Asked.of_text(f"row {number}")
            outcomes = {"small": Outcome(p > 0.8, cost(1.0)), "big": Outcome(True, cost(10.0))}
            row = Row(asked, Exact(("x",)))
            found.append(Labelled(row, signals_of(asked), (), {"easy": NoulAnswer(p)}, cost(0.5), outcomes))
        return found

    report = run(made(300, 0), made(100, 1000), policy)
    (route,) = report.routes.values()
    assert (route.threshold, route.rows, route.taken, route.errors) == (0.9, 300, 150, 0)
    assert (route.held_out_taken, route.held_out_errors) == (50, 0)
    assert report.routed.quality.mean == 1.0
    joules = report.routed.cost["joules"]
    assert joules is not None
    assert joules.mean == pytest.approx((1 + 10) / 2 + 0.5)
    assert report.routed.shares == {"small": 0.5, "big": 0.5}
    assert report.baselines["always small"].quality.mean == 0.5
    assert report.baselines["random"].quality.mean == pytest.approx(0.75)
    assert report.baselines["oracle"].quality.mean == 1.0
    against_big = report.comparisons["always big"]
    assert against_big.is_non_inferior
    saved = against_big.saved["joules"]
    assert saved is not None
    assert saved.mean == pytest.approx(10 - 6.0)
    assert saved.low < saved.mean < saved.high
    assert len(report.curve) == 7


def test_a_routed_row_is_answered_as_a_server_would(tmp_path: Path) -> None:
    """A target that fails has its fallback answer, a draft that fails its check the one above: both are paid for."""
    more = 'fallbacks: {small: big}\nrules: [{match: "^draft", to: draft}, {match: "^row", to: small}]\n'
    draft = "  draft: {kind: local, model: d, verify: {exact: yes!}, escalate: big}\n  big:"
    policy = policy_of(tmp_path, POLICY.replace("  big:", draft) + more)

    def made(text: str, small: Outcome, drafted: str, forbidden: tuple[str, ...] = ()) -> Labelled:
        asked = Asked.of_text(text)
        outcomes = {"small": small, "draft": Outcome(False, cost(3.0), drafted), "big": Outcome(True, cost(10.0))}
        kept = {name: one for name, one in outcomes.items() if name not in forbidden}
        return Labelled(Row(asked, Exact(("x",))), signals_of(asked), forbidden, {}, cost(0.0), kept)

    failed, wrong = Outcome(False, cost(1.0), failure="is down"), Outcome(False, cost(1.0), "no")
    cases = (
        (made("row a", failed, ""), "small", True, 11.0),
        (made("row b", wrong, ""), "small", False, 1.0),
        (made("row c", failed, "", ("big",)), "small", False, 1.0),
        (made("draft d", wrong, "no"), "draft", True, 13.0),
        (made("draft e", wrong, "yes!"), "draft", False, 3.0),
    )
    for row, target, is_right, joules in cases:
        outcome = served(row, target, policy)
        assert (outcome.is_right, outcome.cost["joules"]) == (is_right, joules), row.row.asked.text
    held = [row for row, *_ in cases if not row.forbidden]
    report = run([], held, policy)
    assert report.routed.quality.mean == 2 / 4
    assert report.routed.cost["joules"] is not None
    assert report.routed.cost["joules"].mean == (11 + 1 + 13 + 3) / 4
    assert report.baselines["always small"].quality.mean == 0.0


def test_no_saving_is_claimed_where_quality_is_lost(tmp_path: Path) -> None:
    draw = random.Random(1)
    policy = policy_of(tmp_path, POLICY)
    report = run(rows(draw, 200, skill=1.5), rows(draw, 200, skill=1.5), policy, error=0.5)
    comparison = report.comparisons["always big"]
    assert report.routed.shares["small"] > 0.9
    assert comparison.quality.high < 0
    assert not comparison.is_non_inferior


def test_a_cost_that_somebody_does_not_say_is_unknown_not_nothing(tmp_path: Path) -> None:
    draw = random.Random(2)
    report = run(rows(draw, 300, big_cost=None), rows(draw, 200, big_cost=None), policy_of(tmp_path, POLICY))
    assert report.baselines["always big"].cost["visits"] is None
    assert report.baselines["always small"].cost["visits"] is not None
    assert report.comparisons["always big"].saved["visits"] is None


def test_later_routes_are_fitted_on_what_earlier_ones_leave(tmp_path: Path) -> None:
    text = POLICY.replace("p_easy >= 0.0, min_p", "p_easy >= 0.8, min_p").replace(
        "default", "  - {to: small, when: p_easy < 2.0, min_p: calibrated}\ndefault"
    )
    policy = policy_of(tmp_path, text)
    draw = random.Random(3)
    labelled = rows(draw, 600)
    fitted = fit_routes(labelled, policy, 0.3)
    first, second = fitted.values()
    above = sum(one.answers["easy"].noul >= 0.8 for one in labelled)  # type: ignore[union-attr]
    assert first.rows == above
    assert second.rows == 600 - first.taken


def test_intervals_are_those_of_the_mean() -> None:
    values = np.array([0.0, 1.0] * 200)
    found = interval(values)
    assert found.mean == 0.5
    assert found.high - found.low == pytest.approx(2 * 1.96 * 0.5 / 20, rel=0.15)


def test_the_oracle_takes_the_cheapest_that_is_right() -> None:
    (row,) = rows(random.Random(1), 1)
    wrong, right = Outcome(False, cost(1.0)), Outcome(True, cost(9.0))
    kept = dict(row.outcomes)
    for outcomes, best in (({"small": wrong, "big": right}, "big"), ({"small": wrong, "big": wrong}, "small")):
        kept.update(outcomes)
        changed = Labelled(row.row, row.signals, (), row.answers, row.router, dict(kept))
        assert oracle(changed, ["small", "big"]) == best


# ---- The file -----------------------------------------------------------------------------------------------------


def test_a_calibration_is_tied_to_policy_and_decider(tmp_path: Path) -> None:
    policy = policy_of(tmp_path, POLICY)
    draw = random.Random(4)
    report = run(rows(draw, 400), rows(draw, 200), policy)
    path = tmp_path / "cal.json"
    assert thresholds_of(policy, "sha").warnings == (f"{path} is not there: 1 calibrated route is never taken",)
    write_calibration(path, policy, "sha", "rows", report)
    found = thresholds_of(policy, "sha")
    assert not found.warnings
    assert found.by_route == {name: one.threshold for name, one in report.routes.items()}
    assert found.version is not None
    kept = json.loads(path.read_text())
    assert (kept["policy_sha256"], kept["decider"], kept["rows_sha256"]) == (policy.sha256, "sha", "rows")
    assert "another decider" in " ".join(thresholds_of(policy, "other").warnings)
    changed = policy_of(tmp_path, POLICY.replace("easy?", "simple?"))
    assert "another version of policy.yaml" in " ".join(thresholds_of(changed, "sha").warnings)
    other = policy_of(tmp_path, POLICY.replace(">= 0.0", ">= 0.1"))
    assert "that route is never taken" in " ".join(thresholds_of(other, "sha").warnings)
    assert thresholds_of(policy_of(tmp_path, POLICY), "sha") == found
    assert Thresholds().by_route == {}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 9}', '{"version": 1, "routes": {"a": {"threshold": "x"}}}']
)
def test_a_file_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    policy = policy_of(tmp_path, POLICY)
    (tmp_path / "cal.json").write_text(text)
    with pytest.raises(PolicyError, match=r"cal\.json"):
        thresholds_of(policy, "sha")


# ---- Checks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "answer", "passes"),
    [
        ({"exact": "Paris"}, " paris. ", True),
        ({"exact": ["yes", "no"]}, "No", True),
        ({"exact": "Paris"}, "It is Paris", False),
        ({"regex": r"\bparis\b"}, "It is PARIS!", True),
        ({"regex": r"\bparis\b"}, "comparison", False),
        ({"number": 42}, "40 + 2 = 42.", True),
        ({"number": 42}, "42 is 40 + 2", False),
        ({"number": 1234.5}, "$1,234.50", True),
        ({"number": -3}, "x = −3", True),
        ({"number": 3.14, "tolerance": 0.01}, "about 3.1416", True),
        ({"number": 42}, "forty-two", False),
        ({"json_schema": {"type": "object", "required": ["a"]}}, 'Here:\n```json\n{"a": 1}\n```', True),
        ({"json_schema": {"type": "object", "required": ["a"]}}, '{"b": 1}', False),
        ({"json_schema": {"type": "object"}}, "nothing", False),
        ({"regex": "a", "number": 1}, "a 1", True),
        ({"regex": "a", "number": 1}, "b 1", False),
    ],
)
def test_checks(check: object, answer: str, passes: bool) -> None:
    assert check_from_json(check).passes(answer) is passes


@pytest.mark.parametrize(
    "check",
    [
        None, {}, {"exat": "a"}, {"exact": 1}, {"exact": []}, {"number": "4"}, {"number": True}, {"tolerance": 1},
        {"regex": "("}, {"regex": "(a+)+"}, {"json_schema": {"type": "nothing"}},
        {"json_schema": {"$ref": "https://example.org/schema"}},
    ],
)  # fmt: skip
def test_a_check_that_is_none_is_refused(check: object) -> None:
    with pytest.raises((BadParameter, PolicyError)):
        check_from_json(check)


def test_rows() -> None:
    row = row_from_json({"prompt": "1 + 1?", "check": {"number": 2}, "kind": "arithmetic", "max_tokens": 5})
    assert row.asked.body == {"temperature": 0, "max_tokens": 5, "messages": [{"role": "user", "content": "1 + 1?"}]}
    for bad in ([], {"prompt": "a"}, {"check": {"exact": "a"}}, {"prompt": "a", "check": {"exact": "a"}, "chek": 1}):
        with pytest.raises(BadParameter):
            row_from_json(bad)
