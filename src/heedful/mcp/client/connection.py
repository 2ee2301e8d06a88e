"""One server: started when it is first needed, started again after it has ended, left alone when it keeps failing.

    stopped → starting → ready → (ended) backoff → starting → …
                                 after BREAKER_FAILURES in a row: open, for BREAKER_S; then one try

One task owns the SDK's Client, for it must be entered and left in the same task; calls come from any task of the same
loop. Knows nothing of names, schemas and approvals.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from heedful.errors import HeedfulError, McpCallFailed, McpServerDown
from heedful.mcp.client.call_clock import CallClock
from heedful.mcp.client.elicit import Ask, answered
from heedful.mcp.client.session import Session, first_fault, is_of_transport, opened, reason, unasked
from heedful.mcp.client.sift import MalformedTool
from heedful.mcp.client.stdio import Tail
from heedful.mcp.schemas.validate import has_more_values, schema_fault
from heedful.mcp.settings.config import ServerConfig
from heedful.mcp.settings.variables import Secrets

if TYPE_CHECKING:
    from mcp_types import CallToolResult, ElicitRequestParams, ElicitResult, ErrorData, ReadResourceResult, Tool

START_S = 60.0
"""A server's longest start, downloads of npx and uvx included."""
BACKOFF_FIRST_S, BACKOFF_MOST_S = 0.2, 30.0
"""Doubled with each failure in a row, then multiplied by a random number from 0.5 to 1."""
BREAKER_FAILURES = 5
BREAKER_S = 60.0
MAX_PAGES = 100
MAX_TOOLS = 5000
"""Of one server."""

_CONNECTION_CLOSED = -32000
_SESSION_GONE = (-32600, -32001)  # what HTTP servers answer to a session that they have forgotten

_Result = TypeVar("_Result")
Progress = Callable[[float, float | None, str | None], Awaitable[None] | None]
"""Called with (done, total if known, message if any)."""


@dataclass(frozen=True)
class Patience:
    """How failures are answered. Tests make it short."""

    start_s: float = START_S
    backoff_first_s: float = BACKOFF_FIRST_S
    backoff_most_s: float = BACKOFF_MOST_S
    breaker_failures: int = BREAKER_FAILURES
    breaker_s: float = BREAKER_S

    def backoff_s(self, failures: int, fraction: float) -> float:
        """Before the try after so many failures in a row; `fraction` from [0, 1) is the dice."""
        if failures < 1:
            return 0.0
        longest: float = min(self.backoff_most_s, self.backoff_first_s * 2.0 ** min(failures - 1, 60))
        return longest * (0.5 + 0.5 * fraction)


@dataclass(frozen=True)
class ServerStatus:
    name: str
    state: str
    """ "stopped", "starting", "ready", "backoff" or "open" (left alone)."""
    protocol: str | None
    """The protocol's revision, while it is ready."""
    starts: int
    failures_in_row: int
    last_failure: str
    """Why it last ended or did not start, with the last line that it wrote; "" for never."""


@dataclass(frozen=True)
class Listing:
    """What a server says it offers, all pages."""

    tools: tuple[Tool, ...]
    malformed: tuple[MalformedTool, ...]
    """Tools that the protocol does not allow; the others are not worse for them."""
    ttl_s: float | None
    """How long it may be believed; None: until the server says otherwise or is started again."""


