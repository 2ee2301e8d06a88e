"""The application behind a socket: uvicorn, with limits on what comes and how slowly, and an orderly end."""

from __future__ import annotations

import asyncio
import socket
import sys
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from heedful.server.settings import MOST_BODY_BYTES, MOST_HEADER_BYTES, ServerSettings
from heedful.server.state import ServerState

MARGIN_SECONDS = 5.0
KEEP_ALIVE_SECONDS = 65
"""Of an unused connection. Clients reuse theirs for 30 s and more, and lose a request where the server is hastier."""


HEADER_SECONDS = 20.0
"""From the first byte of a request, or from a connection's start, to the end of its headers."""
BODY_SECONDS = 300.0
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class LimitedProtocol(HttpToolsProtocol):
    """Refuses headers that are too big while they come: the parser itself would keep them all. Of a body's bytes on the
    wire there may be some more than of the body itself, and what follows its last chunk is not kept. A request that
    does not come to its end in time is refused too: connections are few, and cost a client nothing.
    """

    _is_in_headers = True
    _header_bytes = 0
    _body_bytes = 0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), transport
        super().connection_made(transport)
        self._expect_the_rest(HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def _expect_the_rest(self, seconds: float) -> None:
        self._expect_nothing()
        self._deadline = self.loop.call_later(seconds, self._refuse_slowness)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse_slowness(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(TOO_SLOW)
            self.transport.close()

    def on_message_begin(self) -> None:
        self._is_in_headers = True
        self._body_bytes = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        self._header_bytes = 0
        self._expect_the_rest(BODY_SECONDS)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_headers = True
        self._expect_nothing()
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self._is_in_headers:
            if self._deadline is None:
                self._expect_the_rest(HEADER_SECONDS)
            self._header_bytes += len(data)
            end = data.find(b"\r\n\r\n")  # a body may follow in the same piece
            if self._header_bytes > MOST_HEADER_BYTES and not 0 <= end < MOST_HEADER_BYTES:
                self.send_400_response("Request header too large.")
                return
        else:
            self._body_bytes += len(data)
            if self._body_bytes > 2 * MOST_BODY_BYTES + MOST_HEADER_BYTES:
                self.send_400_response("Request body too large.")
                return
        super().data_received(data)


class Server(uvicorn.Server):
    """Going down: no new requests, open ones get their time, and what is left then ends with a last event.

    A second signal ends the time, a third one everything.
    """

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self._state = state
        self._is_in_hurry = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and not self._is_in_hurry:
            self._is_in_hurry = True
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.is_ready = False
        seconds = self._state.settings.drain_seconds
        if count := self._state.pool.num_open:
            answers = "an answer" if count == 1 else f"{count} answers"
            print(
                f"heedful: finishing {answers}, at most {seconds:.0f} s; again to stop now", file=sys.stderr, flush=True
            )
        closing = asyncio.create_task(self._state.pool.close(seconds, lambda: self._is_in_hurry))
        await super().shutdown(sockets)
        await closing


def make_server(app: Starlette, settings: ServerSettings) -> Server:
    config = uvicorn.Config(
        app,
        http=LimitedProtocol,
        loop="asyncio",
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(settings.drain_seconds + MARGIN_SECONDS),
    )
    return Server(config, app.state.heedful)


def serve(app: Starlette, settings: ServerSettings, listening: socket.socket) -> None:
    """Until SIGINT or SIGTERM."""
    make_server(app, settings).run(sockets=[listening])
