"""Rows with known answers: every way to write a label, and what is no label."""

from __future__ import annotations

import json
from typing import Any

import pytest

from heedful.decide.labelled_rows import is_held_out, labelled_from_json
from heedful.errors import BadParameter

QUESTIONS: dict[str, Any] = {
    "team": {"type": "choice", "criteria": {"billing": None, "returns": "wants money back", "true": None}},
    "rude": {"type": "noul", "instructions": "Is it rude?"},
    "anger": {"type": "score", "criteria": ["calm", "2", {"label": "furious"}]},
}


def labels(questions: Any = QUESTIONS, **row: Any) -> dict[str, Any]:
    found = labelled_from_json({"state": "Charged twice", "questions": questions, **row})
    assert found.state == "Charged twice"
    return dict(zip([question.name for question in found.questions], found.labels, strict=True))


@pytest.mark.parametrize("key", ["expected", "gold", "label"])
def test_labels_by_name(key: str) -> None:
    row = {key: {"team": "returns", "rude": True, "anger": 2}}
    assert labels(**row) == {"team": 1, "rude": 1, "anger": 2}
    assert labels(**{key: {"rude": False}}) == {"rude": 0}  # the others are passed over
    assert labels(**{key: {"rude": False, "team": None}}) == {"rude": 0}


def test_labels_at_the_questions() -> None:
    """As Kev's training rows have them."""
    questions = {"team": {**QUESTIONS["team"], "label": "true"}, "rude": {**QUESTIONS["rude"], "gold": False}}
    assert labels(questions) == {"team": 2, "rude": 0}
    assert labels(questions, expected={"rude": True}) == {"team": 2, "rude": 1}


@pytest.mark.parametrize(
    ("name", "value", "label"),
    [
        ("team", "billing", 0),
        ("team", {"billing": 0.25, "true": 0.75}, (0.25, 0.0, 0.75)),
        ("team", {"billing": 0.3333, "returns": 0.3333, "true": 0.3333}, (1 / 3, 1 / 3, 1 / 3)),
        ("rude", True, 1),
        ("rude", 0.25, (0.75, 0.25)),
        ("rude", 1, (0.0, 1.0)),
        ("rude", {"true": 0.9, "false": 0.1}, (0.1, 0.9)),
        ("anger", 0, 0),
        ("anger", "calm", 0),
        ("anger", "2", 1),  # a level's text comes before its index
        ("anger", "1", 1),
        ("anger", {"0": 0.5, "2": 0.5}, (0.5, 0.0, 0.5)),
    ],
)
def test_one_question_can_do_without_its_name(name: str, value: Any, label: Any) -> None:
    for row in ({"expected": value}, {"expected": {name: value}}):
        assert labels({name: QUESTIONS[name]}, **row) == {name: pytest.approx(label)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("team", "Billing"), ("team", 0), ("team", True), ("team", {"billing": 0.5}), ("team", {"other": 1.0}),
        ("team", {"billing": True}), ("team", {"billing": -1, "returns": 2}), ("team", {}), ("team", ["billing"]),
        ("team", {"billing": 10**400}), ("team", {"billing": float("nan")}), ("team", {"billing": float("inf")}),
        ("rude", "true"), ("rude", 1.5), ("rude", -0.1), ("rude", float("nan")), ("rude", {"yes": 1}),
        ("anger", 3), ("anger", -1), ("anger", True), ("anger", "furious"), ("anger", 1.0), ("anger", {"3": 1}),
    ],
)  # fmt: skip
def test_values_that_are_no_label(name: str, value: Any) -> None:
    with pytest.raises(BadParameter, match=rf"does not answer '{name}': give "):
        labels(expected={name: value})


@pytest.mark.parametrize(
    "row",
    [
        [], None, {}, {"state": "x"}, {"state": "x", "questions": {}}, {"state": None, "questions": QUESTIONS},
        {"state": "x", "questions": QUESTIONS},
        {"state": "x", "questions": QUESTIONS, "expected": {}},
        {"state": "x", "questions": QUESTIONS, "expected": "billing"},
        {"state": "x", "questions": QUESTIONS, "expected": {"rude": True, "polite": False}},
        {"state": "x", "questions": {"a": {"type": "maybe"}}, "expected": True},
    ],
)  # fmt: skip
def test_rows_without_a_label(row: Any) -> None:
    with pytest.raises(BadParameter):
        labelled_from_json(row)


def test_about_as_many_are_held_out_as_asked_for_and_always_the_same() -> None:
    states: list[Any] = [{"text": f"row {i}"} for i in range(2000)]
    held = [state for state in states if is_held_out(state, 0.3)]
    assert 520 <= len(held) <= 680  # four standard deviations
    assert held == [state for state in states if is_held_out(json.loads(json.dumps(state)), 0.3)]
    assert all(is_held_out(state, 0.5) for state in held)
    assert is_held_out("\ud800", 0.999) in (True, False)  # half of a pair is no reason to fail
