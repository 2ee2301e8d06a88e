"""From what a model wants to call to what it is shown of the result, and a record of what that took.

    caller = ToolCaller(manager, Shower(HandleStore(), Budget(), count), approve=ask_the_person)
    done = await caller.call("shop__stock", '{"item": "tea"}')      # a model's text, or an object
    done.text, done.record                                          # for the model; for the receipt
    caller.new_turn()                                               # a user has spoken: calls may come again

One caller a conversation. Never raises for what a model or a tool does wrong: `done.error` is the error, and
`done.text` is one line of it that the model can act on.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, Literal

from heedful.errors import HeedfulError, McpBadArguments, McpDenied, McpHandleError, McpRepeated
from heedful.mcp.calls.handles import Handle
from heedful.mcp.calls.policy import Verdict, lifetime_s, may_repeat, verdict
from heedful.mcp.calls.results import Shower, Shown, ToolOutput, as_data, output_of
from heedful.mcp.catalogue.catalog import CatalogTool
from heedful.mcp.client.connection import Progress
from heedful.mcp.schemas.arguments import fitted, parsed

if TYPE_CHECKING:
    from mcp_types import CallToolResult

    from heedful.mcp.client.manager import McpManager

MOST_EQUAL_CALLS = 2
"""In one turn; of the second the answer is the first's."""
_ERROR_CHARS = 400

Outcome = Literal["ok", "tool_error", "bad_arguments", "denied", "repeated", "failed"]
"""tool_error: the tool says that it failed; failed: no answer, or no such tool."""
Approve = Callable[[CatalogTool, Mapping[str, Any], str], Awaitable[bool] | bool]
"""Called with the tool, its arguments and why it asks."""


@dataclass(frozen=True)
class CallRecord:
    tool: str
    """As the model named it."""
    server: str
    outcome: Outcome
    ms: float
    """Waiting for a person not counted."""
    result_bytes: int
    shown_tokens: int | None
    """None without a counter; so is the next."""
    held_tokens: int | None
    """Of the result, not put before the model; of long results scaled up from their first 32,768 characters."""
    held_bytes: int
    cached: bool
    """Answered without asking the server."""
    repairs: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()


@dataclass(frozen=True)
class CallDone:
    text: str
    """For the model, as the content of a message of role tool."""
    record: CallRecord
    output: ToolOutput | None = None
    """All of it; None where there was none."""
    shown: Shown | None = None
    error: HeedfulError | None = None
    result: CallToolResult | None = None
    """As the SDK gave it."""


@dataclass(frozen=True)
class _Answer:
    output: ToolOutput
    shown: Shown
    result: CallToolResult


@dataclass
class _Equal:
    """Equal calls of one turn."""

    task: asyncio.Task[_Answer]
    waiting: int = 0
    calls: int = 1
    """Those that came while the same was under way are one."""


@dataclass(frozen=True)
class _Cached:
    answer: _Answer
    until: float


