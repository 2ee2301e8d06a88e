"""OpenAI's own client against the server, answers checked by the client's types, texts by the engine's own path."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel
from tests.server.running import KEYS, RunningServer

from heedful.engine.embedder import load_embedder
from heedful.engine.llm import LLM

ASKED: list[Any] = [{"role": "user", "content": "Say something."}]
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "sure": {"type": "boolean"}},
    "required": ["a", "sure"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}},
    {"type": "function", "function": {"name": "now"}},
]
TWO_CALLS = (
    'Both.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "sure": true}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


def forced(text: str) -> dict[str, Any]:
    """The answer is this text: the only choice there is."""
    return {"response_format": {"type": "choice", "choice": [text]}}


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


@pytest.fixture(scope="module")
def lenient_client(server: RunningServer) -> Iterator[openai.OpenAI]:
    """For answers that OpenAI itself gives and the client's types don't have: null in columns of numbers, base64."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


# ---- Chat -------------------------------------------------------------------------------------------------------


def test_an_answer_is_the_engines_own(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.chat.completions.create(model="tiny", messages=ASKED, temperature=0, max_tokens=20)
    own = llm.chat(ASKED, max_tokens=20)
    assert answer.choices[0].message.content == own.text
    assert answer.choices[0].finish_reason == own.finish_reason == "length"
    assert answer.model == "tiny"
    assert answer.id.startswith("chatcmpl-")
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(own.prompt_token_ids), len(own.token_ids))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.model_extra is not None
    assert usage.model_extra["heedful"]["output_tokens"] == 20


def test_a_streamed_answer_is_the_same(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": ASKED, "temperature": 0, "max_completion_tokens": 24}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert joined(chunks) == whole.choices[0].message.content
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    usage, expected = chunks[-1].usage, whole.usage
    assert usage is not None
    assert expected is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.prompt_tokens, expected.completion_tokens)


