"""The model `auto` by the other APIs: OpenAI's Responses and old completions, Anthropic's Messages, by their own
clients. What a target answers there is what it answers when it is asked itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from tests.router.policies import Keyed, policy_of
from tests.router.upstream import Upstream, upstream
from tests.server.running import RunningServer, start_server

from heedful.decide.question import Question, State

POLICY = """\
version: 1
targets:
  labels: {kind: decider, model: keyed, question: [good, bad], say: {good: It is good.}}
  small: {kind: local, model: tiny}
  other: {kind: openai, base_url: "UP/v1", model: tiny, retries: 0, timeout_s: 60}
  broken: {kind: openai, base_url: "BROKEN", model: m, retries: 0, breaker: {failures: 50}}
  cut: {kind: openai, base_url: "CUT", model: m, retries: 0, breaker: {failures: 50}}
rules:
  - {match: '^broken\\b', to: broken}
  - {match: '^alone\\b', to: cut}
  - {match: '^other\\b', to: other}
decision: {model: keyed, timeout_s: 60, questions: {intent: [sentiment, chat]}}
routes:
  - {to: labels, when: intent == "sentiment", min_p: 0.8}
default: small
fallbacks: {broken: small}
"""
NOW = {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}
GREEDY: Any = {"extra_body": {"temperature": 0}}
"""For Anthropic's client, whose later versions no longer know the parameter."""
TEXTS = pytest.mark.parametrize(("text", "target"), [("Say something.", "small"), ("other", "other")])


def says(state: State, question: Question) -> list[float]:
    return [0.9, 0.1] if "review" in str(state) or question.name == "label" else [0.1, 0.9]


@pytest.fixture(scope="module")
def bad() -> Iterator[Upstream]:
    with upstream() as made:
        yield made


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path, bad: Upstream) -> Iterator[RunningServer]:
    up = start_server(tiny_dir)
    text = POLICY.replace("UP", up.url)
    text = text.replace("BROKEN", bad.base_url("broken")).replace("CUT", bad.base_url("cut"))
    policy = policy_of(tmp_path_factory.mktemp("policy"), text)
    running = start_server(tiny_dir, load_decider=lambda name: Keyed(says), policy=policy)
    yield running
    running.stop()
    up.stop()


