"""Event streams on a bare ASGI channel: order, silence, errors, hang-ups before and after the first event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from heedful.errors import CacheFull
from heedful.server import sse
from heedful.server.failures import openai_body


class Channel:
    """A client that reads everything until it hangs up."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.hung_up = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.hung_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def stream(events: AsyncGenerator[bytes, None], released: list[str]) -> sse.EventStream:
    held = AsyncExitStack()
    held.callback(released.append, "released")
    return sse.EventStream(events, lambda failure: sse.data(openai_body(failure)), held)


async def numbers(count: int, seconds: float = 0.0) -> AsyncGenerator[bytes, None]:
    for i in range(count):
        await asyncio.sleep(seconds)
        yield sse.data(i)


def test_events_come_in_order_and_the_body_is_closed() -> None:
    async def run() -> None:
        channel, released = Channel(), []
        await stream(numbers(3), released)({}, channel.receive, channel.send)
        assert channel.body == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
        assert channel.sent[0]["status"] == 200
        assert [message.get("more_body") for message in channel.sent[1:]] == [True, True, True, False]
        assert released == ["released"]

    asyncio.run(run())


def test_silence_is_filled_with_comments_between_whole_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_SECONDS", 0.01)

    async def run() -> None:
        channel = Channel()
        await stream(numbers(2, 0.2), [])({}, channel.receive, channel.send)
        assert channel.body.count(sse.PING) >= 2
        assert channel.body.replace(sse.PING, b"") == b"data: 0\n\ndata: 1\n\n"

    asyncio.run(run())


def test_an_error_is_the_last_event() -> None:
    async def failing() -> AsyncGenerator[bytes, None]:
        yield sse.data(0)
        raise CacheFull("no room", "less")

    async def run() -> None:
        channel = Channel()
        await stream(failing(), [])({}, channel.receive, channel.send)
        first, last, _ = channel.body.split(b"\n\n")
        assert first == b"data: 0"
        assert b"no room" in last
        assert channel.sent[-1]["more_body"] is False

    asyncio.run(run())


@pytest.mark.parametrize("after", [0.0, 0.05])
def test_a_hang_up_closes_the_events_and_releases_what_is_held(after: float) -> None:
    closed: list[str] = []

    async def endless() -> AsyncGenerator[bytes, None]:
        try:
            async for event in numbers(10**6, 0.001):
                yield event
        finally:
            closed.append("closed")

    async def run() -> None:
        channel, released = Channel(), []
        if not after:
            channel.hung_up.set()
        else:
            asyncio.get_running_loop().call_later(after, channel.hung_up.set)
        await asyncio.wait_for(stream(endless(), released)({}, channel.receive, channel.send), 10)
        assert released == ["released"]
        assert closed == (["closed"] if after else closed)

    asyncio.run(run())
