"""One life of a server: the SDK's Client over its transport, with what it needs of ours; and what its errors mean."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from heedful.mcp.client.sift import MalformedTool, sifted
from heedful.mcp.client.stdio import Tail, stdio_transport
from heedful.mcp.settings.config import ServerConfig
from heedful.mcp.settings.variables import ReadyHttp, Secrets, ready_launch

if TYPE_CHECKING:
    from mcp import Client


@dataclass
class Session:
    """One life of a server."""

    client: Client
    lost: asyncio.Event
    tools_changed: asyncio.Event
    malformed: list[MalformedTool]
    """Tools taken out of lists so far."""
    output_schemas: dict[str, Any]
    """Tool → what its structured content must be; the SDK does not know of it (sift.py)."""


@asynccontextmanager
async def opened(
    config: ServerConfig, prepare: Callable[[Secrets], Tail], lost: asyncio.Event, elicit: Any
) -> AsyncIterator[Session]:
    """An open Client. `elicit`: the SDK's callback for questions to the person; None: nobody is there, and the server
    is told so. Raises McpConfigError, OSError and whatever a handshake can end in."""
    import mcp_types
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    from heedful import __version__

    logging.getLogger("mcp").addHandler(logging.NullHandler())  # what it warns of may have secrets in it
    ready = ready_launch(config)
    tail = prepare(ready.secrets)
    changed = asyncio.Event()
    malformed: list[MalformedTool] = []
    schemas: dict[str, Any] = {}

    async def on_message(message: Any) -> None:
        if isinstance(message, mcp_types.ToolListChangedNotification):
            changed.set()

    info = mcp_types.Implementation(name="heedful", version=__version__)
    how: dict[str, Any] = {"mode": "auto", "client_info": info, "message_handler": on_message}
    if elicit is not None:
        how["elicitation_callback"] = elicit
    if isinstance(ready, ReadyHttp):
        import httpx2

        timeout = httpx2.Timeout(30.0, read=config.timeout_s + 30.0)
        async with httpx2.AsyncClient(headers=dict(ready.headers), timeout=timeout) as http:
            transport: Any = sifted(streamable_http_client(ready.url, http_client=http), malformed, schemas)
            async with Client(transport, **how) as client:
                yield Session(client, lost, changed, malformed, schemas)
        return
    transport = sifted(stdio_transport(ready, tail, lost.set), malformed, schemas)
    async with Client(transport, **how) as client:
        yield Session(client, lost, changed, malformed, schemas)


def unasked(error: Any) -> str:
    """For a server that wants to ask the person where nobody can be; "" for another error."""
    from mcp_types import MISSING_REQUIRED_CLIENT_CAPABILITY

    wants = "elicitation" in str(error.data) if error.code == MISSING_REQUIRED_CLIENT_CAPABILITY else False
    if wants or error.message == "Elicitation not supported":
        return "it wants to ask you something, and nobody can be asked here; heedful chat --mcp, on a terminal, asks"
    return ""


def _leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def reason(error: BaseException) -> str:
    leaf = _leaf(error)
    if isinstance(leaf, OSError) and leaf.strerror:
        return f"{leaf.strerror}{f' ({leaf.filename})' if leaf.filename else ''}"
    return f"{str(leaf).splitlines()[0][:300] if str(leaf) else type(leaf).__name__}"


def first_fault(error: Any) -> str:
    fault = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, fault['loc']))[:100]}: {fault['msg'][:200]}"


def is_of_transport(error: BaseException) -> bool:
    import anyio
    import httpx2

    broken = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, httpx2.TransportError)
    return isinstance(_leaf(error), broken)
