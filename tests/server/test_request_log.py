"""What `heedful serve` says of each request, and what it does not."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from tests.server.conftest import RunningServer, start_server

from heedful.server.failures import Failure
from heedful.server.request_log import MOST_LINES, RequestLog


@pytest.fixture
def said(tiny_dir: Path) -> Callable[[Callable[[RunningServer], None]], list[str]]:
    """The lines of what was asked of a server, without their times."""

    def of(ask: Callable[[RunningServer], None]) -> list[str]:
        stream = io.StringIO()
        running = start_server(tiny_dir, log=RequestLog(stream), api_keys=("secret",))
        try:
            ask(running)
        finally:
            running.stop()
        lines = stream.getvalue().splitlines()
        assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines), lines
        return [line[9:] for line in lines]

    return of


def post(server: RunningServer, path: str, body: object, key: str = "secret") -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, headers={"x-api-key": key}, timeout=60)


def test_an_answer_is_a_line_with_its_receipt(said: Callable[..., list[str]]) -> None:
    receipts = []

    def ask(server: RunningServer) -> None:
        body = {"prompt": "a private matter", "max_tokens": 3, "ignore_eos": True}
        receipts.append(post(server, "/v1/completions", body).json()["usage"]["heedful"])
        with httpx.stream(
            "POST",
            f"{server.url}/v1/completions",
            json={**body, "max_tokens": 1000, "stream": True},
            headers={"x-api-key": "secret"},
            timeout=60,
        ) as stream:
            next(stream.iter_lines())  # and hangs up

    first, second = said(ask)
    assert first.startswith("tiny length · ")
    assert f"{receipts[0]['prompt_tokens']} in (0 cached) · 3 out" in first
    assert second.startswith("tiny cancelled · ")
    assert "private" not in first + second


def test_a_refusal_names_what_was_wrong_and_quotes_nothing(said: Callable[..., list[str]]) -> None:
    def ask(server: RunningServer) -> None:
        post(server, "/v1/completions", {"prompt": "private", "max_tokens": "private"})
        post(server, "/v1/completions", {"prompt": "private"}, key="guess")
        post(server, "/v1/private%0aline", {})
        post(server, "/v1/embeddings", {"input": "private"})

    refused, locked, unknown, served = said(ask)
    assert refused == "POST /v1/completions 400 max_tokens"
    assert locked == "POST /v1/completions 401 invalid_api_key"
    assert unknown == r"POST /v1/private\nline 404 not_found_error"
    assert re.fullmatch(r"POST /v1/embeddings 200 · \d+ ms", served)


def test_a_pipe_that_nobody_reads_stalls_nobody() -> None:
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w")
    log = RequestLog(stream)
    for _ in range(2 * MOST_LINES):
        log.refused("GET", "/" + "a" * 90, Failure(404, "not_found_error", ""))
    log.close(0.1)
    os.close(reading)
    log._thread.join(10)
    assert not log._thread.is_alive(), "it still waits for a reader"
    with pytest.raises(BrokenPipeError):
        stream.close()
