"""What a tool of an MCP server of ours is, and what one call of it is handed. Knows no model and no transport."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcp.server import ServerRequestContext
    from mcp_types import CallToolResult

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
    """One call. Whoever makes it may leave: then the task that runs the tool is cancelled."""

    context: ServerRequestContext[Any, Any]
    """The SDK's."""
    _reported_at: float = float("-inf")

    async def report(self, done: float, total: float | None, message: str) -> None:
        """Progress, which is passed on where the caller has asked for it, and not more than ten times a second.
        `done` grows from one report to the next."""
        now = monotonic()
        if now - self._reported_at >= REPORT_EVERY_S:
            self._reported_at = now
            await self.context.session.report_progress(done, total, message)


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