@pytest.fixture(scope="module")
def client(routed: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{routed.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


@pytest.fixture(scope="module")
def claude(routed: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=routed.url, api_key="none", max_retries=0) as made:
        yield made


def headers_of(raw: Any) -> tuple[str, str]:
    return raw.headers["x-heedful-route"], raw.headers["x-heedful-route-reason"]


def direct(client: openai.OpenAI, text: str, most: int = 8, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=most, **more)


# ---- Responses ----------------------------------------------------------------------------------------------------


@TEXTS
def test_a_response_is_the_targets_own(client: openai.OpenAI, text: str, target: str) -> None:
    asked: Any = {"model": "auto", "input": text, "temperature": 0, "max_output_tokens": 8}
    raw = client.responses.with_raw_response.create(**asked)
    answer = raw.parse()
    there = direct(client, text)
    assert answer.output_text == there.choices[0].message.content
    assert (headers_of(raw)[0], answer.model) == (target, "tiny")
    assert (answer.status, answer.usage.output_tokens, answer.usage.input_tokens) == (
        "incomplete",
        8,
        there.usage.prompt_tokens,
    )
    assert answer.usage.model_extra["heedful"]["route"]["target"] == target
    assert answer.usage.model_extra["heedful"]["visits"]["dense"] > 0
    events = list(client.responses.create(**asked, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == answer.output_text
    last = events[-1].response
    assert (last.output_text, last.usage.output_tokens) == (answer.output_text, 8)
    assert last.usage.model_extra["heedful"]["route"]["cause"] == headers_of(raw)[1]


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    first = client.responses.create(model="auto", input="Say something.", temperature=0, max_output_tokens=4)
    second = client.responses.create(
        model="auto", input="And now?", temperature=0, max_output_tokens=4, previous_response_id=first.id
    )
    said: Any = [
        {"role": "user", "content": "Say something."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And now?"},
    ]
    there = client.chat.completions.create(model="tiny", messages=said, temperature=0, max_tokens=4)
    assert second.output_text == there.choices[0].message.content


@TEXTS
def test_calls_and_forms_come_through_responses(client: openai.OpenAI, text: str, target: str) -> None:
    tools: Any = [{"type": "function", **NOW}]
    asked: Any = {"model": "auto", "input": text, "tools": tools, "tool_choice": "required", "temperature": 0}
    (call,) = client.responses.create(**asked).output
    assert (call.type, call.name, json.loads(call.arguments), call.status) == ("function_call", "now", {}, "completed")
    events = list(client.responses.create(**asked, stream=True))
    assert [event.arguments for event in events if event.type == "response.function_call_arguments.done"] == ["{}"]
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form: Any = {"format": {"type": "json_schema", "name": "number", "schema": schema}}
    answer = client.responses.create(model="auto", input=text, text=form, temperature=0)
    assert isinstance(json.loads(answer.output_text)["n"], int)


def test_a_stream_that_breaks_off_ends_in_an_error(routed: RunningServer) -> None:
    body = {"model": "auto", "input": "alone", "stream": True}
    events = httpx.post(f"{routed.url}/v1/responses", json=body).text.strip().split("\n\n")
    assert "Hel" in "".join(events)
    assert "event: response.failed" in events[-1]
    assert "in the middle of the answer" in events[-1]


# ---- Messages -----------------------------------------------------------------------------------------------------


@TEXTS
def test_a_message_is_the_targets_own(
    client: openai.OpenAI, claude: anthropic.Anthropic, text: str, target: str
) -> None:
    asked: Any = {"model": "auto", "max_tokens": 8, "messages": [{"role": "user", "content": text}], **GREEDY}
    raw = claude.messages.with_raw_response.create(**asked)
    answer = raw.parse()
    there = direct(client, text)
    assert answer.content[0].text == there.choices[0].message.content
    assert headers_of(raw)[0] == target
    assert (answer.model, answer.stop_reason, answer.usage.output_tokens) == ("tiny", "max_tokens", 8)
    assert answer.usage.model_extra["heedful"]["route"]["target"] == target
    with claude.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert final.content[0].text == answer.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 8)


@TEXTS
@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequences_and_calls_come_through_messages(
    client: openai.OpenAI, claude: anthropic.Anthropic, text: str, target: str, stream: bool
) -> None:
    """`stream`: the same by events."""

    def ask(**more: Any) -> Any:
        asked: Any = {"model": "auto", "max_tokens": 90, **GREEDY}
        asked |= {"messages": [{"role": "user", "content": text}], **more}
        if not stream:
            return claude.messages.create(**asked)
        with claude.messages.stream(**asked) as events:
            return events.get_final_message()

    said = direct(client, text, 90).choices[0].message.content
    stop = said[len(said) // 2 :][:2]
    cut = ask(stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == said.partition(stop)[0]
    tools = [{"name": NOW["name"], "description": NOW["description"], "input_schema": NOW["parameters"]}]
    called = ask(tools=tools, tool_choice={"type": "any"})
    assert (called.content[-1].name, called.content[-1].input, called.stop_reason) == ("now", {}, "tool_use")


# ---- Completions --------------------------------------------------------------------------------------------------


@TEXTS
def test_a_prompt_is_what_a_user_says(client: openai.OpenAI, text: str, target: str) -> None:
    asked: Any = {"model": "auto", "prompt": text, "temperature": 0, "max_tokens": 8}
    raw = client.completions.with_raw_response.create(**asked)
    answer = raw.parse()
    assert answer.choices[0].text == direct(client, text).choices[0].message.content
    assert (headers_of(raw)[0], answer.object, answer.choices[0].finish_reason) == (target, "text_completion", "length")
    assert answer.usage.model_extra["heedful"]["route"]["target"] == target
    loose = openai.OpenAI(base_url=client.base_url, api_key="none")  # its type of a chunk wants a reason in each
    chunks = list(loose.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == answer.choices[0].text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.choices for chunk in loose.completions.create(**asked, stream=True))
    assert len(client.completions.create(**{**asked, "prompt": "Say something.", "n": 2}).choices) == 2


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"logprobs": 2}, "logprobs"),
    ],
)
def test_what_only_a_model_can_do_is_refused(client: openai.OpenAI, more: dict[str, Any], field: str) -> None:
    with pytest.raises(openai.BadRequestError, match=field):
        client.completions.create(**{"model": "auto", "prompt": "a", **more})


# ---- All of them --------------------------------------------------------------------------------------------------


def bodies(text: str, **more: Any) -> list[tuple[str, dict[str, Any]]]:
    messages = [{"role": "user", "content": text}]
    return [
        ("/v1/responses", {"model": "auto", "input": text, **more}),
        ("/v1/messages", {"model": "auto", "messages": messages, "max_tokens": 4, **more}),
        ("/v1/completions", {"model": "auto", "prompt": text, **more}),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_decision_and_a_fallback_by_each_of_them(routed: RunningServer, stream: bool) -> None:
    for path, body in bodies("Is this review good?", stream=stream):
        answer = httpx.post(f"{routed.url}{path}", json=body, timeout=60)
        assert answer.headers["x-heedful-route-reason"] == "route 1, p 0.900 against 0.800", path
        assert "It is good." in answer.text.replace('"}}\n\nevent', ""), path
    for path, body in bodies("broken", stream=stream):
        answer = httpx.post(f"{routed.url}{path}", json=body, timeout=60)
        assert answer.headers["x-heedful-route-reason"].startswith("broken: answers HTTP 500"), path
        assert answer.headers["x-heedful-route"] == "small", path


def test_failures_have_each_apis_form(routed: RunningServer) -> None:
    for path, body in bodies("alone"):
        answer = httpx.post(f"{routed.url}{path}", json=body, timeout=60)
        assert (answer.status_code, answer.json()["error"]["type"]) == (
            502,
            "invalid_request_error" if path == "/v1/messages" else "server_error",
        )
    for path, body in bodies("hi", temperature=9):
        assert httpx.post(f"{routed.url}{path}", json=body).status_code == 400, path


def test_it_is_no_model_where_nothing_is_written(routed: RunningServer) -> None:
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/v1/messages/count_tokens", {"messages": []})):
        answer = httpx.post(f"{routed.url}{path}", json={"model": "auto", **body})
        assert answer.status_code == 404
        assert "answers where text is written" in answer.text
