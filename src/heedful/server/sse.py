"""Server-sent events: an asynchronous iterator of bytes as a response that stops when the client hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from heedful.server.failures import Failure, failure_of

PING = b": still working\n\n"
PING_SECONDS = 10.0
"""So long without an event, and a comment keeps proxies from giving the connection up: a long prompt being read."""
DONE = b"data: [DONE]\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def data(body: Any) -> bytes:
    """An event without a name."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def event(name: str, body: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(body) + b"\n\n"


class EventStream:
    """`events`: closed when the client hangs up or the server stops. `on_error`: an event that tells of an error.
    `held`: what is released when the stream ends, though it never began. `headers`: beside those of every stream.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_error: Callable[[Failure], bytes],
        held: AsyncExitStack,
        headers: Mapping[str, str] = {},
    ) -> None:
        self._events = events
        self._on_error = on_error
        self._held = held
        self._headers = [*_HEADERS, *((name.encode(), value.encode("latin-1")) for name, value in headers.items())]
        self._is_silent = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            sending = asyncio.ensure_future(self._send(send))
            gone = asyncio.ensure_future(_disconnected(receive))
            pinging = asyncio.ensure_future(self._ping(send))
            try:
                await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (sending, gone, pinging):
                    task.cancel()
                await asyncio.gather(sending, gone, pinging, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        async with aclosing(self._events) as events:
            try:
                async for body in events:
                    self._is_silent = False
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            except OSError:
                return  # the connection is gone
            except Exception as error:
                body = self._on_error(failure_of(error))
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ping(self, send: Send) -> None:
        """An event is sent whole, so a ping never comes within one."""
        while True:
            self._is_silent = True
            await asyncio.sleep(PING_SECONDS)
            if self._is_silent:
                await send({"type": "http.response.body", "body": PING, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
