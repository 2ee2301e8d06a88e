"""Questions: the contract's examples and limits, and states as the reference models read them (recorded texts)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.decide.question import (
    Choice,
    Noul,
    Score,
    check_state,
    checked_questions,
    json_text,
    line_text,
    questions_from_json,
)
from heedful.errors import BadParameter

# reference/systemone.md 1.7
EXAMPLES: dict[str, dict[str, Any]] = {
    "A": {"recurring": {"type": "noul", "instructions": "Is this a repeated failure?"}},
    "B": {
        "team": {
            "type": "choice",
            "instructions": "Who owns `ticket.text`?",
            "criteria": {
                "returns": None,
                "billing": {"owns": ["invoices", "double charges"]},
                "other": "anything else",
            },
        }
    },
    "C": {
        "anger": {
            "type": "score",
            "instructions": "How upset is the writer?",
            "criteria": ["calm", "annoyed", {"label": "angry", "signs": ["threats"]}, "furious"],
        }
    },
    "D": {
        "환불?": {"type": "noul", "criteria": {"true": "The customer wants money back"}},
        "kind": {"type": "choice", "criteria": {"환불 요청": None, "배송 문의": None}},
    },
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_of_the_contract_are_read_and_written_alike(example: str) -> None:
    questions = questions_from_json(EXAMPLES[example])
    assert {question.name: question.to_dict() for question in questions} == EXAMPLES[example]


def test_labels_are_the_keys_of_the_probabilities() -> None:
    by_name = {q.name: q for example in EXAMPLES.values() for q in questions_from_json(example)}
    assert by_name["team"].labels == ("returns", "billing", "other")
    assert by_name["anger"].labels == ("0", "1", "2", "3")
    assert by_name["kind"].labels == ("환불 요청", "배송 문의")
    assert by_name["환불?"] == Noul("환불?", true="The customer wants money back")


def test_a_list_of_names_is_a_choice_without_descriptions() -> None:
    assert Choice("x", ["a", "", "a.b"]) == Choice("x", {"a": None, "": None, "a.b": None})


def test_what_the_caller_changes_later_changes_no_question() -> None:
    options: dict[str, Any] = {"a": None}
    levels = ["low"]
    choice, score = Choice("x", options), Score("y", levels)
    options["b"] = None
    levels.append("high")
    assert (choice.labels, score.labels) == (("a",), ("0",))


@pytest.mark.parametrize("count", [1, 2, 26, 64, 128, 255])
def test_options_up_to_the_limit(count: int) -> None:
    assert len(Choice("x", {str(i): None for i in range(count)}).labels) == count


def test_unknown_fields_of_a_question_are_ignored() -> None:
    (question,) = questions_from_json({"q": {"type": "noul", "instructions": "?", "x_trace_id": 3}})
    assert question == Noul("q", "?")


def nested(depth: int) -> Any:
    value: Any = "deep"
    for _ in range(depth):
        value = [value]
    return value


REFUSED: dict[str, tuple[Any, str, str]] = {
    "no questions": ({}, "questions", "at least one"),
    "an array of questions": ([], "questions", "must map names"),
    "empty name": ({"": {"type": "noul"}}, "questions", "not empty"),
    "a question that is text": ({"u": "urgent?"}, "questions['u']", "must be an object"),
    "no type": ({"u": {"instructions": "?"}}, "questions['u'].type", '"choice", "score" or "noul", not None'),
    "unknown type": ({"u": {"type": "boolean"}}, "questions['u'].type", "not 'boolean'"),
    "empty choice": ({"u": {"type": "choice", "criteria": {}}}, "questions['u'].options", "there are 0"),
    "choice without criteria": ({"u": {"type": "choice"}}, "questions['u'].criteria", "must be an object"),
    "256 options": (
        {"u": {"type": "choice", "criteria": {str(i): None for i in range(256)}}},
        "questions['u'].options",
        "1 to 255",
    ),
    "11 levels": ({"u": {"type": "score", "criteria": ["x"] * 11}}, "questions['u'].levels", "1 to 10"),
    "no levels": ({"u": {"type": "score", "criteria": []}}, "questions['u'].levels", "1 to 10"),
    "levels as a map": (  # example E
        {"u": {"type": "score", "instructions": "?", "criteria": {"0": "low", "1": "high"}}},
        "questions['u'].criteria",
        "must be an array",
    ),
    "null level": ({"u": {"type": "score", "criteria": ["a", None]}}, "questions['u'].levels[1]", "not null"),
    "number as description": (
        {"u": {"type": "choice", "criteria": {"a": 3}}},
        "questions['u'].options['a']",
        "not int",
    ),
    "number as instructions": ({"u": {"type": "noul", "instructions": 7}}, "questions['u'].instructions", "not int"),
    "text as noul criteria": (
        {"u": {"type": "noul", "criteria": "yes"}},
        "questions['u'].criteria",
        "must be an object",
    ),
    "noul side": ({"u": {"type": "noul", "criteria": {"true": False}}}, "questions['u'].true", "not bool"),
    "too deep": ({"u": {"type": "noul", "instructions": nested(65)}}, "questions['u'].instructions", "64 levels"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_and_where(case: str) -> None:
    questions, field, problem = REFUSED[case]
    with pytest.raises(BadParameter) as refused:
        questions_from_json(questions)
    assert refused.value.field == field
    assert problem in refused.value.message


def test_names_are_unique() -> None:
    with pytest.raises(BadParameter, match="two are called 'a'"):
        checked_questions([Noul("a", "?"), Score("a", ["x", "y"])])
    with pytest.raises(BadParameter, match="must be Choice, Score or Noul"):
        checked_questions(["a"])  # type: ignore[list-item]
    for alone in (None, 3, Noul("a", "?")):
        with pytest.raises(BadParameter, match="must be a list, not"):
            checked_questions(alone)  # type: ignore[arg-type]
    with pytest.raises(BadParameter, match="two have the same name"):
        Choice("x", ["a", "a"])


@pytest.mark.parametrize("state", ["", "text", {}, [], {"a": [1, 2.5, None, True]}, nested(64)])
def test_states(state: Any) -> None:
    check_state(state)


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (None, "not null"),
        (3, "not int"),
        (True, "not bool"),
        (b"x", "not bytes"),
        ([float("nan")], "nan"),
        ({"a": float("inf")}, "inf"),
        ({1: "a"}, "key must be a string"),
        ([{"x": {1, 2}}], "a set"),
        ([1 << 128], "128 bits"),
        (nested(65), "64 levels"),
    ],
)
def test_what_is_no_state(state: Any, problem: str) -> None:
    with pytest.raises(BadParameter, match=problem) as refused:
        check_state(state)
    assert refused.value.field == "state"


def test_objects_as_json_keep_their_characters() -> None:
    assert json_text("as it is {}") == "as it is {}"
    assert json_text({"ticket": "배송", "tags": ("a", 1)}) == '{"ticket": "배송", "tags": ["a", 1]}'


# what Kev's own reading of these states gave (golden/decisions/kev/kev.json, "rendered_state")
LINES: list[tuple[Any, str]] = [
    ("The light is on.", "The light is on."),
    (
        {"from": "ann", "items": [{"sku": "A", "qty": 2}, "loose"], "paid": True, "note": None, "n": 1.5},
        "from: ann\nitems:\n  - sku: A\n    qty: 2\n  - loose\npaid: True\nnote: \nn: 1.5",
    ),
    (
        ["first turn", {"role": "user", "text": "second"}, ["nested", 3]],
        "- first turn\n- role: user\n  text: second\n- - nested\n  - 3",
    ),
    ({"check": "is it paid", "steps": ["look", "answer"]}, "check: is it paid\nsteps:\n  - look\n  - answer"),
    # worked out from the published rule: texts keep their lines as they are, an empty object leaves an empty line
    ({"log": ["one\ntwo", "  led"], "none": {}, "last": "a\n b"}, "log:\n  - one\ntwo\n  - led\nnone:\n\nlast: a\n b"),
]


@pytest.mark.parametrize(("state", "text"), LINES)
def test_objects_as_lines_are_the_recorded_ones(state: Any, text: str) -> None:
    assert line_text(state) == text


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 60), 1 << 60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.lists(JSON_VALUES, max_size=4) | st.dictionaries(st.text(), JSON_VALUES, max_size=4))
def test_any_json_is_a_state_and_can_be_read_back(state: Any) -> None:
    check_state(state)
    assert json.loads(json_text(state)) == state
    assert isinstance(line_text(state), str)
