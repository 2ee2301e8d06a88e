"""What is refused before a handler sees a request: foreign hosts and origins, missing keys, bodies that are too big.

A server on loopback can be reached by any page in the user's browser: by a name that resolves to 127.0.0.1 (DNS
rebinding: the Host header gives it away), or across origins (the Origin header does). Both are refused unless allowed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from heedful.server import page_api
from heedful.server.failures import Failure, is_system_one, response_of
from heedful.server.ids import new_id
from heedful.server.request_log import RequestLog
from heedful.server.settings import ServerSettings

OPEN_PATHS = frozenset({"/health", "/ready", *page_api.FILES})
"""No key is asked for these; the page asks for it itself."""
UNGUESSABLE_PATHS = "/view/"
"""Nor for what is below: its address is the secret."""
ALSO_NUMBERED = frozenset({"/v1/models", "/v1/decisions"})
"""Beside System One's own route: paths whose answers carry the request id that its clients read."""
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s\[\]:/@]+)(?::[0-9]{0,5})?")
_CORS_HEADERS = (
    "authorization, content-type, content-encoding, x-api-key, anthropic-version, anthropic-beta, "
    "x-typesafe-sdk, x-typesafe-runtime, x-typesafe-retry-count"
)


class Guard:
    """ASGI middleware. Sets scope["state"]["salt"]: of the caller's key, which prefix sharing goes by; and
    scope["state"]["most_body_bytes"], for bodies that are compressed."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, log: RequestLog | None = None) -> None:
        self._app = app
        self._log = log
        self._settings = settings
        self._key_digests = [_digest(key) for key in settings.api_keys]
        self._hosts = _LOOPBACK | {settings.host.lower()} | {host.lower() for host in settings.allowed_hosts}
        self._any_host = "*" in settings.allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if is_system_one(scope["path"]) or scope["path"] in ALSO_NUMBERED:
            send = _with_headers(send, [(b"x-typesafe-request-id", new_id("req_").encode())])
        origin = headers.get("origin")
        if origin is not None and self._is_foreign(origin, headers.get("host", "")):
            if not self._is_allowed_origin(origin):
                message = f"pages of {origin} may not call this server; start it with --allow-origin {origin}"
                await self._refuse(Failure(403, "permission_error", message), scope, receive, send)
                return
            send = _with_headers(send, _cors(origin))
            if scope["method"] == "OPTIONS":
                await send({"type": "http.response.start", "status": 204, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                return
        failure = self._refusal(scope, headers)
        if failure is not None:
            await self._refuse(failure, scope, receive, send)
            return
        await self._app(scope, _limited(receive, self._settings.most_body_bytes), send)

    def _refusal(self, scope: Scope, headers: Headers) -> Failure | None:
        host = headers.get("host", "")
        if len(headers.getlist("host")) != 1 or (not self._any_host and _host_name(host) not in self._hosts):
            message = (
                f"requests to host {host!r} are not answered; start the server with --allow-host {_host_name(host)}"
            )
            return Failure(403, "permission_error", message)
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > self._settings.most_body_bytes:
            return Failure(413, "invalid_request_error", f"the body is over {self._settings.most_body_bytes:,} bytes")
        key = _key_of(headers)
        if self._key_digests and not _is_open(scope["path"]) and not self._is_known(key):
            if is_system_one(scope["path"]) and not key:
                return Failure(403, "authentication_error", "an API key is needed: Authorization: Bearer …")
            return Failure(401, "authentication_error", "the API key is missing or wrong", code="invalid_api_key")
        state = scope.setdefault("state", {})
        state["salt"] = _digest(key).hex() if self._key_digests else ""
        state["most_body_bytes"] = self._settings.most_body_bytes
        return None

    def _is_known(self, key: str) -> bool:
        """Compares with every key, in a time that depends on none of them."""
        found = False
        for digest in self._key_digests:
            found |= hmac.compare_digest(digest, _digest(key))
        return found

    def _is_foreign(self, origin: str, host: str) -> bool:
        scheme, _, name = origin.partition("://")
        return scheme not in ("http", "https") or name.lower() != host.lower()

    def _is_allowed_origin(self, origin: str) -> bool:
        return "*" in self._settings.allowed_origins or origin in self._settings.allowed_origins

    async def _refuse(self, failure: Failure, scope: Scope, receive: Receive, send: Send) -> None:
        if self._log is not None:
            self._log.refused(scope["method"], scope["path"], failure)
        await response_of(failure, scope["path"])(scope, receive, send)


class BodyTooLarge(Exception):
    """More came than the content-length header, or its absence, let expect."""


def _limited(receive: Receive, most_bytes: int) -> Receive:
    taken = 0

    async def limited() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > most_bytes:
            raise BodyTooLarge
        return message

    return limited


def _with_headers(send: Send, headers: Iterable[tuple[bytes, bytes]]) -> Send:
    more = list(headers)

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *more]
        await send(message)

    return sending


def _cors(origin: str) -> Iterable[tuple[bytes, bytes]]:
    yield b"access-control-allow-origin", origin.encode("latin-1", "replace")
    yield b"access-control-allow-headers", _CORS_HEADERS.encode()
    yield b"access-control-allow-methods", b"GET, POST, PUT, DELETE"
    yield b"access-control-max-age", b"600"
    yield b"vary", b"Origin"


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(UNGUESSABLE_PATHS)


def _key_of(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _host_name(host: str) -> str:
    """Without the port; "" for what is no host."""
    found = _HOST.fullmatch(host)
    return found[1].lower() if found else ""
