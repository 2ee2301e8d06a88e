"""The application behind a socket: uvicorn, with a limit on headers and an orderly end."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from heedful.errors import BadParameter
from heedful.server.settings import MOST_HEADER_BYTES, ServerSettings
from heedful.server.state import ServerState

MARGIN_SECONDS = 5.0


class LimitedProtocol(HttpToolsProtocol):
    """Refuses headers that are too big while they come: the parser itself would keep them all."""

    _is_in_headers = True
    _header_bytes = 0

    def on_message_begin(self) -> None:
        self._is_in_headers = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        self._header_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_headers = True
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self._is_in_headers:
            self._header_bytes += len(data)
            end = data.find(b"\r\n\r\n")  # a body may follow in the same piece
            if self._header_bytes > MOST_HEADER_BYTES and not 0 <= end < MOST_HEADER_BYTES:
                self.send_400_response("Request header too large.")
                return
        super().data_received(data)


class Server(uvicorn.Server):
    """Going down: no new requests, open ones get their time, and what is left then ends with a last event."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self._state = state

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.is_ready = False
        closing = asyncio.create_task(self._state.pool.close(self._state.settings.drain_seconds))
        await super().shutdown(sockets)
        await closing


def serve(app: Starlette, settings: ServerSettings, listening: socket.socket) -> None:
    """Until SIGINT or SIGTERM."""
    config = uvicorn.Config(
        app,
        http=LimitedProtocol,
        loop="asyncio",
        ws="none",
        lifespan="on",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=int(settings.drain_seconds + MARGIN_SECONDS),
    )
    Server(config, app.state.heedful).run(sockets=[listening])


def listen(settings: ServerSettings) -> socket.socket:
    """Raises BadParameter where the address cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
    except OSError as error:
        listening.close()
        raise BadParameter(
            "port", f"{settings.host}:{settings.port} cannot be had: {error.strerror}", "Choose another with --port."
        ) from error
    return listening
