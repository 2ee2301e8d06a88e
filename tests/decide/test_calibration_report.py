"""Calibration measured on rows held out, of a decider whose true probabilities are known."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from heedful.decide.calibrate import Calibration
from heedful.decide.calibration_report import CalibrationReport, measure_calibration
from heedful.decide.labelled_rows import LabelledState
from heedful.decide.question import Choice, Noul, Question, State
from heedful.errors import BadLogits, BadParameter, ContextOverflow


class Known:
    """Logits are the state; "long" is refused."""

    calibration = Calibration({"noul": 0.5})

    def logits(self, state: State, questions: Iterable[Question]) -> list[tuple[float, ...]]:
        if state == "long":
            raise ContextOverflow(900, 100)
        assert isinstance(state, list)
        return [tuple(state)[: len(question.labels)] for question in questions]


def rows(seed: int, count: int, temperature: float) -> list[LabelledState]:
    """Labels drawn from softmax(logits / temperature)."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        logits = rng.normal(0, 6, 3)
        labels = []
        for n in (3, 2):
            powers = np.exp(logits[:n] / temperature)
            labels.append(int(rng.choice(n, p=powers / powers.sum())))
        made.append(LabelledState(logits.tolist(), (Choice("c", ["a", "b", "c"]), Noul("n")), tuple(labels)))
    return made


@pytest.fixture(scope="module")
def report() -> CalibrationReport:
    return measure_calibration(Known(), rows(0, 1500, 3.0), rows(1, 1000, 3.0), error=0.1, model_sha256="ab")


def test_the_true_temperature_is_found_and_makes_held_out_rows_come_true(report: CalibrationReport) -> None:
    assert report.calibration.temperature("choice", 3) == pytest.approx(3, rel=0.15)
    assert report.calibration.temperature("noul", 2) == pytest.approx(3, rel=0.15)
    assert report.calibration.model_sha256 == "ab"
    assert report.fitted == {"choice": 1500, "noul": 1500, "score": 0}
    assert {kind: measured.after.rows for kind, measured in report.measured.items()} == {
        "all": 2000, "choice": 1000, "noul": 1000,
    }  # fmt: skip
    for measured in report.measured.values():
        assert measured.after.accuracy == measured.before.accuracy
        assert measured.after.ece < 0.05 < measured.before.ece
        assert measured.after.nll < measured.before.nll
    assert report.objection == ""


def test_before_is_at_the_temperatures_that_the_decider_came_with() -> None:
    held = [LabelledState([0.0, 1.0], (Noul("n"),), (0,))]
    found = measure_calibration(Known(), held, held, error=0.1).measured["noul"].before
    assert found.nll == pytest.approx(math.log(1 + math.exp(1.0 / 0.5)))


def test_a_threshold_keeps_its_promise_on_rows_it_was_not_chosen_on(report: CalibrationReport) -> None:
    found = report.thresholds["noul"]
    assert found is not None
    assert 0.5 < found.probability < 1
    assert 0 < found.answered < found.rows == 1000
    assert found.errors / found.answered < 0.1
    assert found.errors / found.answered < found.error_bound < 0.15
    assert set(report.thresholds) == {"choice", "noul"}
    few = measure_calibration(Known(), rows(0, 20, 3.0), rows(1, 9, 3.0), error=0.01)
    assert few.objection == "18 questions tell too little, 20 are needed"
    assert few.thresholds == {"choice": None, "noul": None}


def test_a_report_is_json(report: CalibrationReport) -> None:
    shown = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert Calibration.from_dict(shown["calibration"]) == report.calibration
    assert shown["measured"]["noul"]["after"]["bins"][0]["count"] > 0
    assert shown["thresholds"]["noul"]["rows"] == 1000
    assert shown["left_out"] == []


def test_rows_that_the_decider_refuses_are_left_out_and_said() -> None:
    long = LabelledState("long", (Noul("n"),), (1,))
    seen: list[int] = []
    found = measure_calibration(Known(), [long, *rows(0, 9, 3.0)], rows(1, 9, 3.0), error=0.1, progress=seen.append)
    assert found.left_out == ("the prompt has 900 tokens and the context is 100",)
    assert found.fitted["noul"] == 9
    assert sum(seen) == 19
    with pytest.raises(BadParameter, match="no question held out; the prompt has 900 tokens"):
        measure_calibration(Known(), rows(0, 9, 3.0), [long], error=0.1)
    with pytest.raises(BadParameter, match="no question to fit"):
        measure_calibration(Known(), [LabelledState([1.0], (Choice("c", ["only"]),), (0,))], rows(1, 9, 3.0), error=0.1)


def test_what_goes_wrong_inside_stops_it() -> None:
    class Broken(Known):
        def logits(self, state: State, questions: Iterable[Question]) -> Any:
            raise BadLogits("no usable numbers")

    with pytest.raises(BadLogits):
        measure_calibration(Broken(), rows(0, 2, 3.0), rows(1, 2, 3.0), error=0.1)
