"""What a tool of an MCP server of ours is, and what one request is handed. Knows no model and no transport."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from heedful.mcp.server.log import tell
from heedful.mcp.server.questions import Asker

if TYPE_CHECKING:
    from mcp.server import ServerRequestContext
    from mcp_types import CallToolResult, InputResponseRequestParams, LoggingLevel

JSON = dict[str, Any]
REPORT_EVERY_S = 0.1


@dataclass(frozen=True)
class Done:
    """A tool's answer."""

    structured: JSON
    text: str | None = None
    """For clients that read text alone; None: the structured answer as JSON."""
    receipt: Mapping[str, Any] | None = None


@dataclass
class Call:
    """One call of a tool, or one prompt that is asked for. Whoever does may leave: then the task is cancelled."""

    context: ServerRequestContext[Any, Any]
    """The SDK's."""
    asker: Asker
    """For what only the person at the other end can say."""
    _reported_at: float = float("-inf")

    @classmethod
    def of(cls, context: ServerRequestContext[Any, Any], params: InputResponseRequestParams) -> Call:
        return cls(context, Asker(context, params.input_responses, params.request_state))

    async def report(self, done: float, total: float | None, message: str) -> None:
        """Progress, which is passed on where the caller has asked for it, and not more than ten times a second.
        `done` grows from one report to the next."""
        now = monotonic()
        if now - self._reported_at >= REPORT_EVERY_S:
            self._reported_at = now
            await self.context.session.report_progress(done, total, message)

    async def log(self, text: str, level: LoggingLevel = "info") -> None:
        """A line for whoever has asked to hear such lines."""
        await tell(self.context, level, text)


@dataclass(frozen=True)
class ServerTool:
    name: str
    title: str
    description: str
    """When to take it, and when not: this is all that a model elsewhere knows of it."""
    parameters: JSON
    output: JSON | None
    run: Callable[[JSON, Call], Awaitable[Done | CallToolResult]]
    """Called with arguments that the schema allows. Raises HeedfulError for what the caller can mend."""
    hints: Mapping[str, bool] = field(default_factory=lambda: {"read_only": True, "open_world": False})
    """read_only, destructive, idempotent, open_world."""
