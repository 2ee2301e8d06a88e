"""Answers that the server's end cuts off say so, each API in its own way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from tests.server.running import RunningServer, start_server

ENDLESS = {"ignore_eos": True, "heedful": {"window": 64}}


@pytest.fixture
def server(tiny_dir: Path) -> Iterator[RunningServer]:
    """It gives open answers no time to end."""
    running = start_server(tiny_dir, drain_seconds=0.0)
    yield running
    running.stop()


def test_a_response_fails(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.responses.create(model="tiny", input="Hello", stream=True, extra_body=ENDLESS)
        events = []
        for event in stream:
            events.append(event)
            if len(events) == 6:
                server.stop()
        last = events[-1]
        assert last.type == "response.failed"
        assert last.response.status == "failed"
        assert last.response.error is not None
        assert "shutting down" in last.response.error.message


def test_a_message_ends_with_an_error(server: RunningServer) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        messages: list[anthropic.types.MessageParam] = [{"role": "user", "content": "Hello"}]
        stream = client.messages.create(
            model="tiny", messages=messages, max_tokens=100_000, stream=True, extra_body=ENDLESS
        )
        seen = []
        with pytest.raises(anthropic.APIStatusError, match="shutting down"):  # noqa: PT012  # it comes while iterating
            for event in stream:
                seen.append(event)
                if len(seen) == 6:
                    server.stop()
        assert seen[0].type == "message_start"
        assert all(event.type != "message_stop" for event in seen)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_cut_answer_is_no_answer(server: RunningServer, path: str) -> None:
    """OpenAI knows no finish_reason for it: a client would take it for a whole one."""
    asked = {"prompt": "Hello"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hello"}]}
    body = {**asked, "max_tokens": 100_000, **ENDLESS}
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(httpx.post, server.url + path, json=body, timeout=60)
        service = server.state.pool
        deadline = time.monotonic() + 30
        while not service.num_open:
            assert time.monotonic() < deadline, "the request begins"
            time.sleep(0.01)
        server.stop()
        answer = waiting.result()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "shutting_down"
