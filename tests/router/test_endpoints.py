"""An endpoint over real HTTP, and one that does everything wrong: each failure has its name and its status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, aclosing
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.router.upstream import CHUNKS, Upstream, sse, upstream

from heedful.errors import BadParameter, HeedfulError, TargetFailed
from heedful.router.breaker import BreakerLimits
from heedful.router.policy import OpenAISpec
from heedful.router.remote import OpenAITarget
from heedful.router.signals import Asked
from heedful.router.sse_reader import EventTooLong, SseReader
from heedful.router.target import text_of_body


@pytest.fixture(scope="module")
def bad() -> Iterator[Upstream]:
    with upstream() as made:
        yield made


async def _no_wait(seconds: float) -> None:
    waited.append(seconds)


waited: list[float] = []


def target(bad: Upstream, mode: str, **more: Any) -> OpenAITarget:
    given = {"timeout_s": 0.3 if mode == "slow" else 20.0, "retries": 1, **more}
    spec = OpenAISpec(name="big", kind="openai", base_url=bad.base_url(mode), model="m", **given)
    waited.clear()
    return OpenAITarget(spec, sleep=_no_wait)


def ask(made: OpenAITarget, *, stream: bool, **body: Any) -> Any:
    """The body, or the chunks and what ended them."""

    async def run() -> Any:
        asked = Asked.of_body({"messages": [{"role": "user", "content": "hi"}], "stream": stream, **body})
        async with AsyncExitStack() as held:
            held.push_async_callback(made.aclose)
            opened = await made.open(asked, held)
            if not stream:
                return await opened.whole()
            chunks: list[Any] = []
            try:
                async with aclosing(opened.chunks()) as coming:
                    async for chunk in coming:
                        chunks.append(chunk)
            except HeedfulError as error:
                return chunks, error
            return chunks, None

    return asyncio.run(run())


def test_a_whole_answer_with_what_is_known_of_its_cost(bad: Upstream) -> None:
    body = ask(target(bad, "fine"), stream=False, heedful={"kv": "q4"}, temperature=0.5, model="auto")
    assert text_of_body(body) == "Hello"
    assert bad.body == {
        "messages": [{"role": "user", "content": "hi"}],
        "stream": False,
        "temperature": 0.5,
        "model": "m",
    }
    receipt = body["usage"]["heedful"]
    assert (receipt["prompt_tokens"], receipt["output_tokens"]) == (7, 2)
    assert (receipt["visits"], receipt["energy"], receipt["remote"]) == (None, None, "big")
    assert body["usage"]["total_tokens"] == 9


def test_a_stream_comes_event_by_event(bad: Upstream) -> None:
    chunks, error = ask(target(bad, "fine"), stream=True, stream_options={"x": 1})
    assert error is None
    assert bad.body["stream_options"] == {"x": 1, "include_usage": True}
    assert [chunk["choices"] for chunk in chunks[:-1]] == [chunk["choices"] for chunk in CHUNKS[:-1]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    assert chunks[-1]["usage"]["heedful"]["visits"] is None


def test_nothing_is_held_back_and_closing_closes_the_endpoint(bad: Upstream) -> None:
    bad.may_go_on.clear()
    made = target(bad, "paced")

    async def run() -> list[Any]:
        async with AsyncExitStack() as held:
            held.push_async_callback(made.aclose)
            asked = Asked.of_body({"messages": [], "stream": True})
            opened = await made.open(asked, held)
            async with aclosing(opened.chunks()) as chunks:
                return [await anext(chunks), await anext(chunks)]  # the rest cannot have been sent yet

    assert [chunk["choices"][0]["delta"].get("content") for chunk in asyncio.run(run())] == ["", "Hel"]
    deadline = time.monotonic() + 20
    while not bad.hung_up["paced"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert made.breaker.state == "closed"


@pytest.mark.parametrize(
    ("mode", "stream", "status", "said", "requests"),
    [
        ("slow", False, 504, "gave no sign within 0.3 s", 2),
        ("slow", True, 504, "gave no sign within 0.3 s", 2),
        ("broken", False, 502, "answers HTTP 500: out of luck", 2),
        ("broken", True, 502, "answers HTTP 500: out of luck", 2),
        ("busy", False, 429, "answers HTTP 429: slow down", 1),  # it asks for more time than anybody waits
        ("locked", False, 502, "refuses the key (HTTP 401)", 1),
        ("garbage", False, 502, "no JSON", 1),
        ("garbage", True, 502, "a stream that is none", 1),
        ("odd", False, 502, "no chat completion", 1),
        ("odd", True, 502, "'application/json' where a stream was asked for", 1),
        ("cut", False, 502, "broke off", 2),
        ("endless", True, 502, "a stream that is none", 1),
    ],
)
def test_what_fails_before_an_answer(
    bad: Upstream, mode: str, stream: bool, status: int, said: str, requests: int
) -> None:
    before = bad.requests[mode]
    made = target(bad, mode, breaker=BreakerLimits(failures=1))
    with pytest.raises(TargetFailed) as caught:
        ask(made, stream=stream)
    assert caught.value.status == status
    assert said in caught.value.message
    assert bad.requests[mode] - before == requests
    assert made.breaker.state == "open"
    with pytest.raises(TargetFailed, match="left alone after failures") as caught:
        ask(made, stream=stream)
    assert caught.value.status == 503
    assert caught.value.retry_after is not None
    assert bad.requests[mode] - before == requests


@pytest.mark.parametrize(
    ("mode", "said"), [("cut", "in the middle of the answer"), ("failing", "the model has fallen over")]
)
def test_what_fails_in_the_middle_of_a_stream(bad: Upstream, mode: str, said: str) -> None:
    made = target(bad, mode, breaker=BreakerLimits(failures=1))
    chunks, error = ask(made, stream=True)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "Hel"]
    assert isinstance(error, TargetFailed)
    assert said in error.message
    assert made.breaker.state == "open"


def test_a_caller_is_told_of_its_own_fault_and_the_endpoint_is_none_the_worse(bad: Upstream) -> None:
    made = target(bad, "refusing", breaker=BreakerLimits(failures=1))
    with pytest.raises(BadParameter, match=r"target big refuses it \(HTTP 400\): context too long"):
        ask(made, stream=False)
    assert made.breaker.state == "closed"


def test_a_passing_failure_is_tried_again_as_the_endpoint_asks(bad: Upstream) -> None:
    body = ask(target(bad, "flaky", retries=3), stream=False)
    assert text_of_body(body) == "Hello"
    assert waited == [0.0, 0.0]  # retry-after: 0


def test_a_key_is_sent_and_never_told(bad: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUTE_TEST_KEY", "sk-very-secret")
    made = target(bad, "locked", api_key_env="ROUTE_TEST_KEY")
    with pytest.raises(TargetFailed) as caught:
        ask(made, stream=False)
    assert bad.headers["authorization"] == "bearer sk-very-secret"  # the fixture's lower case
    assert "secret" not in str(caught.value)
    assert "ROUTE_TEST_KEY" in str(caught.value)


def test_nobody_there(bad: Upstream) -> None:
    spec = OpenAISpec(name="big", kind="openai", base_url="http://127.0.0.1:9/v1", model="m", retries=2)
    waited.clear()
    with pytest.raises(TargetFailed, match=r"could not be reached or broke off \(ConnectError\)"):
        ask(OpenAITarget(spec, sleep=_no_wait), stream=False)
    assert waited == [0.25, 0.5]


TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), max_size=8), max_size=5)


@settings(deadline=None)
@given(TEXTS, st.sampled_from(["\n", "\r\n", "\r"]), st.lists(st.integers(0, 200), max_size=6))
def test_events_are_read_however_they_are_cut(texts: list[str], end: str, cuts: list[int]) -> None:
    lines = [f": a comment{end}event: x{end}data: {text}{end}{end}" for text in texts]
    data = ("".join(lines)).encode() + (b"" if end != "\r" else b": ")  # what follows tells a lone \r from \r\n
    reader = SseReader()
    borders = sorted({0, *(min(cut, len(data)) for cut in cuts), len(data)})
    found = [text for a, b in pairwise(borders) for text in reader.push(data[a:b])]
    assert found == texts


def test_an_event_without_end_is_cut_off() -> None:
    lines = b"".join(b"data: " + b"a" * 50_000 + b"\n" for _ in range(64))
    with pytest.raises(EventTooLong):
        SseReader().push(lines)
    assert sse({"a": 1}) == b'data: {"a": 1}\r\n\r\n'
