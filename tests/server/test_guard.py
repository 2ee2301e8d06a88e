"""What never reaches a handler: foreign hosts and origins, wrong keys, bodies and headers that are too big."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.conftest import KEYS, RunningServer, start_server

from heedful.server import run
from heedful.server.guard import OPEN_PATHS
from heedful.server.settings import MOST_HEADER_BYTES
from heedful.text.tokenizer import Tokenizer


def test_a_rebound_name_is_refused(server: RunningServer) -> None:
    """A page of evil.example whose name now resolves to loopback sends its own name as the host."""
    for host in (
        "evil.example",
        "evil.example:8080",
        "",
        "127.0.0.1.evil.example",
        "localhost:evil.example",
        "[::1].evil.example",
    ):
        answer = httpx.get(f"{server.url}/v1/models", headers={"host": host})
        assert answer.status_code == 403, host
        assert "--allow-host" in answer.json()["error"]["message"]
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]:80"):
        assert httpx.get(f"{server.url}/v1/models", headers={"host": host}).status_code == 200, host


def test_other_sites_pages_are_refused_and_our_own_is_not(server: RunningServer) -> None:
    own = server.url.removeprefix("http://")
    for origin in ("https://evil.example", "http://localhost:1", "null", f"http://{own}.evil.example"):
        answer = httpx.get(f"{server.url}/v1/models", headers={"origin": origin})
        assert answer.status_code == 403, origin
        assert "access-control-allow-origin" not in answer.headers
    answer = httpx.get(f"{server.url}/v1/models", headers={"origin": server.url})
    assert answer.status_code == 200


@pytest.fixture(scope="module")
def open_server(tiny_dir: Path) -> Iterator[RunningServer]:
    running = start_server(
        tiny_dir, allowed_origins=("https://app.example",), allowed_hosts=("box.example",), most_body_bytes=5000
    )
    yield running
    running.stop()


def test_an_allowed_origin_gets_what_browsers_ask_for(open_server: RunningServer) -> None:
    headers = {"origin": "https://app.example", "access-control-request-method": "POST"}
    asked = httpx.options(f"{open_server.url}/v1/chat/completions", headers=headers)
    assert asked.status_code == 204
    assert asked.headers["access-control-allow-origin"] == "https://app.example"
    assert "authorization" in asked.headers["access-control-allow-headers"]
    answer = httpx.get(f"{open_server.url}/v1/models", headers={"origin": "https://app.example"})
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert httpx.get(f"{open_server.url}/v1/models", headers={"origin": "https://b.example"}).status_code == 403
    assert httpx.get(f"{open_server.url}/v1/models", headers={"host": "box.example"}).status_code == 200


def test_without_a_key_only_the_page_and_health_answer(locked_server: RunningServer) -> None:
    for path in ("/v1/models", "/metrics", "/history", "/openapi.json", "/v1/responses/resp_1", "/nowhere"):
        answer = httpx.get(locked_server.url + path)
        assert answer.status_code == 401, path
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"
    for path in OPEN_PATHS:
        assert httpx.get(locked_server.url + path).status_code in (200, 404), path


@pytest.mark.parametrize("key", ["", "wrong", KEYS[0] + "x", KEYS[0][:-1], "kéy", ",".join(KEYS)])
def test_wrong_keys_are_refused(locked_server: RunningServer, key: str) -> None:
    for headers in ({"authorization": f"Bearer {key}".strip().encode()}, {"x-api-key": key.encode()}):
        assert httpx.get(f"{locked_server.url}/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_taken_in_both_headers(locked_server: RunningServer, key: str) -> None:
    for headers in ({"authorization": f"bearer {key}"}, {"x-api-key": key}):
        assert httpx.get(f"{locked_server.url}/v1/models", headers=headers).status_code == 200


def test_prefixes_are_not_shared_between_keys(locked_server: RunningServer) -> None:
    body = {"prompt": "the same beginning, " * 20, "max_tokens": 1, "temperature": 0}

    def cached(key: str) -> int:
        answer = httpx.post(f"{locked_server.url}/v1/completions", json=body, headers={"x-api-key": key})
        details = answer.json()["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"])

    assert cached(KEYS[0]) == 0
    assert cached(KEYS[0]) > 0
    assert cached(KEYS[1]) == 0


def test_a_body_that_is_too_big_is_refused_with_and_without_its_length(open_server: RunningServer) -> None:
    big = b'{"prompt": "' + b"a" * 6000 + b'"}'
    known = httpx.post(f"{open_server.url}/v1/completions", content=big)
    chunked = httpx.post(f"{open_server.url}/v1/completions", content=iter([big[:3000], big[3000:]]))
    assert known.status_code == chunked.status_code == 413
    assert "error" in known.json()
    anthropic = httpx.post(f"{open_server.url}/v1/messages", content=big)
    assert anthropic.json()["error"]["type"] == "request_too_large"


@pytest.mark.parametrize("in_one", [True, False])
def test_headers_that_are_too_big_end_the_connection(server: RunningServer, in_one: bool) -> None:
    """Also a single one that never ends, of which the server must not keep everything."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"GET /health HTTP/1.1\r\nHost: {host}\r\n".encode())
        sent = 0
        try:
            while sent < 100 * MOST_HEADER_BYTES:
                connection.sendall(b"x-a: " + b"b" * 1000 + b"\r\n" if not in_one else b"c" * 1000)
                sent += 1000
        except OSError:
            pass
        assert sent < 100 * MOST_HEADER_BYTES
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_what_follows_the_last_chunk_is_bounded_too(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /tokenize HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n"
        connection.sendall(head.encode())
        trailer = b"x-a: " + b"b" * 10_000 + b"\r\n"
        sent = 0
        try:
            while sent < 5 * server.state.settings.most_body_bytes:
                connection.sendall(trailer)
                sent += len(trailer)
        except OSError:
            pass
        assert sent < 5 * server.state.settings.most_body_bytes


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nx-a: ",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 30\r\n\r\n{",
    ],
    ids=["nothing", "headers", "body"],
)
def test_a_request_that_does_not_come_to_its_end_is_not_waited_for(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """A byte now and then would hold a connection for ever."""
    monkeypatch.setattr(run, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(run, "BODY_SECONDS", 0.3)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(sent)
        received = connection.recv(1000)
        assert received.startswith(b"HTTP/1.1 408"), received
        assert connection.recv(1000) == b""


def test_an_answer_may_take_longer_than_its_request(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "HEADER_SECONDS", 0.1)
    monkeypatch.setattr(run, "BODY_SECONDS", 0.1)
    with httpx.Client() as client:
        for _ in range(2):  # the second on the connection of the first, which rested
            body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}
            began = time.monotonic()
            answer = client.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200
            assert time.monotonic() - began > 0.1, "too fast to tell anything"
            time.sleep(0.2)


def test_two_hosts_are_none(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 403")


BIG = 15 << 20


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a" * BIG}, "prompt"),
        ("/v1/completions", {"prompt": [1] * 1_000_000}, "prompt"),
        ("/v1/completions", {"prompt": ["hi"] * 100, "n": 3}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * BIG}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 20_000}, "messages"),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a" * BIG}]}, None),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * BIG}]}, "messages"),
        ("/v1/embeddings", {"input": "a" * 100_000}, "input"),
        ("/tokenize", {"prompt": "a" * BIG}, "prompt"),
        ("/detokenize", {"tokens": [1] * 1_000_000}, "tokens"),
    ],
)
def test_what_is_too_long_is_refused_before_anybody_waits_for_it(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, object], param: str | None
) -> None:
    """Encoding it would hold everybody up."""
    seen: list[int] = []
    encode = Tokenizer.encode

    def watched(self: Tokenizer, text: str, **options: Any) -> list[int]:
        seen.append(len(text))
        return encode(self, text, **options)

    if path != "/v1/embeddings":
        monkeypatch.setattr(Tokenizer, "encode", watched)
    for more in ({}, {"heedful": {"truncate": True}}):
        if more and ("n" in body or not path.endswith("completions")):
            continue
        answer = httpx.post(server.url + path, json={**body, **more}, timeout=60)
        assert answer.status_code == 400
        assert answer.json()["error"].get("param") == param
    assert all(length < 1000 for length in seen)


