"""The Responses API through OpenAI's own client, which checks every answer and event against its types."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel
from tests.server.running import KEYS, RunningServer

from heedful.engine.llm import LLM
from heedful.errors import BadLogits
from heedful.server.asks import ChatTurn, Delta
from heedful.text.tool_calls import TextDelta

ADD: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


@pytest.fixture(scope="module")
def lenient_client(server: RunningServer) -> Iterator[openai.OpenAI]:
    """For formats of our own, which an answer repeats and the client's types don't have."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def forced(text: str) -> Any:
    return {"format": {"type": "choice", "choice": [text]}}


def test_an_answer_is_the_engines_own(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.responses.create(
        model="tiny",
        instructions="Be brief.",
        input="Hello",
        temperature=0,
        max_output_tokens=16,
        metadata={"of": "a test"},
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    own = llm.chat(messages, max_tokens=16)
    assert answer.output_text == own.text
    assert (answer.status, answer.model, answer.metadata) == ("incomplete", "tiny", {"of": "a test"})
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    usage = answer.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens) == (len(own.prompt_token_ids), 16)
    assert usage.total_tokens == usage.input_tokens + 16
    assert usage.model_extra is not None
    assert usage.model_extra["heedful"]["cached_tokens"] == usage.input_tokens_details.cached_tokens


@pytest.mark.parametrize(
    "given",
    [
        [{"role": "user", "content": "Hello"}],
        [
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": part} for part in ("Hel", "lo")],
            }
        ],
        [{"type": "reasoning", "id": "r", "summary": []}, {"role": "user", "content": "Hello"}],
    ],
)
def test_items_say_what_a_text_says(client: openai.OpenAI, llm: LLM, given: Any) -> None:
    answer = client.responses.create(model="tiny", input=given, temperature=0, max_output_tokens=8)
    assert answer.output_text == llm.chat([{"role": "user", "content": "Hello"}], max_tokens=8).text


def test_a_streamed_answer_is_the_same(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "Hello", "temperature": 0, "max_output_tokens": 12}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    before = ["created", "in_progress", "output_item.added", "content_part.added"]
    after = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds == [*before, *["output_text.delta"] * deltas, *after]
    assert deltas > 1
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    assert [event.text for event in events if event.type == "response.output_text.done"] == [text]
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == text
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == 12
    item = last.response.output[0]
    for event in events:
        if event.type in ("response.output_item.added", "response.output_item.done"):
            assert event.item.id == item.id
        if event.type == "response.output_item.done":
            assert event.item == item
        if event.type == "response.output_text.delta":
            assert (event.item_id, event.output_index, event.content_index) == (item.id, 0, 0)


def test_text_and_calls(lenient_client: openai.OpenAI) -> None:
    """An answer that the model chose to end with two calls, whole and streamed."""
    text = f"Both.\n{CALL}\n{CALL}"
    asked: dict[str, Any] = {"model": "tiny", "input": "Add.", "tools": [ADD], "text": forced(text)}
    whole = lenient_client.responses.create(**asked)
    assert whole.status == "completed"
    assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
    assert whole.output_text.strip() == "Both."
    calls = [item for item in whole.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments), call.status) for call in calls] == [
        ("add", {"a": 1}, "completed")
    ] * 2
    assert len({call.call_id for call in calls}) == 2
    events = list(lenient_client.responses.create(**asked, stream=True))
    last = events[-1]
    assert last.type == "response.completed"
    assert shapes(last.response) == shapes(whole)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.response.output
    for item in last.response.output[1:]:
        assert item.type == "function_call"
        deltas = [
            e.delta for e in events if e.type == "response.function_call_arguments.delta" and e.item_id == item.id
        ]
        assert "".join(deltas) == item.arguments
        ends = [
            e.arguments for e in events if e.type == "response.function_call_arguments.done" and e.item_id == item.id
        ]
        assert ends == [item.arguments]


def shapes(response: Response) -> list[Any]:
    """The output without its ids."""
    return [item.model_dump(exclude={"id", "call_id"}) for item in response.output]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}])
def test_a_call_that_is_required(client: openai.OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "Add.", "tools": [ADD], "tool_choice": choice, "temperature": 0}
    answer = client.responses.create(**asked, max_output_tokens=300)
    assert [item.type for item in answer.output] == ["function_call"]
    call = answer.output[0]
    assert call.type == "function_call"
    assert json.loads(call.arguments)["a"] in range(10)
    assert answer.tools[0].type == "function"
    assert (answer.tools[0].name, answer.tools[0].parameters) == ("add", ADD["parameters"])
    events = list(client.responses.create(**asked, max_output_tokens=300, stream=True))
    assert events[-1].type == "response.completed"
    assert shapes(events[-1].response) == shapes(answer)


def test_a_call_that_is_cut_off(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="tiny", input="Add.", tools=[ADD], tool_choice="required", temperature=0, max_output_tokens=42
    )
    call = answer.output[0]
    assert call.type == "function_call"
    assert (answer.status, call.status) == ("incomplete", "incomplete")
    goes_on = client.responses.create(model="tiny", input="Go on.", previous_response_id=answer.id, max_output_tokens=2)
    assert goes_on.usage is not None


class Verdict(BaseModel):
    colour: Literal["red", "green"]
    is_sure: bool