class ToolCaller:
    """`approve`: for calls that the policy asks about; without it they are denied."""

    def __init__(
        self,
        manager: McpManager,
        shower: Shower,
        *,
        approve: Approve | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._manager = manager
        self._shower = shower
        self._approve = approve
        self._clock = clock
        self._equal: dict[str, _Equal] = {}
        self._cache: dict[str, _Cached] = {}
        self._asking = asyncio.Lock()
        self._has_heard_orders = False
        """A result of this conversation was flagged: from then on what does not only read is asked about."""
        self._opened: dict[str, str] = {}
        """Handle of a link → that of what is there."""

    def new_turn(self) -> None:
        """Equal calls are counted anew, and answers without a lifetime are forgotten."""
        self._equal = {key: equal for key, equal in self._equal.items() if not equal.task.done()}

    async def call(
        self,
        tool: str | CatalogTool,
        arguments: str | Mapping[str, Any],
        *,
        on_progress: Progress | None = None,
        timeout_s: float | None = None,
    ) -> CallDone:
        """Cancelling the task that waits here cancels the call in the server, unless an equal one waits for it too."""
        begun = perf_counter()
        name = tool if isinstance(tool, str) else tool.model_name
        told = _Told(name)
        try:
            found = tool if isinstance(tool, CatalogTool) else await self._found(tool)
            told.server = found.server
            return await self._called(
                found, arguments, told, begun, {"on_progress": on_progress, "timeout_s": timeout_s}
            )
        except HeedfulError as error:
            return self._failed(error, told, begun)

    async def opened(self, handle_id: str) -> Handle:
        """A kept result to be read; of a link what its server has there, asked for once, under the policy of the tool
        that gave the link. Raises McpHandleError, McpDenied, and as McpManager.call does."""
        store = self._shower.store
        handle = store.get(handle_id)
        if handle.kind != "link":
            return handle
        if handle_id not in self._opened:
            tool, uri = await self._found(handle.source), str(handle.value["uri"])
            await self._check_policy(tool, {"uri": uri})
            result = await self._manager.read_resource(tool.server, uri)
            texts = [each.text for each in result.contents if hasattr(each, "text")]
            blobs = [each for each in result.contents if hasattr(each, "blob")]
            if texts or not blobs:
                kept = store.keep("\n".join(texts), source=handle.source)
            else:
                media = blobs[0].mime_type or "application/octet-stream"
                kept = store.keep(blobs[0].blob, source=handle.source, kind="binary", media_type=media)
            self._opened[handle_id] = kept.id
        return store.get(self._opened[handle_id])

    async def _found(self, name: str) -> CatalogTool:
        return self._manager.offered(await self._manager.catalogue(), name)

    async def _called(
        self, tool: CatalogTool, given: str | Mapping[str, Any], told: _Told, begun: float, limits: dict[str, Any]
    ) -> CallDone:
        signature = tool.signature.partition(" - ")[0]
        read = parsed(given, tool.model_name, signature)
        with_values = replace(read, values=self._shower.store.filled(read.values, tool.parameters))
        ready = fitted(with_values, tool.parameters, tool.model_name, signature)
        told.repairs = ready.repairs
        key = json.dumps([tool.server, tool.name, tool.fingerprint, ready.values], sort_keys=True)
        cached = self._cached(key)
        answer, is_again = await self._answer(key, cached, tool, ready.values, told, limits)
        begun += told.asked_s
        return self._done(answer, told, begun, is_cached=is_again or cached is not None, is_again=is_again)

    async def _check_policy(self, tool: CatalogTool, arguments: Mapping[str, Any]) -> None:
        found = verdict(tool, self._manager.config.servers[tool.server])
        if found.action == "allow" and self._has_heard_orders and tool.hints.read_only is not True:
            found = Verdict("ask", "what a tool has said before looks like orders to the model")
        if found.action == "allow":
            return
        if found.action == "ask" and self._approve is not None:
            async with self._asking:  # one question at a time
                answer = self._approve(tool, arguments, found.why)
                if answer is True or (not isinstance(answer, bool) and await answer):
                    return
            raise McpDenied(f"{tool.model_name}: the user does not want this call", "Do without it.")
        raise _denied(tool, found)

    def _cached(self, key: str) -> _Answer | None:
        cached = self._cache.get(key)
        if cached is None:
            return None
        if cached.until <= self._clock() or not self._is_kept(cached.answer):
            del self._cache[key]
            return None
        return cached.answer

    def _is_kept(self, answer: _Answer) -> bool:
        """Whether what it says is behind handles still is."""
        try:
            return all(self._shower.store.get(handle.id) is handle for handle in answer.shown.handles)
        except McpHandleError:
            return False

    async def _answer(
        self,
        key: str,
        cached: _Answer | None,
        tool: CatalogTool,
        arguments: dict[str, Any],
        told: _Told,
        limits: dict[str, Any],
    ) -> tuple[_Answer, bool]:
        """And whether it is that of an equal call of this turn."""

        def begun() -> asyncio.Task[_Answer]:
            return asyncio.create_task(self._made(key, cached, tool, arguments, told, limits))

        equal = self._equal.get(key)
        if equal is None:
            equal = self._equal[key] = _Equal(begun())
            return await _shared(equal), False
        if not equal.task.done():
            return await _shared(equal), True
        equal.calls += 1
        if equal.calls > MOST_EQUAL_CALLS:
            raise McpRepeated(
                f"{tool.model_name} was called with the same arguments {equal.calls} times in this turn",
                "Use the answer above, or say that it cannot be done.",
            )
        failed = equal.task.cancelled() or equal.task.exception() is not None
        if failed and not _was_denied(equal.task):  # no answer yet: it may be tried again
            equal.task = begun()
        return await _shared(equal), not failed

    async def _made(
        self,
        key: str,
        cached: _Answer | None,
        tool: CatalogTool,
        arguments: dict[str, Any],
        told: _Told,
        limits: dict[str, Any],
    ) -> _Answer:
        if cached is not None:
            return cached
        asked = perf_counter()
        await self._check_policy(tool, arguments)
        told.asked_s = perf_counter() - asked
        server = self._manager.config.servers[tool.server]
        before_s = self._manager.asked_s(tool.server)
        result = await self._manager.call_tool(tool, arguments, replay=may_repeat(tool, server), **limits)
        told.asked_s += self._manager.asked_s(tool.server) - before_s
        output = output_of(result, tool.model_name)
        answer = _Answer(output, self._shower.shown(output), result)
        lifetime = lifetime_s(tool, server)
        if lifetime and not output.is_error:
            self._cache[key] = _Cached(answer, self._clock() + lifetime)
        return answer

    def _done(self, answer: _Answer, told: _Told, begun: float, *, is_cached: bool, is_again: bool) -> CallDone:
        shown, output = answer.shown, answer.output
        self._has_heard_orders = self._has_heard_orders or bool(shown.findings)
        text = shown.text
        if is_again:
            text = f"[the same call as before; its answer again, do not make it a third time]\n{text}"
        record = CallRecord(
            told.tool,
            told.server,
            "tool_error" if output.is_error else "ok",
            (perf_counter() - begun) * 1000,
            output.size_bytes,
            shown.tokens if not is_again or self._shower.count is None else self._shower.count(text),
            shown.held_tokens,
            shown.held_bytes,
            is_cached,
            told.repairs,
            shown.findings,
        )
        return CallDone(text, record, output, shown, None, answer.result)

    def _failed(self, error: HeedfulError, told: _Told, begun: float) -> CallDone:
        outcome: Outcome = "failed"
        for kind, named in _OUTCOMES:
            if isinstance(error, kind):
                outcome = named
        for_model = f"{error.message}. {error.remedy}" if _is_for_model(error) else error.message
        line = as_data(" ".join(f"error: {for_model}".split()))
        text = line if len(line) <= _ERROR_CHARS else line[: _ERROR_CHARS - 1] + "…"
        tokens = None if self._shower.count is None else self._shower.count(text)
        held = None if tokens is None else 0
        ms = (perf_counter() - begun) * 1000
        record = CallRecord(told.tool, told.server, outcome, ms, 0, tokens, held, 0, False, told.repairs)
        return CallDone(text, record, error=error)


@dataclass
class _Told:
    """For the record, as far as the call has come."""

    tool: str
    server: str = ""
    repairs: tuple[str, ...] = ()
    asked_s: float = 0.0
    """Waited for a person."""


_OUTCOMES: tuple[tuple[type[HeedfulError], Outcome], ...] = (
    (McpBadArguments, "bad_arguments"),
    (McpHandleError, "bad_arguments"),
    (McpDenied, "denied"),
    (McpRepeated, "repeated"),
)


def _was_denied(task: asyncio.Task[_Answer]) -> bool:
    return not task.cancelled() and isinstance(task.exception(), McpDenied)


def _is_for_model(error: HeedfulError) -> bool:
    """Whether its remedy is something that the model can do; the others are for the person."""
    return isinstance(error, McpBadArguments | McpHandleError | McpRepeated) and bool(error.remedy)


def _denied(tool: CatalogTool, found: Verdict) -> McpDenied:
    remedy = f'To allow it: "{tool.name}" under allow of x-heedful of server {tool.server!r}.'
    return McpDenied(f"{tool.model_name} is not allowed: {found.why}", remedy if found.action == "ask" else "")


async def _shared(equal: _Equal) -> _Answer:
    """Waits for a task that others may wait for too; the last who gives up ends it."""
    equal.waiting += 1
    task = equal.task
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if equal.waiting == 1 and not task.done():
            task.cancel()
            await asyncio.wait([task])
        if task.done() and not task.cancelled():
            task.exception()  # seen
        raise
    finally:
        equal.waiting -= 1