class Connection:
    """For one configured server, in one event loop. `ask`: puts its questions to the person; None: nobody is there, and
    the server is told so from the start."""

    def __init__(self, config: ServerConfig, patience: Patience | None = None, ask: Ask | None = None) -> None:
        self.config = config
        self._ask = ask
        self._clocks: set[CallClock] = set()
        self.asked_s = 0.0
        """For which it has waited for the person, altogether."""
        self._patience = patience or Patience()
        self._session: Session | None = None
        self._starting: asyncio.Task[Session] | None = None
        self._owner: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._calls = asyncio.Semaphore(config.max_concurrency)
        self._starts = 0
        self._failures = 0
        self._failed_at = 0.0
        self._wait_s = 0.0
        self._last_failure = ""
        self._secrets = Secrets()
        self.tail = Tail(self._secrets)
        """What the server wrote to stderr."""

    def status(self) -> ServerStatus:
        session = self._live()
        if session is not None:
            state = "ready"
        elif self._starting is not None:
            state = "starting"
        elif self._failures >= self._patience.breaker_failures and self._wait_left() > 0:
            state = "open"
        else:
            state = "backoff" if self._wait_left() > 0 else "stopped"
        protocol = session.client.protocol_version if session else None
        return ServerStatus(self.config.name, state, protocol, self._starts, self._failures, self._last_failure)

    @property
    def has_news(self) -> bool:
        """Whether what was listed may no longer be so: the server has ended, or has said so."""
        session = self._live()
        return session is None or session.tools_changed.is_set()

    async def start(self) -> None:
        """Raises McpServerDown, McpConfigError."""
        await self._connected()

    async def listing(self) -> Listing:
        """All pages of the server's tools. Raises McpServerDown, McpCallFailed."""
        session = await self._connected()
        session.tools_changed.clear()
        session.malformed.clear()
        session.output_schemas.clear()
        tools: list[Tool] = []
        ttls: list[float] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            async with self._failures_named("tools/list", session):
                page = await asyncio.wait_for(
                    session.client.list_tools(cursor=cursor, cache_mode="bypass"), self.config.timeout_s
                )
            tools += [
                tool.model_copy(update={"output_schema": session.output_schemas.get(tool.name)}) for tool in page.tools
            ]
            if "ttl_ms" in page.model_fields_set and page.ttl_ms is not None:
                ttls.append(page.ttl_ms / 1000)
            if page.next_cursor is None or page.next_cursor == cursor:
                return Listing(tuple(tools), tuple(session.malformed), min(ttls, default=None))
            if len(tools) > MAX_TOOLS:
                raise self._refused("tools/list", f"it lists more than {MAX_TOOLS:,} tools")
            cursor = page.next_cursor
        raise self._refused("tools/list", f"its list of tools has more than {MAX_PAGES} pages")

    async def call(
        self,
        tool: str,
        arguments: dict[str, Any],
        *,
        on_progress: Progress | None = None,
        timeout_s: float | None = None,
        idle_timeout_s: float | None = None,
    ) -> CallToolResult:
        """Calls once. Waits for a free place first (that is no idle time). Cancelling the task cancels the call there.

        Raises McpTimeout, McpServerDown (before the call, or in the middle of it), McpCallFailed, McpConfigError.
        """
        async with self._calls:
            session = await self._connected()
            result = await self._timed(session, tool, arguments, on_progress, timeout_s, idle_timeout_s)
        self._failures = 0  # only an answer shows that it works
        return result

    async def read(self, uri: str) -> ReadResourceResult:
        """Reads a resource once. Raises as `call` does."""
        async with self._calls:
            session = await self._connected()
            clock = CallClock(self.config.timeout_s, self.config.idle_timeout_s)
            result = await self._clocked(clock, "resources/read", session, lambda: session.client.read_resource(uri))
        self._failures = 0
        return result

    async def _timed(
        self,
        session: Session,
        tool: str,
        arguments: dict[str, Any],
        on_progress: Progress | None,
        timeout_s: float | None,
        idle_timeout_s: float | None,
    ) -> CallToolResult:
        clock = CallClock(
            self.config.timeout_s if timeout_s is None else timeout_s,
            self.config.idle_timeout_s if idle_timeout_s is None else idle_timeout_s,
        )

        async def progressed(progress: float, total: float | None, message: str | None) -> None:
            clock.progressed()
            if on_progress is not None:
                waits = on_progress(progress, total, message)
                if waits is not None:
                    await waits

        async def asked() -> CallToolResult:
            result = await session.client.call_tool(tool, arguments, progress_callback=progressed)
            self._check_output(tool, result, session.output_schemas.get(tool))
            return result

        return await self._clocked(clock, tool, session, asked)

    async def _clocked(
        self, clock: CallClock, tool: str, session: Session, ask: Callable[[], Awaitable[_Result]]
    ) -> _Result:
        self._clocks.add(clock)
        try:
            with clock.scope:
                async with self._failures_named(tool, session):
                    return await ask()
        finally:
            self._clocks.discard(clock)
        raise clock.error(self.config.name, tool)

    async def _elicited(self, ask: Ask, context: Any, params: ElicitRequestParams) -> ElicitResult | ErrorData:
        """No call's time runs while the person thinks."""
        clocks, begun = tuple(self._clocks), monotonic()
        for clock in clocks:
            clock.pause()
        try:
            return await answered(self.config.name, params, ask)
        finally:
            self.asked_s += monotonic() - begun
            for clock in clocks:
                clock.resume()

    def _check_output(self, tool: str, result: CallToolResult, schema: Any) -> None:
        """Results of very many values are not checked (schemas/validate.py), nor those of a tool that has failed."""
        value = result.structured_content
        if schema is None or result.is_error or has_more_values(value):
            return
        fault = "there is none" if value is None else schema_fault(value, schema)
        if fault:
            raise self._refused(tool, f"its structured content is not what its output schema says: {fault}")

    async def close(self) -> None:
        """Ends the server; returns when it is gone."""
        self._stop.set()
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._owner is not None:
            await asyncio.wait([self._owner])

    # starting

    async def _connected(self) -> Session:
        session = self._live()
        if session is not None:
            return session
        if self._stop.is_set():
            raise McpServerDown(self.config.name, "is not used any more: its manager was closed")
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(self._has_started)
        return await asyncio.shield(self._starting)

    def _has_started(self, task: asyncio.Task[Session]) -> None:
        self._starting = None
        if not task.cancelled():
            task.exception()  # seen: whoever waits gets it, and nobody may

    def _live(self) -> Session | None:
        return None if self._session is None or self._session.lost.is_set() else self._session

    def _wait_left(self) -> float:
        return self._failed_at + self._wait_s - monotonic() if self._failures else 0.0

    async def _start(self) -> Session:
        if self._owner is not None:
            await asyncio.wait([self._owner])  # what is left of its last life
        if self._failures >= self._patience.breaker_failures and self._wait_left() > 0:
            raise McpServerDown(
                self.config.name,
                f"has failed {self._failures} times in a row and is left alone for {self._wait_left():.0f} s. It "
                f"{self._last_failure}",
            )
        await asyncio.sleep(max(0.0, self._wait_left()))
        self._starts += 1
        ready: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(ready))
        try:
            async with asyncio.timeout(self._patience.start_s):
                self._session = await asyncio.shield(ready)
        except BaseException as error:
            self._owner.cancel()
            await asyncio.wait([self._owner])
            if isinstance(error, TimeoutError):
                error = self._down(f"was not ready within {self._patience.start_s:g} s")
            if isinstance(error, McpServerDown):
                self._note_failure(error.what)
            raise error from None
        return self._session

    async def _own(self, ready: asyncio.Future[Session]) -> None:
        """Holds the client open until the server is lost or not needed any more."""
        lost = asyncio.Event()
        try:
            answer = None if self._ask is None else partial(self._elicited, self._ask)
            async with opened(self.config, self._prepared, lost, answer) as session:
                ready.set_result(session)
                await _first(lost.wait(), self._stop.wait())
        except Exception as error:
            cause = error if isinstance(error, HeedfulError) else self._down(f"does not start: {reason(error)}")
            if not ready.done():
                ready.set_exception(cause)
                ready.exception()  # the starter may have been cancelled
        finally:
            lost.set()
            if not ready.done():
                ready.cancel()
            elif not self._stop.is_set() and not ready.cancelled() and ready.exception() is None:
                self._note_failure(self._down("has ended").what)

    def _prepared(self, secrets: Secrets) -> Tail:
        """For a new life of the server."""
        self._secrets = secrets
        self.tail = Tail(secrets)
        return self.tail

    def _note_failure(self, message: str) -> None:
        self._failures += 1
        self._failed_at = monotonic()
        self._last_failure = message
        if self._failures >= self._patience.breaker_failures:
            self._wait_s = self._patience.breaker_s
        else:
            self._wait_s = self._patience.backoff_s(self._failures, random.random())

    # failures

    def _down(self, what: str) -> McpServerDown:
        said = self.tail.last_line()
        message = self._secrets.hidden(what) + (f"; it wrote last: {said}" if said else "")
        return McpServerDown(self.config.name, message, "Its command and stderr: heedful mcp list --config FILE")

    def _refused(self, tool: str, message: str, code: int | None = None) -> McpCallFailed:
        return McpCallFailed(self.config.name, tool, self._secrets.hidden(message)[:500], code)

    @asynccontextmanager
    async def _failures_named(self, tool: str, session: Session) -> AsyncIterator[None]:
        """Whatever the SDK raises leaves as an error of ours; a lost connection is marked as such."""
        from mcp import MCPError
        from mcp.client import InputRequiredRoundsExceededError
        from pydantic import ValidationError

        try:
            yield
        except TimeoutError:
            raise self._refused(tool, f"no answer within {self.config.timeout_s:g} s") from None
        except MCPError as error:
            if session.lost.is_set() or error.code == _CONNECTION_CLOSED or self._session_is_gone(error):
                session.lost.set()
                await asyncio.sleep(0.05)  # for what it wrote last
                raise self._down(f"has ended during {tool}") from None
            raise self._refused(tool, unasked(error) or error.message, error.code) from None
        except ValidationError as error:
            raise self._refused(tool, f"its answer is against the protocol: {first_fault(error)}") from None
        except HeedfulError:
            raise
        except InputRequiredRoundsExceededError:
            raise self._refused(tool, "it asks for more again and again, and was given up") from None
        except Exception as error:
            if not is_of_transport(error):
                raise
            session.lost.set()
            raise self._down(f"cannot be reached: {reason(error)}") from None

    def _session_is_gone(self, error: Any) -> bool:
        """An HTTP server was started anew and does not know us."""
        is_http = not hasattr(self.config.launch, "command")
        return is_http and error.code in _SESSION_GONE and "session" in error.message.lower()


async def _first(*awaitables: Awaitable[Any]) -> None:
    """Returns when one of them has; the others are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