def test_parse(client: openai.OpenAI) -> None:
    answer = client.responses.parse(
        model="tiny", input="Red?", text_format=Verdict, temperature=0, max_output_tokens=300
    )
    assert isinstance(answer.output_parsed, Verdict)
    with client.responses.stream(
        model="tiny", input="Red?", text_format=Verdict, temperature=0, max_output_tokens=300
    ) as stream:
        assert stream.get_final_response().output_parsed == answer.output_parsed


def test_a_json_object(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"x": {"const": 4}}, "required": ["x"], "additionalProperties": False}
    answer = client.responses.create(
        model="tiny",
        input="x?",
        text={"format": {"type": "json_schema", "name": "x", "schema": schema}},
        max_output_tokens=200,
        temperature=0,
    )
    assert json.loads(answer.output_text) == {"x": 4}


# ---- Conversations that go on -----------------------------------------------------------------------------------


def test_a_conversation_goes_on(client: openai.OpenAI, llm: LLM) -> None:
    first = client.responses.create(
        model="tiny", instructions="Sing.", input="Hello", temperature=0, max_output_tokens=6
    )
    second = client.responses.create(
        model="tiny", input="And then?", previous_response_id=first.id, temperature=0, max_output_tokens=6
    )
    third = client.responses.create(
        model="tiny", input="So?", previous_response_id=second.id, temperature=0, max_output_tokens=6
    )
    said = [  # instructions are those of one answer
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And then?"},
    ]
    assert second.output_text == llm.chat(said, max_tokens=6).text
    said += [{"role": "assistant", "content": second.output_text}, {"role": "user", "content": "So?"}]
    assert third.output_text == llm.chat(said, max_tokens=6).text
    assert third.previous_response_id == second.id
    assert third.usage is not None
    assert third.usage.input_tokens == len(llm.encode_chat(said))


def test_results_of_calls(client: openai.OpenAI) -> None:
    """The same whether the conversation is sent again or referred to."""
    asked: dict[str, Any] = {"model": "tiny", "tools": [ADD], "temperature": 0}
    first = client.responses.create(**asked, input="Add.", tool_choice="required", max_output_tokens=300)
    call = first.output[0]
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    referred = client.responses.create(**asked, input=[result], previous_response_id=first.id, max_output_tokens=8)
    items: list[Any] = [{"role": "user", "content": "Add."}, call.model_dump(exclude_none=True), result]
    sent = client.responses.create(**asked, input=items, max_output_tokens=8)
    assert shapes(referred) == shapes(sent)
    assert referred.usage is not None
    assert sent.usage is not None
    assert referred.usage.input_tokens == sent.usage.input_tokens


def test_stored_answers(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input="Hello", max_output_tokens=4)
    assert client.responses.retrieve(answer.id) == answer
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(answer.id)
    streamed = list(client.responses.create(model="tiny", input="Hello", max_output_tokens=4, stream=True))[-1]
    assert streamed.type == "response.incomplete"
    assert client.responses.retrieve(streamed.response.id) == streamed.response
    unstored = client.responses.create(model="tiny", input="Hello", max_output_tokens=4, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="tiny", input="Go on.", previous_response_id=unstored.id)
    assert caught.value.param == "previous_response_id"


def test_another_callers_answers_are_not_there(locked_server: RunningServer) -> None:
    base_url = f"{locked_server.url}/v1"
    with (
        openai.OpenAI(base_url=base_url, api_key=KEYS[0], max_retries=0) as mine,
        openai.OpenAI(base_url=base_url, api_key=KEYS[1], max_retries=0) as theirs,
    ):
        answer = mine.responses.create(model="tiny", input="A secret.", max_output_tokens=2)
        assert mine.responses.retrieve(answer.id).id == answer.id
        for attempt in (
            lambda: theirs.responses.retrieve(answer.id),
            lambda: theirs.responses.delete(answer.id),
            lambda: theirs.responses.create(model="tiny", input="Tell me.", previous_response_id=answer.id),
        ):
            with pytest.raises(openai.NotFoundError):
                attempt()
        mine.responses.delete(answer.id)


# ---- Errors -----------------------------------------------------------------------------------------------------

BAD: list[tuple[str, dict[str, Any]]] = [
    ("input", {"input": []}),
    ("input", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
    ("input", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("input", {"input": [{"role": "robot", "content": "x"}]}),
    ("input", {"input": "x" * 5000}),
    ("tools", {"tools": [{"type": "web_search"}]}),
    ("tool_choice", {"tools": [ADD], "tool_choice": {"type": "function", "name": "other"}}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("temperature", {"temperature": 3}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
    ("text.format", {"text": {"format": {"type": "yaml"}}}),
    ("text.format", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "none"}}}}),
    ("text.format", {"text": {"format": {"type": "json_object"}}, "tools": [ADD], "tool_choice": "required"}),
    ("background", {"background": True}),
    ("conversation", {"conversation": "c"}),
    ("top_logprobs", {"top_logprobs": 2}),
]


@pytest.mark.parametrize(("field", "fields"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_wrong_is_named(client: openai.OpenAI, field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "tiny", "input": "Hello", **fields})
    assert caught.value.param == field


def test_an_error_in_a_stream_is_its_last_event(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    async def deltas(turn: ChatTurn) -> AsyncGenerator[Delta, None]:
        yield Delta((TextDelta("so far"),))
        raise BadLogits("the model computed nothing usable")

    monkeypatch.setattr(ChatTurn, "deltas", deltas)
    events = list(client.responses.create(model="tiny", input="Hello", stream=True))
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert "nothing usable" in last.response.error.message
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(last.response.id)
