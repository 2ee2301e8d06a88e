"""/v1/decisions, driven by OpenAI's own client: what a decider is shown of an input, and what comes back in order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import OpenAI
from tests.server.conftest import KEYS, RunningServer, start_server
from tests.server.scripted import Scripted
from tests.server.test_any_json import VALUES, paths_of

from heedful import LLM
from heedful.decide import Choice, Likelihood, Noul, Score

PREDICATE = {"type": "predicate", "instructions": "Is money wanted back?", "name": "refund"}
TEAM = {
    "type": "choice",
    "instructions": "Who answers?",
    "choices": [{"value": "returns"}, {"value": "billing", "description": "owns invoices"}, {"value": "other"}],
}
ANGER = {
    "type": "score",
    "instructions": [{"type": "input_text", "text": "How upset is the writer?"}],
    "levels": [
        {"label": "calm"},
        {"label": "annoyed"},
        {"label": "angry", "description": "threatens"},
        {"label": "mad"},
    ],
    "name": "anger",
}


@pytest.fixture(scope="module")
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture(scope="module")
def deciding(tiny_dir: Path, scripted: Scripted) -> Iterator[RunningServer]:
    running = start_server(tiny_dir, load_decider=lambda name: scripted, deciders=("scripted",))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(deciding: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{deciding.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def create(client: OpenAI, given: Any, questions: list[Any], model: str = "scripted", **more: Any) -> Any:
    return client.decisions.create(model=model, input=given, questions=questions, **more)


def test_answers_come_in_order_with_the_contracts_numbers(client: OpenAI) -> None:
    """The probabilities, score and confidences are those of the System One examples."""
    decision = create(client, "Two charges for order 88", [ANGER, PREDICATE, TEAM, {**PREDICATE, "name": "refund"}])
    anger, refund, team, again = decision.answers
    assert (refund.type, refund.name, refund.probability) == ("predicate", "refund", 0.97)
    assert again == refund
    assert (team.type, team.name, team.choice) == ("choice", None, "billing")
    assert team.confidence == pytest.approx(0.685)
    assert [(one.value, one.probability) for one in team.probabilities] == [
        ("returns", 0.12),
        ("billing", 0.79),
        ("other", 0.09),
    ]
    assert (anger.type, anger.name, anger.score, anger.confidence) == ("score", "anger", 2.0, pytest.approx(0.5))
    assert [(one.label, one.value, one.probability) for one in anger.probabilities] == [
        ("calm", 0, 0.05),
        ("annoyed", 1, 0.15),
        ("angry", 2, 0.55),
        ("mad", 3, 0.25),
    ]
    assert decision.model == "scripted"
    usage = decision.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 0
    assert usage.output_tokens_details.reasoning_tokens == 0


def test_what_the_decider_is_asked(client: OpenAI, scripted: Scripted) -> None:
    create(client, "x", [PREDICATE, TEAM, ANGER])
    _, questions = scripted.asked[-1]
    assert questions == (
        Noul("0", "Is money wanted back?"),
        Choice("1", {"returns": None, "billing": "owns invoices", "other": None}, "Who answers?"),
        Score("2", ["calm", "annoyed", "angry: threatens", "mad"], "How upset is the writer?"),
    )


def test_a_text_and_a_boolean_of_the_same_letters(client: OpenAI, scripted: Scripted) -> None:
    choices = [{"value": "true"}, {"value": True}, {"value": False}]
    (answer,) = create(client, "x", [{"type": "choice", "instructions": "?", "choices": choices}]).answers
    assert answer.choice is True
    assert [one.value for one in answer.probabilities] == ["true", True, False]
    (question,) = scripted.asked[-1][1]
    assert question.labels == ("true", "(true)", "false")


INPUTS: list[tuple[Any, Any]] = [
    ("a text", "a text"),
    ([{"role": "user", "content": "a text"}], "a text"),
    ([{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a text"}]}], "a text"),
    ([{"role": "user", "content": [{"type": "input_json", "data": {"a": [1, None]}}]}], {"a": [1, None]}),
    (
        [{"role": "user", "content": [{"type": "input_text", "text": "b"}, {"type": "input_json", "data": [{}]}]}],
        ["b", [{}]],
    ),
    (
        [
            {"role": "developer", "content": "be strict"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "hello"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "found"}]},
            {"type": "custom_tool_call", "call_id": "d", "name": "run", "input": "ls"},
            {"type": "custom_tool_call_output", "call_id": "d", "output": "a.txt"},
        ],
        [
            {"role": "developer", "content": "be strict"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello"},
            {"role": "assistant", "content": "no"},
            {"call": "look", "with": '{"a": 1}'},
            {"output": "found"},
            {"call": "run", "with": "ls"},
            {"output": "a.txt"},
        ],
    ),
]


@pytest.mark.parametrize(("given_input", "state"), INPUTS)
def test_inputs_as_states(client: OpenAI, scripted: Scripted, given_input: Any, state: Any) -> None:
    create(client, given_input, [PREDICATE])
    assert scripted.asked[-1][0] == state


def test_a_chat_model_decides_as_on_a_path_of_its_own(client: OpenAI, tiny_dir: Path) -> None:
    decision = create(client, "I was charged twice", [PREDICATE], model="tiny", prompt_cache_key="mine")
    expected = Likelihood(LLM(str(tiny_dir), threads=1)).decide(
        "I was charged twice", [Noul("q", "Is money wanted back?")]
    )
    assert decision.answers[0].probability == pytest.approx(expected["q"].to_dict()["noul"], abs=1e-5)
    assert decision.usage.input_tokens == expected.receipt.prompt_tokens
    assert decision.usage.model_dump()["heedful"]["visits"]["total"] > 0


def test_cache_keys_part_states(client: OpenAI) -> None:
    def cached(key: str) -> int:
        decision = create(client, "the same beginning, " * 20, [PREDICATE], model="tiny", prompt_cache_key=key)
        return int(decision.usage.input_tokens_details.cached_tokens)

    first = cached("a")
    assert cached("a") > first
    assert cached("b") == first


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
REFUSED: list[tuple[Any, Any, str]] = [
    ("x", [], "questions"),
    ("x", [PREDICATE] * 401, "questions"),
    ("x", [{**TEAM, "choices": []}], "questions[0].choices"),
    ("x", [PREDICATE, {**TEAM, "choices": [{"value": str(i)} for i in range(256)]}], "questions[1].choices"),
    ("x", [{**TEAM, "choices": [{"value": "a"}, {"value": "a"}]}], "questions[0].choices"),
    ("x", [{**TEAM, "choices": [{"value": 3}]}], "questions[0].choices[0].value"),
    ("x", [{**ANGER, "levels": [{"label": "x"}] * 11}], "questions[0].levels"),
    ("x", [{**PREDICATE, "type": "cube"}], "questions[0].type"),
    ("x", [{**PREDICATE, "instructions": [IMAGE]}], "questions[0].instructions[0]"),
    ("x", [{**PREDICATE, "instructions": []}], "questions[0].instructions"),
    ([], [PREDICATE], "input"),
    ([{"role": "user", "content": [{"type": "input_text", "text": "x"}, IMAGE]}], [PREDICATE], "input[0].content[1]"),
    ([{"role": "user", "content": [{"type": "input_json", "data": [3]}]}], [PREDICATE], "input[0].content[0].data"),
    ([{"role": "king", "content": "x"}], [PREDICATE], "input[0].role"),
    ([{"role": "user", "content": None}], [PREDICATE], "input[0].content"),
    ([{"type": "reasoning"}], [PREDICATE], "input[0].type"),
    ([{"type": "function_call", "name": "x"}], [PREDICATE], "input[0].arguments"),
    ([{"role": "user", "content": [{"type": "input_json", "data": {"a": 1 << 128}}]}], [PREDICATE], "input"),
]


@pytest.mark.parametrize(("given_input", "questions", "field"), REFUSED)
def test_what_is_refused_names_its_place(client: OpenAI, given_input: Any, questions: Any, field: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, given_input, questions)
    assert refused.value.param == field
    assert refused.value.type == "invalid_request_error"
    assert refused.value.response.headers["x-typesafe-request-id"].startswith("req_")


def test_refusals_that_the_client_knows(client: OpenAI, deciding: RunningServer, tiny_dir: Path) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-6-luna"):
        create(client, "x", [PREDICATE], model="gpt-6-luna")
    with pytest.raises(openai.BadRequestError, match=r"2,048") as over:
        create(client, "a" * 3000, [PREDICATE], model="tiny")
    assert over.value.code == "context_length_exceeded"
    body = json.dumps({"input": "x", "questions": [PREDICATE]}).encode()
    answer = httpx.post(
        f"{deciding.url}/v1/decisions", content=zstd.compress(body), headers={"content-encoding": "zstd"}
    )
    assert answer.json()["model"] == "scripted"
    running = start_server(tiny_dir, api_keys=KEYS)
    try:
        assert httpx.post(f"{running.url}/v1/decisions", content=body).json()["error"]["code"] == "invalid_api_key"
    finally:
        running.stop()


TEMPLATE: dict[str, Any] = {
    "model": "scripted",
    "input": [*INPUTS[4][0], *INPUTS[5][0]],
    "questions": [PREDICATE, TEAM, ANGER],
    "prompt_cache_key": "x",
}


@pytest.fixture(scope="module")
def http(deciding: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=deciding.url, timeout=60) as made:
        assert made.post("/v1/decisions", json=TEMPLATE).status_code == 200
        yield made


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_json_anywhere(http: httpx.Client, data: st.DataObject) -> None:
    body = json.loads(json.dumps(TEMPLATE))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(list(paths_of(body))))
        holder: Any = body
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = data.draw(VALUES)
    answer = http.post("/v1/decisions", content=json.dumps(body))
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
