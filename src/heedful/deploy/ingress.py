"""The ingress: an ASGI application that sends each request to a replica and its answer back, piece by piece.

It parses no more of a request than a router has to know. A replica that is lost before its answer has begun is replaced
by another one; one that is lost in the middle of a stream ends it with an error event of the API that was asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.types import Receive, Scope, Send

from heedful.deploy.forwarded import Forwarded, Head, Headers, forwarded
from heedful.deploy.whole_metrics import merged
from heedful.server.failures import Failure, anthropic_body, openai_body, response_of
from heedful.server.settings import MOST_BODY_BYTES
from heedful.server.sse import data, event

log = logging.getLogger("heedful.deploy")

Ask = Callable[[Forwarded], AsyncGenerator[Head | bytes, None]]
"""A replica's answer. Raises ReplicaLost."""
MOST_TRIES = 3


class ReplicaLost(Exception):
    """The replica has died, or cannot be reached; `status` where nobody else can be asked either."""

    def __init__(self, text: str, status: int = 502, *, is_final: bool = False) -> None:
        self.status = status
        self.is_final = is_final
        super().__init__(text)


class Ingress:
    """`ask` is a deployment's handle, or whatever else answers."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        assert scope["type"] == "http", scope["type"]
        body = await _body(receive)
        if body is None:
            return
        headers: Headers = tuple((bytes(name), bytes(value)) for name, value in scope["headers"])
        asked = forwarded(scope["method"], scope["path"], scope.get("query_string", b""), headers, body)
        answering = asyncio.ensure_future(self._answer(asked, scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            for task in (answering, gone):
                task.cancel()
            await asyncio.gather(answering, gone, return_exceptions=True)

    async def _answer(self, asked: Forwarded, scope: Scope, receive: Receive, send: Send) -> None:
        is_metrics = asked.path == "/metrics" and asked.method == "GET"
        for attempt in range(MOST_TRIES):
            sending = _Sending(send, asked.path)
            try:
                pieces = self._metrics(asked) if is_metrics else self._ask(asked)
                async with aclosing(pieces):
                    async for piece in pieces:
                        await sending.take(piece)
                await sending.end()
                return
            except ReplicaLost as lost:
                log.warning("heedful: a replica is lost (%s): %s", asked.path, lost)
                if sending.has_begun:
                    await sending.break_off(lost)
                    return
                if lost.is_final or attempt == MOST_TRIES - 1:
                    failure = Failure(lost.status, "server_error", f"no replica could answer: {lost}")
                    await response_of(failure, asked.path)(scope, receive, send)
                    return

    async def _metrics(self, asked: Forwarded) -> AsyncGenerator[Head | bytes, None]:
        """Every replica's, told apart by a label. They are asked until one comes that was there before."""
        texts: dict[str, str] = {}
        while True:
            head, body = await self._whole(replace(asked, unlike=frozenset(texts)))
            if head.status != 200:
                yield head
                yield body
                return
            if head.replica in texts:
                break
            texts[head.replica] = body.decode()
        yield replace(head, headers=tuple(one for one in head.headers if one[0].lower() != b"content-length"))
        yield merged(texts)

    async def _whole(self, asked: Forwarded) -> tuple[Head, bytes]:
        head, body = None, b""
        async with aclosing(self._ask(asked)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Head):
                    head = piece
                else:
                    body += piece
        assert head is not None, asked.path
        return head, body


class _Sending:
    """An answer on its way to the client. Its head waits for the first piece of its body."""

    def __init__(self, send: Send, path: str) -> None:
        self._send = send
        self._path = path
        self._head: Head | None = None
        self.has_begun = False

    async def take(self, piece: Head | bytes) -> None:
        if isinstance(piece, Head):
            self._head = piece
            return
        await self._begin()
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        await self._begin()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def break_off(self, lost: ReplicaLost) -> None:
        """A stream says so; a body that was announced cannot, and its connection ends before it does."""
        assert self._head is not None
        kinds = [value for name, value in self._head.headers if name.lower() == b"content-type"]
        if not any(b"text/event-stream" in kind for kind in kinds):
            raise ConnectionError(str(lost)) from lost
        text = f"the replica that was answering ({self._head.replica}) is lost. Ask again: another one answers."
        failure = Failure(502, "server_error", text, code="replica_lost")
        said = event("error", anthropic_body(failure)) if self._path == "/v1/messages" else data(openai_body(failure))
        await self._send({"type": "http.response.body", "body": said, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self) -> None:
        if not self.has_begun:
            assert self._head is not None, "a body without a head"
            self.has_begun = True
            headers = list(self._head.headers)
            await self._send({"type": "http.response.start", "status": self._head.status, "headers": headers})


async def _body(receive: Receive) -> bytes | None:
    """What there is of it up to the most that is read: then the replica refuses it. None: the client has gone."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        if len(body) <= MOST_BODY_BYTES:
            body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body[: MOST_BODY_BYTES + 1])


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message: Any = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