def test_many_requests_on_one_connection_are_not_taken_for_one_big_header(server: RunningServer) -> None:
    with httpx.Client() as client:
        for _ in range(200):
            answer = client.get(f"{server.url}/health", headers={"x-padding": "a" * 1000})
            assert answer.status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": 1}', b"[" * 100_000, b'{"a":' * 50_000, b'{"prompt": "a"}}'],
)
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/embeddings", "/tokenize"]
)
def test_bodies_that_are_no_request_are_the_callers_fault(server: RunningServer, path: str, body: bytes) -> None:
    answer = httpx.post(server.url + path, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 3),
        ("temperature", "warm"),
        ("top_p", -1),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("n", 0),
        ("n", 1000),
        ("stop", [1]),
        ("seed", "x"),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"999999": 1}),
        ("presence_penalty", 9),
        ("stream", "yes"),
        ("logprobs", 1000),
        ("heedful.windw", 10),
        ("heedful.prefill", "x"),
        ("heedful.kv", "q3"),
        ("heedful.window", 0),
        ("heedful.sinks", 4),
        ("heedful.budget", 3),
        ("prompt", [-1]),
        ("prompt", [10**9]),
        ("prompt", ["a", 1]),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "regex", "regex": "("}),
    ],
)
def test_a_bad_field_is_named(server: RunningServer, field: str, value: object) -> None:
    outer, _, inner = field.partition(".")
    body = {"prompt": "a", "max_tokens": 1, outer: {inner: value} if inner else value}
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"] or "").startswith(outer), error
    assert outer in error["message"], "clients show the message alone"


def test_a_prompt_that_is_too_long_is_told_how_to_cut_it(server: RunningServer) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a" * 3000, "max_tokens": 1})
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert '"heedful": {"truncate": true}' in error["message"]
    assert ".." not in error["message"]


def test_unknown_fields_are_ignored_and_unknown_paths_are_not_found(server: RunningServer) -> None:
    body = {"prompt": "a", "max_tokens": 1, "frobnicate": {"x": [1]}, "service_tier": "auto"}
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
    missing = httpx.get(f"{server.url}/v1/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "not_found_error"
    assert httpx.get(f"{server.url}/v1/completions").status_code == 405
    unknown = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "model": "gpt-4"})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"
    assert "tiny" in unknown.json()["error"]["message"]
