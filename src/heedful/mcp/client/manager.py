"""All servers of a configuration: what they offer together, and calls by the names that a model knows.

    async with McpManager(read_config(path), Approvals.open()) as manager:
        catalogue = await manager.catalogue()          # starts the servers, side by side, when first asked
        result = await manager.call("time__get_current_time", {"timezone": "Asia/Tokyo"})
        result.content, result.structured_content, result.is_error

Everything runs in the event loop that it was made in; `McpThread` (blocking.py) is the same for code without one. No
server is started, and no address asked, that nobody has agreed to (Approvals), unless `trust` says so for this run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any

from heedful.errors import HeedfulError, McpNotApproved, McpServerDown, McpUnknownTool
from heedful.mcp.catalogue.catalog import SEPARATOR, CatalogTool, Catalogue, ListedTool, ServerListing, make_catalogue
from heedful.mcp.client.connection import Connection, Patience, Progress, ServerStatus
from heedful.mcp.client.elicit import Ask
from heedful.mcp.settings.approvals import Approvals, Pin
from heedful.mcp.settings.config import McpConfig, ServerConfig

if TYPE_CHECKING:
    from mcp_types import CallToolResult, ReadResourceResult, Tool

WAIT_S = 90.0
"""For servers that start, before a catalogue is made without them."""


@dataclass(frozen=True)
class _Known:
    """What a server listed, and until when that is believed."""

    tools: tuple[ListedTool, ...]
    until: float
    """On the monotonic clock."""


class McpManager:
    """`approvals` None: nothing is agreed to. `trust`: start what the configuration names all the same, in this run; it
    pins nothing, and what was pinned before still holds. `ask`: puts servers' questions to the person (elicit.py);
    None: nobody is there."""

    def __init__(
        self,
        config: McpConfig,
        approvals: Approvals | None = None,
        *,
        trust: bool = False,
        patience: Patience | None = None,
        ask: Ask | None = None,
    ) -> None:
        _require_sdk()
        self.config = config
        self._approvals = approvals
        self._trust = trust
        self._connections = {name: Connection(server, patience, ask) for name, server in config.servers.items()}
        self._known: dict[str, _Known] = {}
        self._unavailable: dict[str, HeedfulError] = {}
        self._catalogue: Catalogue | None = None
        self._made_from: tuple[list[ServerListing], dict[str, str]] | None = None

    async def __aenter__(self) -> McpManager:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all servers, side by side; returns when they are gone."""
        await asyncio.gather(*(connection.close() for connection in self._connections.values()))

    def status(self) -> tuple[ServerStatus, ...]:
        return tuple(connection.status() for connection in self._connections.values())

    def stderr(self, server: str) -> str:
        """The newest of what a server wrote to stderr, without secrets."""
        return self._connection(server).tail.text()

    async def catalogue(self, *, refresh: bool = False, wait_s: float = WAIT_S) -> Catalogue:
        """What is offered now. Servers that are not running are started, side by side; one that cannot be is in
        `unavailable`, and the others are there. Listed anew: after a restart, when the server says that its tools have
        changed, when the lifetime that it gave is over, and on `refresh`. Raises nothing for a server's faults; one
        that is not ready within `wait_s` goes on starting and is `unavailable` so far.
        """
        await asyncio.gather(*(self._list(name, refresh, wait_s) for name in self._connections))
        return self._snapshot()

    def problems(self) -> dict[str, HeedfulError]:
        """Server → why it lists nothing, of those that did not when they were asked last."""
        return dict(self._unavailable)

    def pins(self, server: str) -> dict[str, Pin]:
        """What a server listed last, as it would be agreed to; tools that cannot be offered at all are left out."""
        known = self._known.get(server)
        pins: dict[str, Pin] = {}
        for tool in known.tools if known else ():
            pins.setdefault(tool.name, tool.pin)  # of two of a name the first, as in a catalogue
        listing = ServerListing(server, known.tools if known else (), pins=pins)
        never = {each.name for each in make_catalogue([listing]).not_offered if each.cause != "duplicate"}
        return {name: pin for name, pin in pins.items() if name not in never}

    def offered(self, catalogue: Catalogue, name: str) -> CatalogTool:
        """By the model's name, or a server's own where only one tool has it. Raises McpUnknownTool, saying why."""
        found = catalogue.named(name)
        if found is not None:
            return found
        for each in catalogue.not_offered:
            if name in (each.name, f"{each.server}/{each.name}", f"{each.server}{SEPARATOR}{each.name}"):
                raise McpUnknownTool(
                    f"tool {each.name!r} of MCP server {each.server!r} is not offered: {each.reason}",
                    "Look at it and agree: heedful mcp approve" if each.pin else "",
                )
        raise McpUnknownTool(f"no MCP server offers a tool {name!r:.80}", "What there is: heedful mcp tools")

    async def call(
        self,
        model_name: str,
        arguments: Mapping[str, Any],
        *,
        on_progress: Progress | None = None,
        timeout_s: float | None = None,
        idle_timeout_s: float | None = None,
        replay: bool = False,
    ) -> CallToolResult:
        """Calls a tool of the newest catalogue by the model's name; time-outs default to the server's configuration.

        The SDK's result: `content` (a list of blocks), `structured_content`, `is_error`. That a tool has failed is a
        result. Cancelling the task that waits here cancels the call in the server. `replay`: for calls that may be made
        twice; when the server ends in the middle, it is started again and asked once more.

        Raises McpUnknownTool (none of this name, or not offered), McpTimeout, McpServerDown, McpCallFailed,
        McpNotApproved, McpConfigError.
        """
        catalogue = self._catalogue or await self.catalogue()
        return await self.call_tool(
            self.offered(catalogue, model_name),
            arguments,
            on_progress=on_progress,
            timeout_s=timeout_s,
            idle_timeout_s=idle_timeout_s,
            replay=replay,
        )

    async def call_tool(
        self,
        tool: CatalogTool,
        arguments: Mapping[str, Any],
        *,
        on_progress: Progress | None = None,
        timeout_s: float | None = None,
        idle_timeout_s: float | None = None,
        replay: bool = False,
    ) -> CallToolResult:
        """As `call`, for a tool that a catalogue of this manager holds. A server that was started anew lists its tools
        first: one that has changed since the catalogue was made is not called (McpUnknownTool)."""
        connection = self._approved(tool.server)
        limits = {"on_progress": on_progress, "timeout_s": timeout_s, "idle_timeout_s": idle_timeout_s}
        for attempt in (0, 1):
            if connection.has_news:
                await self._list(tool.server, refresh=False, wait_s=WAIT_S)
                self._check_unchanged(tool, self._snapshot())
            try:
                return await connection.call(tool.name, dict(arguments), **limits)  # type: ignore[arg-type]
            except McpServerDown:
                if attempt or not replay:
                    raise
        raise AssertionError(tool)

    def asked_s(self, server: str) -> float:
        """For which it has waited for answers of the person, altogether."""
        return self._connection(server).asked_s

    async def read_resource(self, server: str, uri: str) -> ReadResourceResult:
        """What a server has under an address of its own; nothing is fetched from anywhere else. Raises as `call`."""
        return await self._approved(server).read(uri)

    def _check_unchanged(self, tool: CatalogTool, now: Catalogue) -> None:
        if tool.server in self._unavailable:
            raise self._unavailable[tool.server]
        found = now.find(tool.server, tool.name)
        if found is None or found.fingerprint != tool.fingerprint:
            if found is None:
                self.offered(now, f"{tool.server}/{tool.name}")
            raise McpUnknownTool(
                f"tool {tool.name!r} of MCP server {tool.server!r} has changed since it was offered",
                "Take a new catalogue.",
            )

    def _connection(self, server: str) -> Connection:
        if server not in self._connections:
            raise McpUnknownTool(
                f"no MCP server is called {server!r:.80}", f"There are: {', '.join(self._connections)}."
            )
        return self._connections[server]

    def _approved(self, server: str) -> Connection:
        connection = self._connection(server)
        if not self._trust and (self._approvals is None or not self._approvals.is_approved(connection.config)):
            raise not_approved(connection.config, self.config)
        return connection

    async def _list(self, name: str, refresh: bool, wait_s: float) -> None:
        """Notes what a server lists, or why it lists nothing."""
        try:
            connection = self._approved(name)
            known = self._known.get(name)
            if known is None or refresh or connection.has_news or monotonic() >= known.until:
                listing = await asyncio.wait_for(connection.listing(), wait_s)
                until = float("inf") if listing.ttl_s is None else monotonic() + listing.ttl_s
                faulty = [ListedTool(each.name, None, {}, fault=each.fault) for each in listing.malformed]
                self._known[name] = _Known((*map(listed_tool, listing.tools), *faulty), until)
            self._unavailable.pop(name, None)
        except TimeoutError:
            self._unavailable[name] = McpServerDown(name, f"is still not ready after {wait_s:g} s")
        except HeedfulError as error:
            self._unavailable[name] = error

    def _snapshot(self) -> Catalogue:
        there = [name for name in self._connections if name in self._known and name not in self._unavailable]
        listings = [self._listing(name, self._known[name].tools) for name in there]
        made_from = (listings, {name: error.message for name, error in self._unavailable.items()})
        if self._catalogue is None or self._made_from != made_from:  # a server may want to be asked at every turn
            self._catalogue, self._made_from = make_catalogue(*made_from), made_from
        return self._catalogue

    def _listing(self, name: str, tools: tuple[ListedTool, ...]) -> ServerListing:
        server = self.config.servers[name]
        pins = self._approvals.pins(server) if self._approvals else None
        listing = ServerListing(name, tools, server.prefix, server.deny, server.always, pins)
        if pins is None and self._approvals is not None and self._approvals.is_approved(server):
            suspicious = {each.name for each in make_catalogue([listing]).not_offered}
            self._approvals.approve(server, {tool.name: tool.pin for tool in tools if tool.name not in suspicious})
        return listing


def not_approved(server: ServerConfig, config: McpConfig) -> McpNotApproved:
    where = f" --config {config.source}" if config.source else ""
    return McpNotApproved(
        f"MCP server {server.name!r} was not approved: {server.launch.shown}",
        f"Look at what it is, then: heedful mcp approve{where}",
    )


def listed_tool(tool: Tool) -> ListedTool:
    """The SDK's record as ours."""
    annotations = tool.annotations.model_dump(by_alias=True, exclude_none=True) if tool.annotations else None
    return ListedTool(tool.name, tool.description, tool.input_schema, tool.output_schema, annotations)


def _require_sdk() -> None:
    from importlib.util import find_spec

    if find_spec("mcp") is None or find_spec("mcp_types") is None:
        raise McpServerDown("(all)", "cannot be used: the package mcp is not installed", "pip install 'heedful[mcp]'")
