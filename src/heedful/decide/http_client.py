"""JSON over http.client to one server: connections kept for the next request, retries. Owns timeouts, waits, sizes, and
that no key gets into an error.

Nothing follows a redirect: a key goes to the server it was given for, and nowhere else.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import isfinite
from urllib.parse import urlsplit

from heedful.errors import BadParameter, HeedfulError, NetworkUnavailable

MOST_ANSWER_BYTES = 32 << 20
FIRST_WAIT, LONGEST_WAIT = 0.5, 5.0
"""Seconds before a retry where the server names none: doubled each time."""
MOST_KEPT = 8
"""Connections that wait open for the next request; as many requests as there are threads may run."""
_PART_BYTES = 1 << 16
LONGEST = 1e9
"""Seconds: what sockets and sleep take."""
_STALE = (http.client.RemoteDisconnected, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
"""What a request meets on a kept connection that the server has closed meanwhile."""


@dataclass(frozen=True)
class Endpoint:
    """Where requests go."""

    scheme: str
    host: str
    port: int | None
    base: str
    """Path before every route."""

    @staticmethod
    def parse(url: str, route: str) -> Endpoint:
        """`url`: of the server, or of the route itself. Raises BadParameter."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise BadParameter("url", "is not a URL", _EXAMPLE) from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadParameter("url", "must begin with http:// or https:// and name a host", _EXAMPLE)
        if parts.username or parts.password or parts.query or parts.fragment:
            raise BadParameter("url", "must carry no user, query or fragment", _EXAMPLE)
        base = parts.path.rstrip("/").removesuffix(route)
        if not (base.isascii() and base.isprintable() and " " not in base):
            raise BadParameter("url", "has a path that no request can carry", _EXAMPLE)
        return Endpoint(parts.scheme, parts.hostname, port, base)

    @property
    def where(self) -> str:
        """For people."""
        return self.host if self.port is None else f"{self.host}:{self.port}"

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self.scheme == "https" else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=timeout)
        connection.connect()
        return connection


_EXAMPLE = "A URL looks like https://api.typesafe.ai or http://127.0.0.1:8000."


@dataclass(frozen=True)
class Message:
    """One request; its body is empty where it has none."""

    method: str
    route: str
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True)
class Reply:
    status: int
    headers: http.client.HTTPMessage
    body: bytes
    attempts: int


@dataclass(frozen=True)
class Patience:
    """timeout: seconds to connect, again to wait for an answer, and again for all of its body. retries: after the first
    attempt. most_waiting: seconds that all waits between attempts may take together."""

    timeout: float = 60.0
    retries: int = 2
    most_waiting: float = 30.0

    def __post_init__(self) -> None:
        for name in ("timeout", "most_waiting"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LONGEST:
                raise BadParameter(name, f"must be a number of seconds, not {value!r:.40}")
        if not self.timeout:
            raise BadParameter("timeout", "must be more than 0 seconds")
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise BadParameter("retries", f"must be a whole number, 0 or more, not {self.retries!r:.40}")


class HttpClient:
    """Requests to one server. Threads may share it; each request has a connection to itself while it runs."""

    def __init__(self, endpoint: Endpoint, patience: Patience, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.endpoint = endpoint
        self._patience = patience
        self._sleep = sleep
        self._kept: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self.close = weakref.finalize(self, _close_all, self._kept)
        """Closes the connections that are open for the next request; happens by itself with the last reference."""

    def send(self, message: Message) -> Reply:
        """The answer, whatever its status, of the last attempt. Raises NetworkUnavailable when none came.

        Retried: 408, 429, 5xx, and attempts that broke off. Retry-After-Ms and Retry-After are honoured, unless they
        ask for more than what is left of `most_waiting`.
        """
        patience, left = self._patience, self._patience.most_waiting
        for attempt in range(patience.retries + 1):
            reply, problem = None, ""
            try:
                reply = self._attempt(message, attempt)
            except TimeoutError:
                problem = f"did not answer within {patience.timeout:g} s"
            except (OSError, http.client.HTTPException) as error:
                problem = f"could not be reached or broke off ({type(error).__name__})"
            wanted = None if reply is None else retry_after(reply.headers)
            wait = min(LONGEST_WAIT, FIRST_WAIT * 2**attempt) if wanted is None else wanted
            may_retry = reply is None or reply.status in (408, 429) or reply.status >= 500
            if may_retry and attempt < patience.retries and wait <= left:
                left -= wait
                self._sleep(wait)
            elif reply is not None:
                return reply
            else:
                raise NetworkUnavailable(
                    f"{self.endpoint.where} {problem}, {attempt + 1} time{'' if attempt == 0 else 's'}",
                    "Check the URL and the network, or give it longer.",
                )
        raise AssertionError(patience)

    def _attempt(self, message: Message, attempt: int) -> Reply:
        """On a kept connection where there is one; a new one where the server has closed that meanwhile."""
        with self._lock:
            kept = self._kept.pop() if self._kept else None
        if kept is not None:
            try:
                return self._exchange(kept, message, attempt)
            except _STALE:
                pass
        return self._exchange(self.endpoint.connect(self._patience.timeout), message, attempt)

    def _exchange(self, connection: http.client.HTTPConnection, message: Message, attempt: int) -> Reply:
        retry = {"X-TypeSafe-Retry-Count": str(attempt)} if attempt else {}
        is_whole = False
        try:
            wire = connection.sock  # the connection lets go of it where the server will close
            wire.settimeout(self._patience.timeout)
            path = self.endpoint.base + message.route
            connection.request(message.method, path, message.body or None, {**message.headers, **retry})
            with connection.getresponse() as response:
                body = self._body(response, wire)
                is_whole = not response.will_close
                reply = Reply(response.status, response.headers, body, attempt + 1)
        finally:
            if not (is_whole and self._keeps(connection)):
                connection.close()
        return reply

    def _body(self, response: http.client.HTTPResponse, wire: socket.socket) -> bytes:
        deadline, parts, size = time.monotonic() + self._patience.timeout, list[bytes](), 0
        while part := response.read1(_PART_BYTES):
            parts.append(part)
            size += len(part)
            if size > MOST_ANSWER_BYTES:
                raise HeedfulError(f"{self.endpoint.where} sends more than {MOST_ANSWER_BYTES >> 20} MiB")
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if wire.fileno() >= 0:
                wire.settimeout(left)
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        return b"".join(parts)

    def _keeps(self, connection: http.client.HTTPConnection) -> bool:
        with self._lock:
            if len(self._kept) < MOST_KEPT and self.close.alive:
                self._kept.append(connection)
                return True
        return False


def _close_all(connections: list[http.client.HTTPConnection]) -> None:
    while connections:
        connections.pop().close()


def retry_after(headers: http.client.HTTPMessage) -> float | None:
    """Seconds that the server asks to wait; None where it names none that can be read."""
    for name, unit in (("Retry-After-Ms", 0.001), ("Retry-After", 1.0)):
        text = headers.get(name)
        if text is None:
            continue
        try:
            seconds = float(text) * unit
        except ValueError:
            seconds = _until(text) if unit == 1 else float("nan")
        if isfinite(seconds):
            return max(0.0, seconds)
    return None


def _until(date: str) -> float:
    try:
        when = parsedate_to_datetime(date)
    except ValueError:
        return float("nan")
    return ((when if when.tzinfo else when.replace(tzinfo=UTC)) - datetime.now(UTC)).total_seconds()
