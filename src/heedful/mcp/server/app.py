"""heedful as an MCP server: records of tools, prompts and resources behind the official SDK's protocol, both revisions,
stdio and HTTP.

    server = make_server(heedful_tools(models, roots), heedful_prompts(names, roots), [FileResources(roots)])
    await serve_stdio(server)            # stdout is the protocol's alone: the SDK leads stray prints to stderr

What a caller did wrong comes back as a tool's error with its remedy, so that a model can mend it; what is a fault of
ours is logged and told without its words.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from secrets import token_bytes
from typing import TYPE_CHECKING, Any

from heedful import __version__
from heedful.errors import ContextOverflow, HeedfulError
from heedful.mcp.schemas.arguments import fitted, parsed
from heedful.mcp.schemas.signature import signature
from heedful.mcp.server.call import JSON, Call, Done, ServerTool
from heedful.mcp.server.completion import add_completion
from heedful.mcp.server.log import add_logging
from heedful.mcp.server.prompts import ServerPrompt, add_prompts
from heedful.mcp.server.questions import NeedsInput
from heedful.mcp.server.resources import ResourceSource, add_resources
from heedful.mcp.server.tools import INSTRUCTIONS
from heedful.mcp.server.watch import add_watching

if TYPE_CHECKING:
    from mcp.server import Server, ServerRequestContext
    from mcp_types import (
        CallToolRequestParams,
        CallToolResult,
        InputRequiredResult,
        ListToolsResult,
        PaginatedRequestParams,
        Tool,
    )

log = logging.getLogger("heedful.mcp")

RECEIPT_KEY = "heedful/receipt"
"""Of a result's _meta."""
LIST_TTL_MS = 60_000
"""For which clients may believe the lists of tools, prompts and templates; they never change while the server runs."""
FRESH_MS = 0
"""Files do."""


def make_server(
    tools: Iterable[ServerTool],
    prompts: Sequence[ServerPrompt] = (),
    resources: Sequence[ResourceSource] = (),
    instructions: str = INSTRUCTIONS,
) -> Server[Any]:
    from mcp.server import Server
    from mcp.server.caching import CacheHint
    from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity

    by_name = {tool.name: tool for tool in tools}
    listed = [_listed(tool) for tool in by_name.values()]

    async def list_tools(
        context: ServerRequestContext[Any, Any], params: PaginatedRequestParams | None
    ) -> ListToolsResult:
        from mcp_types import ListToolsResult

        return ListToolsResult(tools=listed)

    async def call_tool(
        context: ServerRequestContext[Any, Any], params: CallToolRequestParams
    ) -> CallToolResult | InputRequiredResult:
        return await called(by_name, params.name, params.arguments or {}, Call.of(context, params))

    lasting = CacheHint(LIST_TTL_MS, "public")
    server = Server[Any](
        "heedful",
        version=__version__,
        title="heedful",
        instructions=instructions,
        cache_hints={
            "tools/list": lasting,
            "prompts/list": lasting,
            "resources/templates/list": lasting,
            "server/discover": lasting,
            "resources/list": CacheHint(FRESH_MS, "private"),
            "resources/read": CacheHint(FRESH_MS, "private"),
        },
        get_tool_input_schema=lambda name: by_name[name].parameters if name in by_name else None,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )
    state = RequestStateSecurity(keys=[token_bytes(32)], bind_principal=_key_of)
    server.middleware.append(RequestStateBoundary(state, default_audience=server.name))
    add_logging(server)
    if prompts:
        add_prompts(server, prompts)
    if resources:
        add_resources(server, resources)
        add_watching(server, resources)
    if prompts or resources:
        add_completion(server, prompts, resources)
    return server


def _key_of(context: ServerRequestContext[Any, Any]) -> str | None:
    """Over HTTP a request is continued with the key that began it."""
    given = context.request.headers.get("authorization") if context.request is not None else None
    return None if given is None else sha256(given.encode("utf-8", "surrogatepass")).hexdigest()


async def called(
    tools: Mapping[str, ServerTool], name: str, given: Mapping[str, Any], call: Call
) -> CallToolResult | InputRequiredResult:
    """Raises the SDK's MCPError for a tool that is not there; whatever else goes wrong is a result."""
    from mcp import MCPError
    from mcp_types import INVALID_PARAMS, CallToolResult

    tool = tools.get(name)
    if tool is None:
        raise MCPError(INVALID_PARAMS, f"Unknown tool: {name[:80]!r}. There are: {', '.join(tools)}")
    try:
        done = await tool.run(checked_arguments(tool, given), call)
    except HeedfulError as error:
        return failed(words(error, can_cut="truncate" in tool.parameters["properties"]))
    except NeedsInput as needed:
        return needed.result()
    except MCPError:
        raise
    except Exception as error:  # a bug of a tool must not take the server down
        log.error("tool %s failed", name, exc_info=error)
        return failed(f"{name} failed inside the server; its log (stderr) says where. Try other arguments.")
    return done if isinstance(done, CallToolResult) else result_of(done)


def checked_arguments(tool: ServerTool, given: Mapping[str, Any]) -> JSON:
    """Raises McpBadArguments, with the tool's signature."""
    shown = signature(tool.name, "", tool.parameters)
    return fitted(parsed(given, tool.name, shown), tool.parameters, tool.name, shown).values


def words(error: HeedfulError, *, can_cut: bool) -> str:
    """On one line: what happened, and what to do. `can_cut`: the tool cuts what is too long where that is asked for."""
    remedy = error.remedy
    if isinstance(error, ContextOverflow):
        remedy = 'Shorten it, or send "truncate": true' if can_cut else "Shorten it"
    return " ".join(" ".join(f"{part.rstrip('.')}." for part in (error.message, remedy) if part).split())


def failed(text: str) -> CallToolResult:
    from mcp_types import CallToolResult, TextContent

    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=True)


def result_of(done: Done) -> CallToolResult:
    from mcp_types import CallToolResult, TextContent

    text = json.dumps(done.structured, ensure_ascii=False) if done.text is None else done.text
    fields: JSON = {"content": [TextContent(type="text", text=text)], "structured_content": done.structured}
    if done.receipt is not None:
        fields["_meta"] = {RECEIPT_KEY: dict(done.receipt)}
    return CallToolResult(**fields)


def _listed(tool: ServerTool) -> Tool:
    from mcp_types import Tool, ToolAnnotations

    hints: JSON = {f"{name}_hint": value for name, value in tool.hints.items()}
    return Tool(
        name=tool.name,
        title=tool.title,
        description=tool.description,
        input_schema=tool.parameters,
        output_schema=tool.output,
        annotations=ToolAnnotations(**hints),
    )


async def serve_stdio(server: Server[Any]) -> None:
    """Until stdin ends."""
    from mcp.server.stdio import stdio_server

    async with stdio_server() as (read_stream, write_stream):
        await server.run(read_stream, write_stream, server.create_initialization_options())
