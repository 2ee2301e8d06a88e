"""Answers: the contract's examples digit by digit, recorded answers, and what the formulas say in closed form."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.cost.energy import Energy
from heedful.cost.receipt import Flops, KVTraffic, Receipt, Saved, Seconds, Visits, WeightTraffic
from heedful.decide import Answers, Choice, Noul, Score
from heedful.decide.answer import answer_to, choice_confidence, score_confidence
from heedful.decide.receipt import decision_receipt

TEAM = Choice("team", {"returns": None, "billing": {"owns": ["invoices", "double charges"]}, "other": "anything else"})
ANGER = Score("anger", ["calm", "annoyed", {"label": "angry", "signs": ["threats"]}, "furious"])
PART = Receipt(
    model="m",
    prompt_tokens=100,
    cached_tokens=64,
    output_tokens=0,
    policy={},
    visits=Visits(prefill=10, decode=0, total=10, dense=25, saved=Saved(window=3, pages=2, prefix=10)),
    kv=KVTraffic("q8", 7, 5, 11, 13),
    weights=WeightTraffic(1000),
    flops=Flops(17, 19),
    seconds=Seconds(0.0, 1.0, 0.0, 1.0, 1.0),
    energy=Energy(1.5, 1.0, 2.0, "estimated"),
)


def test_the_examples_of_the_contract() -> None:
    """reference/systemone.md 1.7, A to C, with usage."""
    receipt = decision_receipt("ours-1", 3, [replace(PART, prompt_tokens=41, cached_tokens=0)], seconds=1.0)
    answers = Answers(
        "ours-1",
        {
            "recurring": answer_to(Noul("recurring", "?"), [0.03, 0.97], digits=4),
            "team": answer_to(TEAM, [0.12, 0.79, 0.09], digits=4),
            "anger": answer_to(ANGER, [0.05, 0.15, 0.55, 0.25], digits=4),
        },
        receipt,
    )
    found = answers.to_dict()
    assert found["answers"]["team"].pop("confidence") == pytest.approx(0.685, abs=1e-12)
    assert found["answers"]["anger"].pop("confidence") == pytest.approx(0.5, abs=1e-12)
    assert found["answers"]["anger"].pop("score") == pytest.approx(2.0, abs=1e-12)
    assert found == {
        "model": "ours-1",
        "answers": {
            "recurring": {"type": "noul", "noul": 0.97},
            "team": {
                "type": "choice",
                "choice": "billing",
                "probabilities": {"returns": 0.12, "billing": 0.79, "other": 0.09},
            },
            "anger": {
                "type": "score",
                "legend": {
                    "0": "calm",
                    "1": "annoyed",
                    "2": {"label": "angry", "signs": ["threats"]},
                    "3": "furious",
                },
                "probabilities": {"0": 0.05, "1": 0.15, "2": 0.55, "3": 0.25},
            },
        },
        "usage": {"input_tokens": 41, "output_tokens": 0},
    }
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert list(answers) == ["recurring", "team", "anger"]
    assert [answers[name].value for name in answers] == [True, "billing", pytest.approx(2.0)]


# golden/decisions/kev/kev.json: the choice formula is the contract's there (the score's is Kev's own)
RECORDED = [
    ([0.2990396022796631, 0.4556495249271393, 0.24531085789203644], 0.18347428739070892),
    ([0.42173776030540466, 0.5782622694969177], 0.15652453899383545),
    ([0.38675016164779663, 0.3122546672821045, 0.30099520087242126], 0.08012524247169496),
    ([1.0], 1.0),
]


@pytest.mark.parametrize(("probabilities", "confidence"), RECORDED)
def test_recorded_confidences_of_choices(probabilities: list[float], confidence: float) -> None:
    assert choice_confidence(probabilities) == pytest.approx(confidence, abs=1e-6)


MEAN_DISTANCES = [0.5, 0.6667, 1, 1.2, 1.5, 1.7143, 2, 2.2222, 2.5]  # reference/systemone.md 1.4, n = 2 to 10


@pytest.mark.parametrize(("n", "even"), list(enumerate(MEAN_DISTANCES, start=2)))
def test_the_confidence_of_a_score_falls_with_the_distance_from_its_mode(n: int, even: float) -> None:
    probabilities = [0.9, 0.1, *[0.0] * (n - 2)]
    assert score_confidence(probabilities) == pytest.approx(1 - 0.1 / even, abs=1e-5)
    assert score_confidence([*[0.0] * (n - 1), 1.0]) == 1
    assert score_confidence([0.5, *[0.0] * (n - 2), 0.5]) == pytest.approx(max(0, 1 - 0.5 * (n - 1) / even), abs=1e-4)


def test_ends_of_the_scale() -> None:
    assert choice_confidence([1 / 3] * 3) == 0
    assert choice_confidence([0.1] * 7) >= 0  # rounded probabilities need not sum to one
    assert (choice_confidence([1.0]), score_confidence([1.0])) == (1, 1)
    assert answer_to(Choice("x", ["a", "b"]), [0.0, 0.0]).to_dict()["probabilities"] == {"a": 0.5, "b": 0.5}
    assert answer_to(Choice("x", ["a", "b"]), [3.0, 3.0]).value == "a"
    assert answer_to(Score("x", ["only"]), [0.2]).to_dict() == {
        "type": "score",
        "score": 0.0,
        "confidence": 1.0,
        "legend": {"0": "only"},
        "probabilities": {"0": 1.0},
    }


@given(
    st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=10),
    st.none() | st.integers(2, 6),
)
def test_any_weights_make_an_answer_that_agrees_with_itself(weights: list[float], digits: int | None) -> None:
    levels = [f"level {i}" for i in range(len(weights))]
    score = answer_to(Score("s", levels), weights, digits=digits).to_dict()
    choice = answer_to(Choice("c", levels), weights, digits=digits).to_dict()
    shown = list(choice["probabilities"].values())
    assert shown == list(score["probabilities"].values())
    slack = len(weights) * (0 if digits is None else 0.5 * 10**-digits) + 1e-9
    assert sum(shown) == pytest.approx(1, abs=slack)
    assert choice["probabilities"][choice["choice"]] == max(shown)
    assert score["score"] == pytest.approx(sum(i * p for i, p in enumerate(shown)), abs=1e-9)
    assert 0 <= score["confidence"] <= 1
    assert 0 <= choice["confidence"] <= 1


@pytest.mark.parametrize("weights", [[0.5, float("nan")], [-0.1, 1.1], [0.5, float("inf")], [1.0], []])
def test_what_is_no_distribution_is_our_fault(weights: list[float]) -> None:
    with pytest.raises((AssertionError, ZeroDivisionError)):
        answer_to(Choice("x", ["a", "b"]), weights)


def test_a_receipt_is_the_sum_of_its_parts() -> None:
    receipt = decision_receipt("m", 2, [replace(PART, cached_tokens=0), PART, PART], seconds=0.25)
    found: dict[str, Any] = receipt.to_dict()
    assert (found["sequences"], found["questions"]) == (3, 2)
    assert (found["prompt_tokens"], found["cached_tokens"], receipt.computed_tokens) == (300, 128, 172)
    assert found["visits"]["dense"] == found["visits"]["total"] + sum(found["visits"]["saved"].values()) == 75
    assert found["kv"] == {"format": "q8", "bytes_read": 21, "bytes_written": 15, "rows_read": 39}
    assert found["weights"] == {"bytes_read": 3000}
    assert found["flops"] == {"linear": 51, "attention": 57, "selection": 0}
    assert found["energy"] == {"joules": 4.5, "low": 3.0, "high": 6.0, "source": "estimated"}
    assert found["seconds"] == {"total": 0.25}
    assert receipt.line().startswith("2 questions in 3 sequences · 300 in (128 cached) · 30 visits of 75 dense")
    assert decision_receipt("m", 1, [PART], seconds=0.0).line().startswith("1 question in 1 sequence · ")
    assert decision_receipt("m", 1, [], seconds=0.0).to_dict()["visits"]["dense"] == 0
