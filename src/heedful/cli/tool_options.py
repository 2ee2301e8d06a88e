"""The options of verbs that let a model use tools, and what they are opened to: agreement first, then the servers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heedful.errors import BadParameter

if TYPE_CHECKING:
    from heedful.engine.embedder import Embedder
    from heedful.engine.llm import LLM
    from heedful.mcp.loop import Ask, ToolChat

Mcp = Annotated[
    Path | None, typer.Option("--mcp", help="Tools of the MCP servers that this mcpServers file names. docs/mcp.md.")
]
McpTrust = Annotated[
    bool, typer.Option("--mcp-trust", help="Start the servers in this run although nobody has agreed to them.")
]
ToolEmbedder = Annotated[
    str, typer.Option("--tool-embedder", help="Encoder that helps to choose tools; none: their words alone.")
]
DEFAULT_EMBEDDER = "minilm"


@contextmanager
def opened_tools(
    llm: LLM, file: Path | None, *, trust: bool, embedder: str, ask: Ask | None, approve: Callable[[str], bool] | None
) -> Iterator[ToolChat | None]:
    """None without a file. Servers start when first needed and are gone afterwards. `ask`: whether a call that the
    policy asks about may be made; None: it is refused. `approve`: agrees to a server by its name, as `heedful mcp
    approve` does, and says whether it was; None: nobody is there, and one that was not agreed to is an error."""
    if file is None:
        if trust:
            raise BadParameter("--mcp-trust", "needs servers", "Name their file: --mcp servers.json")
        yield None
        return
    from heedful.mcp.approvals import Approvals
    from heedful.mcp.blocking import McpThread
    from heedful.mcp.config import McpConfig, read_config
    from heedful.mcp.loop import ToolChat
    from heedful.mcp.manager import not_approved

    config, approvals = read_config(file), Approvals.open()
    if not config.servers:
        raise BadParameter("--mcp", f"{file} names no servers")
    unknown = [] if trust else [server for server in config.servers.values() if not approvals.is_approved(server)]
    if unknown and approve is None:
        raise not_approved(unknown[0], config)
    refused = {server.name for server in unknown if approve is not None and not approve(server.name)}
    if refused:
        config = McpConfig({name: each for name, each in config.servers.items() if name not in refused}, config.source)
        approvals = Approvals.open()
    elif unknown:
        approvals = Approvals.open()  # as they are now
    if not config.servers:
        raise not_approved(unknown[0], config)
    with McpThread(config, approvals, trust=trust) as tools:
        yield ToolChat(llm, tools, embedder=lambda: _embedder(embedder), ask=ask)


def _embedder(name: str) -> Embedder | None:
    if name == "none":
        return None
    from heedful.engine.embedder import load_embedder

    return load_embedder(name)


def agree(file: Path, server: str) -> bool:
    """Shows a server's command and tools and asks, as `heedful mcp approve` does."""
    from heedful.cli.mcp import approve
    from heedful.mcp.approvals import Approvals
    from heedful.mcp.config import read_config

    print(f"MCP server {server!r} has not been agreed to yet.", file=sys.stderr)
    approve([server], config=file, yes=False, forget=False)
    return Approvals.open().is_approved(read_config(file).servers[server])
