"""Issues: the places and names are those of pydantic over the wire types that typesafe-sdk carries, generated from
System One's own OpenAPI document; what has none is what the question types take."""

from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typesafe_sdk._schemas.models import SystemOneRequest

from heedful.decide.question import check_state, questions_from_json
from heedful.decide.question_issues import question_issues, state_issues
from heedful.errors import BadParameter

OF_THE_WIRE: dict[str, Any] = {
    "an array": [],
    "null": None,
    "none": {},
    "text": {"q": "urgent?"},
    "null question": {"q": None},
    "no type": {"q": {"instructions": "?"}},
    "type null": {"q": {"type": None}},
    "type boolean": {"q": {"type": "boolean"}},
    "type a list": {"q": {"type": ["noul"]}},
    "no criteria": {"q": {"type": "choice"}, "r": {"type": "score"}},
    "null criteria": {"q": {"type": "choice", "criteria": None}, "r": {"type": "score", "criteria": None}},
    "options as a list": {"q": {"type": "choice", "criteria": ["a", "b"]}},
    "a description that is a number": {"q": {"type": "choice", "criteria": {"a": 3, "b": None, "c": True}}},
    "levels as a map": {"q": {"type": "score", "instructions": "?", "criteria": {"0": "low", "1": "high"}}},
    "no levels": {"q": {"type": "score", "criteria": []}},
    "a null level": {"q": {"type": "score", "criteria": ["a", None, 1.5]}},
    "sides as text": {"q": {"type": "noul", "criteria": "yes"}},
    "sides as a list": {"q": {"type": "noul", "criteria": []}},
    "a side that is no text": {"q": {"type": "noul", "criteria": {"true": False, "false": None, "maybe": 3}}},
    "instructions": {"q": {"type": "noul", "instructions": 7}},
    "many at once": {
        "배송": {"type": "noul", "instructions": 7, "criteria": {"true": 1}},
        "b.c": {"type": "choice", "instructions": False},
        "d": {"type": "cube"},
        "fine": {"type": "noul"},
    },
}


@pytest.mark.parametrize("case", OF_THE_WIRE)
def test_issues_are_pydantics(case: str) -> None:
    questions = OF_THE_WIRE[case]
    with pytest.raises(pydantic.ValidationError) as refused:
        SystemOneRequest.model_validate({"model": "m", "state": "x", "questions": questions})
    expected = [(error["loc"], error["type"]) for error in refused.value.errors()]
    assert [(issue.loc, issue.type) for issue in question_issues(questions)] == expected


@pytest.mark.parametrize("state", [3, 1.5, True, None])
def test_a_state_that_is_none_has_an_issue_for_each_of_its_types(state: Any) -> None:
    with pytest.raises(pydantic.ValidationError) as refused:
        SystemOneRequest.model_validate({"model": "m", "state": state, "questions": {"q": {"type": "noul"}}})
    expected = [(error["loc"], error["type"], error["msg"]) for error in refused.value.errors()]
    assert [(issue.loc, issue.type, issue.msg) for issue in state_issues(state)] == expected


def nested(depth: int) -> Any:
    value: Any = "deep"
    for _ in range(depth):
        value = [value]
    return value


OWN_LIMITS: list[tuple[Any, tuple[str | int, ...], str, str]] = [
    ({"": {"type": "noul"}}, ("questions", "", "[key]"), "string_too_short", "at least 1 character"),
    ({"q": {"type": "choice", "criteria": {}}}, ("questions", "q", "choice", "criteria"), "too_short", "not 0"),
    (
        {"q": {"type": "choice", "criteria": {str(i): None for i in range(256)}}},
        ("questions", "q", "choice", "criteria"),
        "too_long",
        "at most 255 items after validation, not 256",
    ),
    (
        {"q": {"type": "score", "criteria": ["x"] * 11}},
        ("questions", "q", "score", "criteria"),
        "too_long",
        "at most 10 items after validation, not 11",
    ),
    (
        {"q": {"type": "noul", "instructions": nested(65)}},
        ("questions", "q", "noul", "instructions"),
        "value_error",
        "Input is nested more than 64 levels deep",
    ),
    (
        {"q": {"type": "noul", "criteria": {"true": [1 << 128]}}},
        ("questions", "q", "noul", "criteria", "true"),
        "value_error",
        "more than 128 bits",
    ),
    ({7: {"type": "noul"}}, ("questions", "7", "[key]"), "string_type", "valid string"),
    (
        {"q": {"type": "choice", "criteria": {7: None}}},
        ("questions", "q", "choice", "criteria", "7", "[key]"),
        "string_type",
        "valid string",
    ),
]


@pytest.mark.parametrize(("questions", "loc", "kind", "words"), OWN_LIMITS)
def test_limits_that_the_wire_types_leave_open(questions: Any, loc: Any, kind: str, words: str) -> None:
    (issue,) = question_issues(questions)
    assert (issue.loc, issue.type) == (loc, kind)
    assert words in issue.msg


def test_unknown_numbers_in_a_state() -> None:
    (issue,) = state_issues({"a": [float("nan")]})
    assert (issue.loc, issue.type, issue.msg) == (
        ("state",),
        "value_error",
        "Input nan is no number that JSON can carry",
    )


WORDS = st.sampled_from(["", "a", "true", "false", "type", "noul", "choice", "score", "instructions", "criteria"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | WORDS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=6
)
QUESTIONS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["noul", "choice", "score"]) | VALUES,
        "instructions": VALUES,
        "criteria": VALUES | st.lists(WORDS, max_size=12) | st.dictionaries(WORDS, st.none() | WORDS),
    },
)


@given(VALUES | st.dictionaries(WORDS, QUESTIONS | VALUES, max_size=3))
def test_what_has_no_issue_is_read_and_the_reverse(questions: Any) -> None:
    issues = list(question_issues(questions))
    json.dumps([issue.loc for issue in issues])
    try:
        questions_from_json(questions)
    except BadParameter:
        assert issues
    else:
        assert not issues


@given(VALUES)
def test_what_has_no_issue_is_a_state_and_the_reverse(state: Any) -> None:
    try:
        check_state(state)
    except BadParameter:
        assert list(state_issues(state))
    else:
        assert not list(state_issues(state))
