"""Resources of an MCP server of ours: what a caller may read by its address, and what there is of it, listed in pages.

What heedful's own are, files, is file_resources.py's; here is what a source of them is, and the protocol's side.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from heedful.errors import BadParameter, HeedfulError

if TYPE_CHECKING:
    from mcp.server import Server, ServerRequestContext
    from mcp_types import (
        BlobResourceContents,
        ListResourcesResult,
        ListResourceTemplatesResult,
        PaginatedRequestParams,
        ReadResourceRequestParams,
        ReadResourceResult,
        Resource,
        ResourceTemplate,
        TextResourceContents,
    )

PAGE = 200
"""Resources of a page of a list."""
_NOT_FOUND_BEFORE_2026 = -32002

_T = TypeVar("_T")


class ResourceSource(Protocol):
    """Called in threads. An address that is not of a source's kind is None to it; for one that is, and leads nowhere,
    it raises HeedfulError."""

    @property
    def templates(self) -> Sequence[ResourceTemplate]: ...

    def listed(self) -> Sequence[Resource]: ...

    def read(self, uri: str) -> TextResourceContents | BlobResourceContents | None: ...

    def stamp(self, uri: str) -> Any:
        """What changes when the resource does."""

    def suggest(self, template: str, argument: str, typed: str) -> Sequence[str]:
        """For a blank of a template."""


def add_resources(server: Server[Any], sources: Sequence[ResourceSource]) -> None:
    from mcp_types import (
        ListResourcesResult,
        ListResourceTemplatesResult,
        PaginatedRequestParams,
        ReadResourceRequestParams,
        ReadResourceResult,
    )

    async def list_resources(
        context: ServerRequestContext[Any, Any], params: PaginatedRequestParams | None
    ) -> ListResourcesResult:
        found = [each for source in sources for each in await asyncio.to_thread(source.listed)]
        page, cursor = paged(found, params.cursor if params else None)
        return ListResourcesResult(resources=page, next_cursor=cursor)

    async def list_templates(
        context: ServerRequestContext[Any, Any], params: PaginatedRequestParams | None
    ) -> ListResourceTemplatesResult:
        return ListResourceTemplatesResult(resource_templates=[each for source in sources for each in source.templates])

    async def read(context: ServerRequestContext[Any, Any], params: ReadResourceRequestParams) -> ReadResourceResult:
        contents: TextResourceContents | BlobResourceContents = await found_in(
            sources, context, params.uri, lambda source: source.read(params.uri)
        )
        return ReadResourceResult(contents=[contents])

    server.add_request_handler("resources/list", PaginatedRequestParams, list_resources)
    server.add_request_handler("resources/templates/list", PaginatedRequestParams, list_templates)
    server.add_request_handler("resources/read", ReadResourceRequestParams, read)


def paged(resources: Sequence[Resource], cursor: str | None) -> tuple[list[Resource], str | None]:
    """In the order of their addresses, so that what comes and goes between two pages moves nothing else. The cursor is
    the last address of a page."""
    ordered = sorted(resources, key=lambda each: each.uri)
    start = 0 if cursor is None else bisect_right(ordered, cursor, key=lambda each: each.uri)
    page = ordered[start : start + PAGE]
    return page, page[-1].uri if start + PAGE < len(ordered) else None


async def found_in(
    sources: Sequence[ResourceSource],
    context: ServerRequestContext[Any, Any],
    uri: str,
    ask: Callable[[ResourceSource], _T | None],
) -> _T:
    """Of the first source that knows the address. Raises the SDK's MCPError."""
    try:
        for source in sources:
            found = await asyncio.to_thread(ask, source)
            if found is not None:
                return found
        raise BadParameter("uri", "is no address of a resource here", "Look at what is listed, and the templates.")
    except HeedfulError as error:
        raise _not_found(error, context, uri) from None


def _not_found(error: HeedfulError, context: ServerRequestContext[Any, Any], uri: str) -> Exception:
    from mcp import MCPError
    from mcp_types import INVALID_PARAMS
    from mcp_types.version import MODERN_PROTOCOL_VERSIONS

    code = INVALID_PARAMS if context.protocol_version in MODERN_PROTOCOL_VERSIONS else _NOT_FOUND_BEFORE_2026
    return MCPError(code, " ".join(f"{error.message}. {error.remedy}".split()), {"uri": uri})