def joined(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_a_stream_without_usage_brings_none(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="tiny", messages=ASKED, max_tokens=3, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_choices_and_seeds(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": ASKED, "temperature": 1.5, "seed": 7, "max_tokens": 16}
    three = client.chat.completions.create(**asked, n=3)
    texts = [choice.message.content for choice in three.choices]
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert client.chat.completions.create(**asked).choices[0].message.content == texts[0]
    chunks = list(client.chat.completions.create(**asked, n=3, stream=True))
    assert [joined(chunks, index) for index in range(3)] == texts
    assert three.usage is not None
    assert three.usage.completion_tokens <= 48


@pytest.mark.parametrize("stop", ["def", ["xyz", "def", "gh"]])
def test_a_stop_string_ends_the_answer(client: openai.OpenAI, stop: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": ASKED, "stop": stop, "extra_body": forced("abcdefgh")}
    choice = client.chat.completions.create(**asked).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("abc", "stop")
    assert choice.model_extra is not None
    assert choice.model_extra["stop_reason"] == "def"
    assert joined(list(client.chat.completions.create(**asked, stream=True))) == "abc"


def test_logprobs(client: openai.OpenAI, llm: LLM) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": ASKED, "temperature": 0, "max_tokens": 12}
    asked |= {"logprobs": True, "top_logprobs": 3}
    choice = client.chat.completions.create(**asked).choices[0]
    own = llm.chat(ASKED, max_tokens=12, logprobs=3)
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert own.logprobs is not None
    found = choice.logprobs.content
    assert [token.logprob for token in found] == pytest.approx([logprob.logprob for logprob in own.logprobs], abs=1e-4)
    assert all(len(token.top_logprobs) == 3 and token.top_logprobs[0].bytes == token.bytes for token in found)
    data = b"".join(bytes(token.bytes or []) for token in found)
    assert data.decode("utf-8", "replace") == choice.message.content
    streamed = [
        token
        for chunk in client.chat.completions.create(**asked, stream=True)
        for token in (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or []
    ]
    assert [token.bytes for token in streamed] == [token.bytes for token in found]


# ---- Tools ------------------------------------------------------------------------------------------------------


def test_calls_that_the_model_chooses_to_make(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": ASKED, "tools": TOOLS, "extra_body": forced(TWO_CALLS)}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content or "").strip() == "Both."
    calls = choice.message.tool_calls
    assert calls is not None
    made = [(call.function.name, json.loads(call.function.arguments)) for call in calls if call.type == "function"]
    assert made == [("add", {"a": 1, "sure": True}), ("now", {})]
    assert len({call.id for call in calls}) == 2
    assert streamed_calls(client, asked) == made


def streamed_calls(client: openai.OpenAI, asked: dict[str, Any]) -> list[tuple[str, Any]]:
    names, arguments, finish = {}, {}, None
    for chunk in client.chat.completions.create(**asked, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.function is not None
            if call.id:
                assert call.index not in names
                assert call.function.name
                names[call.index], arguments[call.index] = call.function.name, ""
            arguments[call.index] += call.function.arguments or ""
        finish = chunk.choices[0].finish_reason or finish
    assert finish == "tool_calls"
    return [(names[i], json.loads(arguments[i])) for i in sorted(names)]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_that_is_required(client: openai.OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": ASKED, "tools": TOOLS[:1], "tool_choice": choice}
    asked |= {"temperature": 0, "max_tokens": 400}
    answer = client.chat.completions.create(**asked).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    assert answer.message.tool_calls is not None
    assert len(answer.message.tool_calls) == 1
    call = answer.message.tool_calls[0]
    assert call.type == "function"
    assert call.function.name == "add"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"a", "sure"}
    assert arguments["a"] in range(10)
    assert isinstance(arguments["sure"], bool)
    assert streamed_calls(client, asked) == [("add", arguments)]


def test_a_named_tool_among_several(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "now"}}
    answer = client.chat.completions.create(
        model="tiny", messages=ASKED, tools=TOOLS, tool_choice=choice, temperature=0, max_tokens=200
    )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert [(c.function.name, c.function.arguments) for c in calls if c.type == "function"] == [("now", "{}")]


def test_no_calls_when_none_are_wanted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=ASKED, tools=TOOLS, tool_choice="none", extra_body=forced(TWO_CALLS)
    )
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content == TWO_CALLS


def test_results_of_calls_are_read(client: openai.OpenAI) -> None:
    call: Any = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: list[Any] = [*ASKED, {"role": "assistant", "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "c1", "content": "three"})
    short = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, max_tokens=2)
    messages[-1] = {**messages[-1], "content": "three hundred"}
    long = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, max_tokens=2)
    assert short.usage is not None
    assert long.usage is not None
    assert long.usage.prompt_tokens - short.usage.prompt_tokens == len(" hundred")  # a token a byte


class Verdict(BaseModel):
    colour: Literal["red", "green"]
    is_sure: bool


def test_parse(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=ASKED, response_format=Verdict, temperature=0, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Verdict)


def test_parse_a_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=ASKED, response_format=Verdict, temperature=0, max_tokens=200
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Verdict)


# ---- Completions ------------------------------------------------------------------------------------------------


def test_completions(client: openai.OpenAI, lenient_client: openai.OpenAI, llm: LLM) -> None:
    prompts = ["Once upon", "The end"]
    answer = client.completions.create(model="tiny", prompt=prompts, temperature=0, max_tokens=10)
    owns = [llm.generate(prompt, max_tokens=10) for prompt in prompts]
    assert [choice.text for choice in answer.choices] == [own.text for own in owns]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(prompt) for prompt in prompts)
    assert answer.usage.completion_tokens == 20
    by_ids = client.completions.create(
        model="tiny", prompt=llm.tokenizer.encode(prompts[0]), temperature=0, max_tokens=10
    )
    assert by_ids.choices[0].text == owns[0].text
    streamed = lenient_client.completions.create(
        model="tiny", prompt=prompts, temperature=0, max_tokens=10, stream=True
    )
    texts = ["", ""]
    for chunk in streamed:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [own.text for own in owns]


def test_an_echoed_prompt_with_logprobs(lenient_client: openai.OpenAI, llm: LLM) -> None:
    answer = lenient_client.completions.create(model="tiny", prompt="abc", echo=True, logprobs=2, max_tokens=0)
    choice = answer.choices[0]
    assert choice.text == "abc"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "c"]
    assert choice.logprobs.text_offset == [0, 1, 2]
    own = llm.generate("abc", prompt_logprobs=2, max_tokens=1).prompt_logprobs
    assert own is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx([logprob.logprob for logprob in own], abs=1e-4)


# ---- Embeddings, models -----------------------------------------------------------------------------------------


def test_embeddings(client: openai.OpenAI, lenient_client: openai.OpenAI, server: RunningServer) -> None:
    texts = ["a cat", "a dog that barks"]
    packed = lenient_client.embeddings.create(model="tiny", input=texts)  # the client asks for base64 and unpacks it
    plain = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    own = load_embedder(str(server.model_dir), threads=1).embed(texts)
    for answer in (packed, plain):
        found = np.array([item.embedding for item in answer.data], np.float32)
        assert np.abs(found - own.vectors).max() < 1e-6
        assert [item.index for item in answer.data] == [0, 1]
        assert answer.usage.prompt_tokens == sum(own.token_counts)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "other"]
    assert client.models.retrieve("other").id == "other"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none such")


# ---- Errors -----------------------------------------------------------------------------------------------------

BAD: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"temperature": 5}),
    ("top_p", {"top_p": -1}),
    ("n", {"n": 1000}),
    ("messages", {"messages": []}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "no spaces"}}]}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}),
    ("top_logprobs", {"top_logprobs": 3}),
    ("response_format.json_schema.schema", {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
    ("heedful.window", {"extra_body": {"heedful": {"window": 1 << 31}}}),  # no number for a kernel
    ("heedful.kv", {"extra_body": {"heedful": {"kv": "q99"}}}),
    ("max_tokens", {"max_tokens": 0}),
    ("logit_bias", {"logit_bias": {"one": 1}}),
]


@pytest.mark.parametrize(("field", "fields"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_wrong_is_named(client: openai.OpenAI, field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": ASKED, **fields})
    assert caught.value.param == field
    assert caught.value.type == "invalid_request_error"


def test_a_prompt_that_is_too_long(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 5000}])
    assert caught.value.code == "context_length_exceeded"
    assert "2,048" in caught.value.message
    cut: Any = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x" * 5000}, *ASKED],
        max_tokens=4,
        extra_body={"heedful": {"truncate": True}},
    )
    assert cut.usage.heedful["dropped_tokens"] >= 5000


def test_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-none", messages=ASKED)
    assert caught.value.code == "model_not_found"
    assert "tiny" in caught.value.message


def test_keys(locked_server: RunningServer) -> None:
    base_url = f"{locked_server.url}/v1"
    with openai.OpenAI(base_url=base_url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as caught:
            stranger.models.list()
        assert caught.value.code == "invalid_api_key"
    with openai.OpenAI(base_url=base_url, api_key=KEYS[0], max_retries=0) as known:
        assert [model.id for model in known.models.list()] == ["tiny", "other"]
