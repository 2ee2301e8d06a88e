"""Temperatures, reliability and error bounds against closed forms, recorded lookups and textbook values."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.decide.calibrate import (
    Calibration,
    Row,
    clamped,
    error_bound,
    fit,
    fit_temperature,
    reliability,
    softmax,
    threshold_for,
)
from heedful.errors import BadParameter


@pytest.mark.parametrize("true_temperature", [0.8, 1.0, 2.35, 4.0])
def test_two_options_in_closed_form(true_temperature: float) -> None:
    """Logits ±g/2, of which a share s is right: the best T makes sigmoid(g / T) = s, so T = g / ln(s / (1 − s))."""
    rows = [Row("noul", (-1.5, 1.5), 1)] * 80 + [Row("noul", (-1.5, 1.5), 0)] * 20
    assert fit_temperature(rows) == pytest.approx(3 / math.log(4), rel=1e-9)
    gap = true_temperature * math.log(4)
    rows = [Row("noul", (0.0, gap), 1)] * 4 + [Row("noul", (0.0, gap), 0)]
    assert fit_temperature(rows) == pytest.approx(true_temperature, rel=1e-9)


def test_bounds_hold_where_the_best_lies_outside() -> None:
    assert fit_temperature([Row("choice", (0.0, 1.0, 0.5), 1)] * 9) == 0.5  # always right: the sharper the better
    assert fit_temperature([Row("choice", (0.0, 1.0, 0.5), 0)] * 9) == 5.0  # always wrong: the flatter the better


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.lists(st.floats(-8, 8), min_size=4, max_size=4), st.integers(0, 3)), min_size=5, max_size=30)
)
def test_no_other_temperature_has_less_nll(drawn: list[tuple[list[float], int]]) -> None:
    rows = [Row("choice", tuple(logits), label) for logits, label in drawn]

    def nll(temperature: float) -> float:
        return reliability([softmax(r.logits, temperature).tolist() for r in rows], [r.label for r in rows]).nll

    best = nll(fit_temperature(rows))
    assert all(best <= nll(temperature) + 1e-9 for temperature in np.geomspace(0.5, 5, 12))


def test_a_bucket_has_its_own_temperature_where_there_are_rows_enough() -> None:
    sharp = [Row("choice", (0.0, math.log(4)), 1)] * 16 + [Row("choice", (0.0, math.log(4)), 0)] * 4
    wide = [Row("choice", (0.0, 2 * math.log(4), -50.0), 1)] * 16 + [
        Row("choice", (0.0, 2 * math.log(4), -50.0), 0)
    ] * 4
    few = [Row("score", (0.0, 3 * math.log(4)), 1)] * 16 + [Row("score", (0.0, 3 * math.log(4)), 0)] * 4
    calibration = fit([*sharp, *wide, *few, Row("noul", (1.0,), 0)], model_sha256="ab")
    assert calibration.temperature("choice", 2) == pytest.approx(1.0, rel=1e-6)
    assert calibration.temperature("choice", 5) == pytest.approx(2.0, rel=1e-6)
    assert 1.0 < calibration.temperature("choice", 11) < 2.0  # the type's
    assert set(calibration.by_options) == {"choice:2", "choice:3-5", "score:2"}
    assert calibration.temperature("score", 2) == pytest.approx(3.0, rel=1e-6)
    assert calibration.temperature("noul", 2) == 1.0
    assert Calibration.from_dict(json.loads(json.dumps(calibration.to_dict()))) == calibration


def test_types_that_the_rows_say_too_little_of_stay_as_they_were() -> None:
    base = Calibration({"choice": 1.6, "noul": 1.9}, {"choice:11+": 0.6, "noul:2": 2.1, "score:3-5": 1.2}, "of old")
    rows = [Row("choice", (0.0, math.log(4)), 1)] * 16 + [Row("choice", (0.0, math.log(4)), 0)] * 4
    found = fit([*rows, *[Row("noul", (0.0, 1.0), 0)] * 19], base=base, model_sha256="new")
    assert found.temperature("choice", 2) == found.temperature("choice", 11) == pytest.approx(1.0, rel=1e-6)
    assert (found.temperature("noul", 2), found.temperature("score", 4), found.model_sha256) == (2.1, 1.2, "new")


def test_lookup_and_clamp_are_those_of_the_published_checkpoint() -> None:
    """Laya english (reference/decision_models.md section 1); two and five options are in golden/decisions/laya too."""
    laya = Calibration.from_dict({
        "temperature": [1.6369, 1.2514, 1.9834],
        "temperature_by_options": {
            "choice:2": 1.9064, "choice:3-5": 1.7602, "choice:6-10": 1.0, "choice:11+": 0.1006,
            "score:3-5": 1.2514, "noul:2": 1.9834,
        },
    })  # fmt: skip
    found = [laya.temperature("choice", n) for n in (1, 2, 3, 5, 6, 10, 11, 255)]
    assert found == [1.9064, 1.9064, 1.7602, 1.7602, 1.0, 1.0, 0.5, 0.5]
    assert [laya.temperature("score", n) for n in (2, 4, 10)] == [1.2514] * 3
    assert laya.temperature("noul", 2) == 1.9834
    logits = [1.0329513549804688, 0.7104620933532715]  # recorded: "choice2_str"
    assert softmax(logits, laya.temperature("choice", 2)) == pytest.approx([0.5421897867612562, 0.4578102132387438])


def test_temperatures_that_are_no_numbers_count_as_one() -> None:
    assert [clamped(t) for t in (float("nan"), True, "2", None, 0, 9, 2)] == [1.0, 1.0, 1.0, 1.0, 0.5, 5.0, 2.0]
    assert [clamped(t) for t in (float("inf"), 10**400, -(10**400))] == [5.0, 5.0, 0.5]


def test_shares_are_worth_as_many_rows_as_they_stand_for() -> None:
    """4 in 5 say so: one row with that share has the temperature and the NLL of five rows with one label each."""
    logits = (0.0, 2 * math.log(4))
    soft, hard = [Row("noul", logits, (0.2, 0.8))], [Row("noul", logits, 1)] * 4 + [Row("noul", logits, 0)]
    assert fit_temperature(soft) == pytest.approx(fit_temperature(hard)) == pytest.approx(2.0)
    p = softmax(logits, 2.0).tolist()
    one, five = reliability([p], [(0.2, 0.8)]), reliability([p] * 5, [1, 1, 1, 1, 0])
    assert (one.accuracy, one.nll, one.ece) == pytest.approx((five.accuracy, five.nll, five.ece))
    assert one.ece == pytest.approx(0)
    assert one.brier == pytest.approx(0)  # the share itself is what was to be said
    assert five.brier == pytest.approx(0.8 * 0.08 + 0.2 * 1.28)


def test_rows_of_different_lengths_are_fitted_together() -> None:
    """The slope written out row by row is 0 at the temperature found."""
    rows = [
        Row("choice", (3.0, 1.0, -2.0), 1),
        Row("choice", (-900.0, -901.0), 0),
        Row("choice", (0.0, 0.5, 4.0, 4.0, -1e9), 3),
        Row("choice", (1e9, 1e9 - 2), (0.5, 0.5)),
    ]
    inverse = 1 / fit_temperature(rows)
    slope = 0.0
    for row in rows:
        z = np.array(row.logits) - max(row.logits)
        p = np.exp(z * inverse) / np.exp(z * inverse).sum()
        target = np.array(row.label) if isinstance(row.label, tuple) else np.eye(len(z))[row.label]
        slope += float((p - target) @ z)
    assert 0.2 < inverse < 2
    assert slope == pytest.approx(0, abs=1e-6)


def test_reliability_by_hand() -> None:
    found = reliability([[0.8, 0.2], [0.8, 0.2], [0.4, 0.6], [1.0, 0.0]], [0, 1, 1, 0], bins=5)
    assert found.accuracy == 0.75
    assert found.nll == pytest.approx(-(math.log(0.8) + math.log(0.2) + math.log(0.6)) / 4)
    assert found.brier == pytest.approx((0.08 + 1.28 + 0.32 + 0.0) / 4)
    assert [(b.low, b.high, b.count) for b in found.bins] == [(0.4, 0.6, 1), (0.6, 0.8, 2), (0.8, 1.0, 1)]
    assert found.ece == pytest.approx((1 * 0.4 + 2 * 0.3 + 1 * 0.0) / 4)
    assert found.to_dict()["bins"][1]["accuracy"] == 0.5


@pytest.mark.parametrize(("answers", "certainty"), [(1, 0.95), (10, 0.95), (59, 0.9), (1000, 0.99)])
def test_bounds_with_a_closed_form(answers: int, certainty: float) -> None:
    """No error in n: the bound is 1 − (1 − certainty)^(1/n); all but one wrong: certainty^(1/n)."""
    assert error_bound(0, answers, certainty=certainty) == pytest.approx(1 - (1 - certainty) ** (1 / answers), rel=1e-9)
    if answers > 1:
        assert error_bound(answers - 1, answers, certainty=certainty) == pytest.approx(certainty ** (1 / answers))
    assert error_bound(answers, answers, certainty=certainty) == 1


def test_bounds_of_the_tables() -> None:
    """Two-sided 95 % intervals in the usual tables have these upper ends (one-sided certainty .975)."""
    assert error_bound(1, 10, certainty=0.975) == pytest.approx(0.4450, abs=5e-5)
    assert error_bound(5, 10, certainty=0.975) == pytest.approx(0.8129, abs=5e-5)


def test_a_threshold_keeps_the_error_below_what_is_wanted() -> None:
    confidences = [0.9] * 60 + [0.5] * 40
    right = [True] * 60 + [True, False] * 20
    assert threshold_for(confidences, right, error=0.05) == 0.9  # 1 − .05^(1/60) = .0487
    assert threshold_for(confidences, right, error=0.04) is None
    assert threshold_for(confidences, right, error=0.3) == 0.5
    assert threshold_for([0.9] * 60, [True] * 59 + [False], error=0.05) is None  # equal ones are not split


@given(
    st.lists(st.tuples(st.sampled_from([0.2, 0.5, 0.7, 0.9, 0.99]), st.booleans()), max_size=60), st.floats(0.01, 0.9)
)
def test_a_threshold_is_the_lowest_that_the_bound_allows(drawn: list[tuple[float, bool]], error: float) -> None:
    confidences, right = [confidence for confidence, _ in drawn], [is_right for _, is_right in drawn]
    allowed = []
    for candidate in set(confidences):
        taken = [is_right for confidence, is_right in drawn if confidence >= candidate]
        if error_bound(taken.count(False), len(taken)) <= error:
            allowed.append(candidate)
    assert threshold_for(confidences, right, error=error) == min(allowed, default=None)


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (Row("noul", (0.0, 1.0), (1.0,)), "label"),
        (Row("noul", (0.0, 1.0), (0.5, 0.6)), "label"),
        (Row("noul", (0.0, 1.0), (-0.5, 1.5)), "label"),
        (Row("noul", (0.0, 1.0), (float("nan"), 1.0)), "label"),
        (Row("bool", (0.0, 1.0), 0), "type"),
        (Row("noul", (0.0, float("nan")), 0), "logits"),
        (Row("noul", (), 0), "logits"),
        (Row("noul", (0.0, 1.0), 2), "label"),
        (Row("noul", (0.0, 1.0), -1), "label"),
    ],
)
def test_rows_that_are_refused(row: Row, field: str) -> None:
    with pytest.raises(BadParameter) as refused:
        fit([row])
    assert refused.value.field == field
