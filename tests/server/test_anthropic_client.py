"""Anthropic's own client against the server, answers checked by the client's types, texts by the engine's own path."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Literal

import anthropic
import pytest
from pydantic import BaseModel
from tests.server.running import KEYS, RunningServer

from heedful.engine.llm import LLM
from heedful.errors import BadLogits
from heedful.server.asks import ChatTurn, Delta
from heedful.text.tool_calls import TextDelta

ASKED: list[Any] = [{"role": "user", "content": "Hello"}]
ADD: dict[str, Any] = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
GREEDY = {"temperature": 0}
"""In a body of its own: later clients no longer know the parameter."""
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


def forced(text: str) -> Any:
    return {"output_config": {"format": {"type": "choice", "choice": [text]}}}


def test_an_answer_is_the_engines_own(client: anthropic.Anthropic, llm: LLM) -> None:
    answer = client.messages.create(model="tiny", system="Be brief.", messages=ASKED, max_tokens=16, extra_body=GREEDY)
    messages = [{"role": "system", "content": "Be brief."}, *ASKED]
    own = llm.chat(messages, max_tokens=16)
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].type == "text"
    assert answer.content[0].text == own.text
    assert (answer.model, answer.role, answer.stop_reason, answer.stop_sequence) == (
        "tiny",
        "assistant",
        "max_tokens",
        None,
    )
    usage = answer.usage
    read = (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
    assert None not in read
    assert sum(tokens or 0 for tokens in read) == len(own.prompt_token_ids)
    assert usage.output_tokens == len(own.token_ids)
    assert usage.model_extra is not None
    assert usage.model_extra["heedful"]["cached_tokens"] == usage.cache_read_input_tokens


def test_blocks_say_what_texts_say(client: anthropic.Anthropic, llm: LLM) -> None:
    system: Any = [
        {"type": "text", "text": "Be "},
        {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}},
    ]
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "?", "signature": "s"}, {"type": "text", "text": "Hi"}],
        },
        {"role": "user", "content": "Go on."},
    ]
    answer = client.messages.create(model="tiny", system=system, messages=turns, max_tokens=8, extra_body=GREEDY)
    said = [
        {"role": "system", "content": "Be brief."},
        *ASKED,
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Go on."},
    ]
    assert answer.content[0].type == "text"
    assert answer.content[0].text == llm.chat(said, max_tokens=8).text


def test_a_streamed_answer_is_the_same(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": ASKED, "max_tokens": 12, "extra_body": GREEDY}
    whole = client.messages.create(**asked)
    events = list(client.messages.create(**asked, stream=True))
    kinds = [event.type for event in events]
    deltas = kinds.count("content_block_delta")
    assert deltas > 1
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]  # the client itself drops the ping
    with client.messages.stream(**asked) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert [(block.type, block.text) for block in final.content if block.type == "text"] == [("text", "".join(texts))]
    assert whole.content[0].type == "text"
    assert "".join(texts) == whole.content[0].text
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, None)
    assert final.usage.output_tokens == 12
    assert total(final.usage) == total(whole.usage)


def total(usage: anthropic.types.Usage) -> int:
    """Input tokens, from the cache or not."""
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_sequence(client: anthropic.Anthropic, streams: bool) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": ASKED, "max_tokens": 50, "stop_sequences": ["x", "def"]}
    asked["extra_body"] = forced("abcdefgh")
    answer = final_message(client, asked) if streams else client.messages.create(**asked)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "def")
    assert answer.content[0].type == "text"
    assert answer.content[0].text == "abc"


def final_message(client: anthropic.Anthropic, asked: dict[str, Any]) -> Any:
    with client.messages.stream(**asked) as stream:
        return stream.get_final_message()


def test_an_answer_to_its_own_end(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model="tiny", messages=ASKED, max_tokens=50, extra_body=forced("Done."))
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)


@pytest.mark.parametrize("streams", [False, True])
def test_calls_that_the_model_chooses_to_make(client: anthropic.Anthropic, streams: bool) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": ASKED, "max_tokens": 400, "tools": [ADD]}
    asked["extra_body"] = forced(f"Both.\n{CALL}\n{CALL}")
    answer = final_message(client, asked) if streams else client.messages.create(**asked)
    assert answer.stop_reason == "tool_use"
    assert [block.type for block in answer.content] == ["text", "tool_use", "tool_use"]
    assert answer.content[0].text.strip() == "Both."
    assert [(block.name, block.input) for block in answer.content[1:]] == [("add", {"a": 1})] * 2
    assert len({block.id for block in answer.content[1:]}) == 2


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_a_call_that_is_required(client: anthropic.Anthropic, choice: Any, streams: bool) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": ASKED, "max_tokens": 300, "extra_body": GREEDY}
    asked |= {"tools": [ADD], "tool_choice": choice}
    answer = final_message(client, asked) if streams else client.messages.create(**asked)
    assert answer.stop_reason == "tool_use"
    assert [block.type for block in answer.content] == ["tool_use"]
    assert set(answer.content[0].input) == {"a"}
    assert answer.content[0].input["a"] in range(10)


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_that_is_cut_off_is_no_tool_use(client: anthropic.Anthropic, streams: bool) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": ASKED, "max_tokens": 42, "extra_body": GREEDY, "tools": [ADD]}
    asked["tool_choice"] = {"type": "any"}
    answer = final_message(client, asked) if streams else client.messages.create(**asked)
    assert answer.stop_reason == "max_tokens"
    assert answer.content[0].input == {}


def test_no_calls_when_none_are_wanted(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        model="tiny",
        messages=ASKED,
        max_tokens=200,
        tools=[ADD],
        tool_choice={"type": "none"},
        extra_body=forced(CALL),
    )
    assert answer.content[0].type == "text"
    assert answer.content[0].text == CALL


def test_results_of_calls(client: anthropic.Anthropic) -> None:
    """An answer's own blocks go back as they came, with a result behind them."""
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 300, "extra_body": GREEDY, "tools": [ADD]}
    first = client.messages.create(**asked, messages=ASKED, tool_choice={"type": "any"})
    call = first.content[0]
    assert call.type == "tool_use"
    counts = []
    for result in ("42", "42 apples", [{"type": "text", "text": "42"}, {"type": "text", "text": " apples"}]):
        told = {"type": "tool_result", "tool_use_id": call.id, "content": result}
        turns: list[Any] = [
            *ASKED,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [told]},
        ]
        counts.append(total(client.messages.create(**{**asked, "max_tokens": 2}, messages=turns).usage))
    assert [count - counts[0] for count in counts] == [0, len(" apples"), len(" apples")]  # a token a byte


