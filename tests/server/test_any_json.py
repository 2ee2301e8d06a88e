"""Bodies with any JSON where something else belongs: answered with 200 or 4xx, never a 5xx."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.running import RunningServer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "add", "description": "d", "parameters": SCHEMA, "strict": True}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
SAMPLING = {"temperature": 1, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "stop": ["x"], "logit_bias": {"5": 1}}
SAMPLING |= {"presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.1, "user": "u", "stream": False}
OPTIONS = {"kv": "q8", "window": 64, "sinks": 4, "prefill": "dense", "speculate": True, "truncate": True}
TEMPLATES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "x"},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": "x", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ],
        "model": "tiny",
        "max_tokens": 2,
        "n": 2,
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "response_format": {"type": "text"},
        "logprobs": True,
        "top_logprobs": 1,
        "stream_options": {"include_usage": True},
        "heedful": OPTIONS,
        **SAMPLING,
    },
    "/v1/completions": {
        "prompt": ["x", "y"],
        "max_tokens": 2,
        "echo": True,
        "logprobs": 1,
        "heedful": OPTIONS,
        **SAMPLING,
    },
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "function_call", "id": "f", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
        ],
        "instructions": "x",
        "max_output_tokens": 2,
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "add"},
        "text": {"format": {"type": "text"}},
        "metadata": {"x": "y"},
        "truncation": "auto",
        "store": True,
        "heedful": OPTIONS,
        **SAMPLING,
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "x"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x", "is_error": True}],
            },
        ],
        "max_tokens": 2,
        "stop_sequences": ["x"],
        "tools": [{"name": "add", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "add"},
        "output_config": {"format": {"type": "text"}},
        "heedful": OPTIONS,
        **SAMPLING,
    },
    "/v1/embeddings": {
        "input": ["x", "y"],
        "encoding_format": "float",
        "dimensions": 32,
        "heedful": {"truncate": True},
    },
    "/tokenize": {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2]},
}
FORMATS = [
    {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    {"type": "json_schema", "name": "x", "schema": SCHEMA},
    {"type": "regex", "regex": "[ab]{2}"},
    {"type": "choice", "choice": ["a", "b"]},
    {"type": "lark", "lark": 'start: "a"'},
]
WORDS = st.sampled_from(
    ["", "x", "user", "tool", "text", "add", "none", "required", "auto", "json_object", "tiny", "\x00"]
)
NUMBERS = st.sampled_from([0, -1, 1, 3, 10**6, 2**31, 2**63, 2**64, 10**40, 0.5, -0.0, 1e308, 5e-324])
LEAVES = st.none() | st.booleans() | NUMBERS | WORDS
VALUES = LEAVES | st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=6
)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything in a body, but not the body itself."""
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from paths_of(value[key], (*path, key))


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, Any]:
    """A good body with up to three places changed or dropped."""
    path = draw(st.sampled_from(list(TEMPLATES)))
    body = copy.deepcopy(TEMPLATES[path])
    body["stream"] = draw(st.booleans())
    if "response_format" in body and draw(st.booleans()):
        body["tool_choice"], body["response_format"] = "auto", copy.deepcopy(draw(st.sampled_from(FORMATS)))
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.sampled_from(list(paths_of(body))))
        holder: Any = body
        for key in place[:-1]:
            holder = holder[key]
        if draw(st.integers(0, 4)):
            holder[place[-1]] = draw(VALUES)
        else:
            del holder[place[-1]]
        if not body:
            break
    return path, body


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


@pytest.mark.parametrize("path", TEMPLATES)
def test_the_bodies_are_good_ones(http: httpx.Client, path: str) -> None:
    response = http.post(path, json=TEMPLATES[path])
    assert response.status_code == 200, response.text


@settings(max_examples=200, deadline=None)
@given(bodies())
def test_any_json_anywhere(http: httpx.Client, asked: tuple[str, Any]) -> None:
    path, body = asked
    body = cap_tokens(body)
    response = http.post(path, content=json.dumps(body))
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert "server_error" not in response.text
        assert "api_error" not in response.text
    else:
        response.json()


def cap_tokens(body: dict[str, Any]) -> dict[str, Any]:
    """Answers stay short, so that the test does."""
    for name in ("max_tokens", "max_output_tokens"):
        given_tokens = body.get(name)
        if given_tokens is None or (isinstance(given_tokens, int | float) and given_tokens > 4):
            body = {**body, name: 4}
    return body
