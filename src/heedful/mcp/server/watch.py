"""Watches the resources that a client has subscribed to, and tells it when one has changed. Only what is subscribed to
is looked at, once a second.

In 2025-11-25 a connection subscribes by resources/subscribe, and its watch ends with it; in 2026-07-28 the subscription
is a request that stays open (subscriptions/listen), and the watch is as long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from heedful.errors import HeedfulError
from heedful.mcp.server.log import connection_of
from heedful.mcp.server.resources import ResourceSource, found_in

if TYPE_CHECKING:
    from mcp.server import Server, ServerRequestContext
    from mcp_types import (
        DiscoverResult,
        EmptyResult,
        RequestParams,
        SubscribeRequestParams,
        SubscriptionsListenRequestParams,
        SubscriptionsListenResult,
        UnsubscribeRequestParams,
    )

POLL_S = 1.0
MAX_WATCHED = 64
"""Of one connection, or one request that listens."""
MAX_LISTENING = 256
"""Requests that stay open, of one server."""
_WATCH = "heedful/watch"
"""Of a connection's state."""

Look = Callable[[str], Any]
"""A resource's stamp by its address; None where it is gone."""


def add_watching(server: Server[Any], sources: Sequence[ResourceSource]) -> None:
    def look(uri: str) -> Any:
        for source in sources:
            try:
                stamp = source.stamp(uri)
            except HeedfulError:
                return None
            if stamp is not None:
                return stamp
        return None

    _add_subscribing(server, sources, look)
    _add_listening(server, look)


def _add_subscribing(server: Server[Any], sources: Sequence[ResourceSource], look: Look) -> None:
    from mcp_types import EmptyResult, SubscribeRequestParams, UnsubscribeRequestParams

    async def subscribe(context: ServerRequestContext[Any, Any], params: SubscribeRequestParams) -> EmptyResult:
        stamp = await found_in(sources, context, params.uri, lambda source: source.stamp(params.uri))
        connection = connection_of(context)
        watch: Watch | None = connection.state.get(_WATCH)
        if watch is None:
            watch = connection.state[_WATCH] = Watch(look, connection.send_resource_updated, POLL_S)
            connection.exit_stack.push_async_callback(watch.close)
        if not watch.add(params.uri, stamp):
            raise _too_many()
        return EmptyResult()

    async def unsubscribe(context: ServerRequestContext[Any, Any], params: UnsubscribeRequestParams) -> EmptyResult:
        watch: Watch | None = connection_of(context).state.get(_WATCH)
        if watch is not None:
            watch.remove(params.uri)
        return EmptyResult()

    server.add_request_handler("resources/subscribe", SubscribeRequestParams, subscribe)
    server.add_request_handler("resources/unsubscribe", UnsubscribeRequestParams, unsubscribe)


def _add_listening(server: Server[Any], look: Look) -> None:
    from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ResourceUpdated
    from mcp_types import DiscoverResult, RequestParams, SubscriptionFilter, SubscriptionsListenRequestParams
    from mcp_types.version import MODERN_PROTOCOL_VERSIONS

    open_requests: set[object] = set()

    async def listen(
        context: ServerRequestContext[Any, Any], params: SubscriptionsListenRequestParams
    ) -> SubscriptionsListenResult:
        uris = params.notifications.resource_subscriptions or []
        if len(uris) > MAX_WATCHED or len(open_requests) >= MAX_LISTENING:
            raise _too_many()
        bus = InMemorySubscriptionBus()  # of this request: the SDK's handler passes on what is told to it
        watch = Watch(look, lambda uri: bus.publish(ResourceUpdated(uri=uri)), POLL_S)
        open_requests.add(watch)
        try:
            for uri in uris:
                watch.add(uri, await asyncio.to_thread(look, uri))
            wanted = SubscriptionFilter(resource_subscriptions=uris or None)  # lists do not change, or are not watched
            return await ListenHandler(bus)(context, params.model_copy(update={"notifications": wanted}))
        finally:
            open_requests.discard(watch)
            await watch.close()

    async def discover(context: ServerRequestContext[Any, Any], params: RequestParams | None) -> DiscoverResult:
        """As the SDK's, which takes it that who serves listeners tells them of lists too."""
        found = server.get_capabilities(protocol_version=context.protocol_version)
        for each in (found.tools, found.prompts, found.resources):
            if each is not None:
                each.list_changed = False
        return DiscoverResult(
            supported_versions=list(MODERN_PROTOCOL_VERSIONS), capabilities=found, instructions=server.instructions
        )

    server.add_request_handler("subscriptions/listen", SubscriptionsListenRequestParams, listen)
    server.add_request_handler("server/discover", RequestParams, discover)


def _too_many() -> Exception:
    from mcp import MCPError
    from mcp_types import INVALID_PARAMS

    return MCPError(INVALID_PARAMS, f"At most {MAX_WATCHED} subscriptions at a time, and {MAX_LISTENING} listeners.")


class Watch:
    """Of one connection."""

    def __init__(self, look: Look, tell: Callable[[str], Any], poll_s: float) -> None:
        self._look = look
        self._tell = tell
        self._poll_s = poll_s
        self._stamps: dict[str, Any] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, uri: str, stamp: Any) -> bool:
        """False where there is no room."""
        if uri not in self._stamps and len(self._stamps) >= MAX_WATCHED:
            return False
        self._stamps[uri] = stamp
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return True

    def remove(self, uri: str) -> None:
        self._stamps.pop(uri, None)

    async def close(self) -> None:
        self._stamps.clear()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while self._stamps:
            await asyncio.sleep(self._poll_s)
            for uri in tuple(self._stamps):
                now = await asyncio.to_thread(self._look, uri)
                if uri in self._stamps and now != self._stamps[uri]:
                    self._stamps[uri] = now
                    await self._tell(uri)