def test_a_tokens_count_is_what_an_answer_reads(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": ASKED, "system": "Be brief.", "tools": [ADD]}
    counted = client.messages.count_tokens(**asked).input_tokens
    assert counted == total(client.messages.create(**asked, max_tokens=1).usage)
    assert counted > client.messages.count_tokens(model="tiny", messages=ASKED).input_tokens


class Verdict(BaseModel):
    colour: Literal["red", "green"]
    is_sure: bool


def test_an_answer_under_a_schema(client: anthropic.Anthropic) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": Verdict.model_json_schema()}}
    answer = client.messages.create(model="tiny", messages=ASKED, max_tokens=300, extra_body=GREEDY, output_config=form)
    assert answer.content[0].type == "text"
    assert Verdict.model_validate(json.loads(answer.content[0].text))


# ---- Errors -----------------------------------------------------------------------------------------------------

BAD: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_tokens": 0}),
    ("temperature", {"extra_body": {"temperature": 3}}),
    ("messages", {"messages": []}),
    ("messages", {"messages": [{"role": "robot", "content": "x"}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
    ("messages", {"messages": [*ASKED, {"role": "assistant", "content": "Well,"}]}),
    ("messages", {"messages": [{"role": "user", "content": "x" * 5000}]}),
    ("system", {"system": [{"type": "image"}]}),
    ("tools", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ("tools", {"tools": [{"name": "a b", "input_schema": {}}]}),
    ("tool_choice", {"tools": [ADD], "tool_choice": {"type": "tool", "name": "other"}}),
    ("tool_choice", {"tools": [ADD], "tool_choice": {"type": "perhaps"}}),
    ("stop_sequences", {"stop_sequences": ["x"] * 99}),
    ("output_config.format", {"extra_body": {"output_config": {"format": {"type": "yaml"}}}}),
]


@pytest.mark.parametrize(("field", "fields"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_wrong_is_named(client: anthropic.Anthropic, field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**{"model": "tiny", "messages": ASKED, "max_tokens": 2, **fields})
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith(f"{field}: ")


def test_max_tokens_must_be_given(server: RunningServer, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.post("/v1/messages", body={"model": "tiny", "messages": ASKED}, cast_to=object)


def test_an_unknown_model(client: anthropic.Anthropic) -> None:
    for call in (client.messages.create, client.messages.count_tokens):
        with pytest.raises(anthropic.NotFoundError) as caught:
            call(**{"model": "none", "messages": ASKED} | ({"max_tokens": 2} if call == client.messages.create else {}))
        body: Any = caught.value.body
        assert body["error"]["type"] == "not_found_error"


def test_keys(locked_server: RunningServer) -> None:
    with anthropic.Anthropic(base_url=locked_server.url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            stranger.messages.create(model="tiny", messages=ASKED, max_tokens=2)
        body: Any = caught.value.body
        assert body["error"]["type"] == "authentication_error"
    with anthropic.Anthropic(base_url=locked_server.url, api_key=KEYS[1], max_retries=0) as known:
        assert known.messages.create(model="tiny", messages=ASKED, max_tokens=2).usage.output_tokens <= 2


def test_an_error_in_a_stream(client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    async def deltas(turn: ChatTurn) -> AsyncGenerator[Delta, None]:
        yield Delta((TextDelta("so far"),))
        raise BadLogits("the model computed nothing usable")

    monkeypatch.setattr(ChatTurn, "deltas", deltas)
    with pytest.raises(anthropic.APIStatusError, match="nothing usable"):
        list(client.messages.create(model="tiny", messages=ASKED, max_tokens=8, stream=True))
