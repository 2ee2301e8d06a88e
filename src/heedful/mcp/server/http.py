"""An MCP server of ours over streamable HTTP, on one address, for those who may call it.

A server on loopback can be reached by any page in the user's browser: by a name that resolves to 127.0.0.1 (DNS
rebinding: the Host header gives it away), or across origins (the Origin header does). The SDK refuses both; here stands
which hosts and origins are ours. A key, where one is set, is asked for on top.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcp.server import Server
    from starlette.applications import Starlette
    from starlette.types import ASGIApp, Receive, Scope, Send

PATH = "/mcp"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_BACKLOG_SECONDS = 5
_METHODS = ("GET", "POST", "DELETE", "OPTIONS")
_HEADERS = (
    "authorization",
    "content-type",
    "last-event-id",
    "mcp-method",
    "mcp-name",
    "mcp-protocol-version",
    "mcp-session-id",
)


@dataclass(frozen=True)
class HttpSettings:
    host: str = "127.0.0.1"
    port: int = 8090
    """0 takes a free one."""
    api_keys: tuple[str, ...] = ()
    """None: no key is asked for."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names besides the loopback ones that requests may be addressed to."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of other sites' pages that may call."""

    @property
    def is_loopback(self) -> bool:
        return self.host in ("127.0.0.1", "localhost", "::1")


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{PATH}"


def make_app(server: Server[Any], settings: HttpSettings, port: int) -> Starlette:
    """`port`: the one that is listened on."""
    from mcp.server.transport_security import TransportSecuritySettings
    from starlette.middleware.cors import CORSMiddleware

    own = f"[{settings.host}]" if ":" in settings.host else settings.host
    names = tuple(dict.fromkeys((*LOOPBACK, own, *settings.allowed_hosts)))
    security = TransportSecuritySettings(
        allowed_hosts=[*names, *(f"{name}:*" for name in names)],
        allowed_origins=[*(f"http://{name}:{port}" for name in names), *settings.allowed_origins],
    )
    app = server.streamable_http_app(streamable_http_path=PATH, transport_security=security)
    if settings.api_keys:
        app.add_middleware(_Keys, keys=settings.api_keys)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=list(_METHODS),
            allow_headers=list(_HEADERS),
            expose_headers=["mcp-session-id"],
        )
    return app


async def serve_http(server: Server[Any], settings: HttpSettings, listening: socket.socket) -> None:
    """Until SIGINT or SIGTERM."""
    import uvicorn

    app = make_app(server, settings, listening.getsockname()[1])
    config = uvicorn.Config(
        app,
        loop="asyncio",
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=_BACKLOG_SECONDS,
    )
    await uvicorn.Server(config).serve(sockets=[listening])


class _Keys:
    """ASGI middleware: 401 without one of the keys. Compares with every one, in a time that depends on none."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.datastructures import Headers
        from starlette.responses import PlainTextResponse

        if scope["type"] == "http" and scope["method"] != "OPTIONS":
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            given = _digest(key.strip() if scheme.lower() == "bearer" else "")
            if not sum([hmac.compare_digest(digest, given) for digest in self._digests]):
                refusal = PlainTextResponse(
                    "an API key is needed: Authorization: Bearer …", 401, {"www-authenticate": "Bearer"}
                )
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
