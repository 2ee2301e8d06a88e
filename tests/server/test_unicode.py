"""Texts that are hard to handle, in every place that takes one: never a 5xx, and well-formed ones come back whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.running import RunningServer

WELL_FORMED = {
    "family": "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f3f4\U000e0067\U000e007f",
    "hangul": "\u1112\u1161\u11ab \ud55c\uae00",
    "separators": "a\u2028b\u2029c\u0085d\x0be",
    "nul": "a\x00b",
    "right to left": "\u202eabc\u202c \u2067\u05e9\u05dc\u2069 \u200f",
    "combining": "Z\u0351\u036b\u0343\u0305" * 20,
    "private use": "\ue000\uf8ff\U0010fffd",
    "noncharacters": "\ufffe\uffff\U0010ffff",
    "byte order mark": "\ufeffx",
    "control texts": "<|im_start|>system\nx<|im_end|><|endoftext|><tool_call>{}</tool_call>",
    "braces": "{{ 7 * 7 }} {% for x in y %} {# #}",
}
MALFORMED = {"high": "a\ud800b", "low": "\udfff", "swapped": "\udc00\ud800", "high last": "x\udbff"}


def places(text: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Path and body with `text` in each place."""
    said = [{"role": "user", "content": "Hi"}]
    chat: dict[str, Any] = {"messages": said, "max_tokens": 2}
    schema = {"type": "object", "properties": {"n": {"enum": [text]}}, "required": ["n"]}
    function = {"name": "add", "description": text, "parameters": {"type": "object", "properties": {text: {}}}}
    call = {"id": text, "type": "function", "function": {"name": text, "arguments": json.dumps({"x": text})}}
    named = {"type": "function", "function": {"name": text}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    block = {"type": "tool_use", "id": text, "name": text, "input": {text: text}}
    result = {"type": "tool_result", "tool_use_id": text, "content": text}
    flat_call = {"type": "function_call", "call_id": text, "name": text, "arguments": json.dumps({text: 1})}
    flat_result = {"type": "function_call_output", "call_id": text, "output": text}
    chats: dict[str, dict[str, Any]] = {
        "message": {"messages": [{"role": "user", "content": text}]},
        "part": {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]},
        "role": {"messages": [{"role": text, "content": "x"}]},
        "key": {"messages": [{"role": "user", "content": "x", text: text}]},
        "stop": {"stop": [text]},
        "user": {"user": text},
        "model": {"model": text},
        "tool": {"tools": [{"type": "function", "function": function}]},
        "required tool": {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
        "tool name": {"tools": [named]},
        "tool choice": {"tools": [{"type": "function", "function": function}], "tool_choice": named},
        "call": {"messages": [*said, {"role": "assistant", "tool_calls": [call]}]},
        "result": {"messages": [*said, {"role": "tool", "tool_call_id": text, "content": text}]},
        "schema": {"response_format": form},
        "choice": {"response_format": {"type": "choice", "choice": [text]}},
        "regex": {"response_format": {"type": "regex", "regex": text}},
        "lark": {"response_format": {"type": "lark", "lark": f'start: "{text}"'}},
        "format": {"response_format": {"type": text}},
        "bias": {"logit_bias": {text: 1}},
        "policy": {"heedful": {"kv": text}},
    }
    responses: dict[str, dict[str, Any]] = {
        "input": {"input": text},
        "instructions": {"instructions": text},
        "items": {"input": [flat_call, flat_result]},
        "item type": {"input": [{"type": text}]},
        "previous": {"previous_response_id": text},
        "metadata": {"metadata": {text[:64]: text}},
    }
    messages: dict[str, dict[str, Any]] = {
        "system": {"system": text},
        "content": {"messages": [{"role": "user", "content": text}]},
        "stops": {"stop_sequences": [text]},
        "blocks": {"messages": [{"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]},
        "tools": {"tools": [{"name": "add", "description": text, "input_schema": {text: text}}]},
    }
    return {
        **{f"chat {place}": ("/v1/chat/completions", {**chat, **more}) for place, more in chats.items()},
        **{
            f"responses {p}": ("/v1/responses", {"input": "Hi", "max_output_tokens": 2, **m})
            for p, m in responses.items()
        },
        **{f"messages {place}": ("/v1/messages", {**chat, **more}) for place, more in messages.items()},
        "count": ("/v1/messages/count_tokens", {"messages": said, "system": text}),
        "completion": ("/v1/completions", {"prompt": text, "max_tokens": 2, "stop": text, "echo": True, "logprobs": 1}),
        "embedding": ("/v1/embeddings", {"input": [text, "x"]}),
        "tokenize": ("/tokenize", {"prompt": text}),
        "tokenize chat": ("/tokenize", {"messages": [{"role": "user", "content": text}]}),
    }


def takes_any(place: str) -> bool:
    """A place where any well-formed text has a meaning, so that the answer is 200."""
    free = ["message", "part", "key", "stop", "user", "call", "result", "system", "content", "stops", "blocks"]
    free += ["input", "instructions", "items", "completion", "embedding", "tokenize", "count"]
    return place.split()[-1] in free or place in ("chat choice", "tokenize chat")


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


def post(http: httpx.Client, path: str, body: Any, *, escaped: bool = True) -> httpx.Response:
    content = json.dumps(body, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
    return http.post(path, content=content, headers={"content-type": "application/json"})


def check(response: httpx.Response, place: str) -> None:
    assert response.status_code < 500, (place, response.text)
    body = response.json()
    if response.status_code != 200:
        assert response.status_code in (400, 404), (place, response.text)
        assert body["error"]["message"], place


@pytest.mark.parametrize("place", places(""))
@pytest.mark.parametrize("escaped", [True, False])
def test_well_formed_texts(http: httpx.Client, place: str, escaped: bool) -> None:
    for name, text in WELL_FORMED.items():
        path, body = places(text)[place]
        response = post(http, path, body, escaped=escaped)
        check(response, f"{place}, {name}")
        if takes_any(place):
            assert response.status_code == 200, (name, response.text)


@pytest.mark.parametrize("place", places(""))
@pytest.mark.parametrize("escaped", [True, False])
def test_halves_of_surrogate_pairs_are_refused(http: httpx.Client, place: str, escaped: bool) -> None:
    for name, text in MALFORMED.items():
        path, body = places(text)[place]
        response = post(http, path, body, escaped=escaped)
        check(response, f"{place}, {name}")
        assert response.status_code != 200, (name, response.text)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("text", WELL_FORMED.values(), ids=WELL_FORMED)
def test_streams(http: httpx.Client, path: str, text: str) -> None:
    """The text comes back as it was, whatever in it looks like the end of a line or of an event."""
    form = {"type": "choice", "choice": [text]}
    body: dict[str, Any] = {"max_tokens": 500, "max_output_tokens": 500, "stream": True, "response_format": form}
    body |= {"text": {"format": form}, "output_config": {"format": form}}
    body |= {"messages": [{"role": "user", "content": text}], "input": text}
    response = post(http, path, body)
    assert response.status_code == 200, response.text
    events = [line.removeprefix(b"data: ") for line in response.content.split(b"\n") if line.startswith(b"data: ")]
    assert "".join(delta_of(json.loads(event)) for event in events if event != b"[DONE]") == text


def delta_of(event: dict[str, Any]) -> str:
    if "choices" in event:
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    delta = event.get("delta", "")
    return str(delta.get("text", "")) if isinstance(delta, dict) else str(delta)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=80))
def test_tokens_of_a_text_say_the_text(http: httpx.Client, text: str) -> None:
    tokens = post(http, "/tokenize", {"prompt": text}).json()["tokens"]
    assert post(http, "/detokenize", {"tokens": tokens}).json()["prompt"] == text
    assert len(tokens) == len(text.encode())  # the tiny model's tokens are bytes


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_text_anywhere(http: httpx.Client, data: st.DataObject) -> None:
    texts = st.text(st.characters(exclude_categories=()), max_size=40)  # halves of pairs too
    text = data.draw(texts | st.sampled_from([*WELL_FORMED.values(), *MALFORMED.values()]))
    place = data.draw(st.sampled_from(list(places(""))))
    path, body = places(text)[place]
    check(post(http, path, body, escaped=data.draw(st.booleans())), place)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"nul", b"\xff\xfe{}", b'{"messages": "\xc3("}', b"[" * 100_000, b"1e999"]
)
@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize"],
)
def test_what_is_no_body(http: httpx.Client, path: str, content: bytes) -> None:
    response = http.post(path, content=content)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/v1/responses/%00", "/v1/responses/%ff", "/v1/models/%ed%a0%80", "/v1/responses/%F0%9F%91%A8"]
)
def test_names_in_paths(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 404
