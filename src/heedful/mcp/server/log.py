"""What a server of ours tells its callers beside results: log messages, to those who have asked for them. In 2025-11-25
a connection asks once, by logging/setLevel, in 2026-07-28 each request for itself; nobody who has not is told anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from mcp.server import Server, ServerRequestContext
    from mcp.server.connection import Connection
    from mcp_types import EmptyResult, LoggingLevel, SetLevelRequestParams

_LEVEL = "heedful/log-level"
"""Of a connection's state."""


def connection_of(context: ServerRequestContext[Any, Any]) -> Connection:
    """What the requests of one client share: a state, and what is to be done when it leaves."""
    return context.session._connection  # the SDK (2.3) does not hand it to handlers in another way yet


def add_logging(server: Server[Any]) -> None:
    from mcp_types import EmptyResult, SetLevelRequestParams

    async def set_level(context: ServerRequestContext[Any, Any], params: SetLevelRequestParams) -> EmptyResult:
        connection_of(context).state[_LEVEL] = params.level
        return EmptyResult()

    server.add_request_handler("logging/setLevel", SetLevelRequestParams, set_level)


async def tell(context: ServerRequestContext[Any, Any], level: LoggingLevel, text: str) -> None:
    """Beside the result of the request that is being answered, where its caller wants to hear of this level."""
    from mcp_types import LoggingLevel, LoggingMessageNotification, LoggingMessageNotificationParams

    levels = get_args(LoggingLevel)
    least = _least(context)
    if least not in levels or levels.index(level) < levels.index(least):
        return
    said = LoggingMessageNotificationParams(level=level, logger="heedful", data=text)
    await context.session.send_notification(LoggingMessageNotification(params=said), context.request_id)


def _least(context: ServerRequestContext[Any, Any]) -> Any:
    from mcp_types import LOG_LEVEL_META_KEY
    from mcp_types.version import MODERN_PROTOCOL_VERSIONS

    if context.protocol_version in MODERN_PROTOCOL_VERSIONS:
        return (context.meta or {}).get(LOG_LEVEL_META_KEY)
    return connection_of(context).state.get(_LEVEL)
