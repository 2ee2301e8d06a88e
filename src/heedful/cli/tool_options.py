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
    from heedful.mcp.chat.loop import Ask, ToolChat
    from heedful.mcp.client.desk import Desk
    from heedful.mcp.client.elicit import Answer, Question
    from heedful.mcp.client.elicit import Ask as AskServers

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


def check_tools(file: Path | None, *, trust: bool, can_ask: bool) -> None:
    """Before seconds of loading: what is wrong with the file, and, where nobody can be asked, which server was not
    agreed to. Raises BadParameter, McpConfigError, McpNotApproved."""
    if file is None:
        if trust:
            raise BadParameter("--mcp-trust", "needs servers", "Name their file: --mcp servers.json")
        return
    from heedful.mcp.client.manager import not_approved
    from heedful.mcp.settings.approvals import Approvals
    from heedful.mcp.settings.config import read_config

    config, approvals = read_config(file), Approvals.open()
    if not config.servers:
        raise BadParameter("--mcp", f"{file} names no servers")
    for server in config.servers.values():
        if not (trust or can_ask or approvals.is_approved(server)):
            raise not_approved(server, config)


@contextmanager
def opened_tools(
    llm: LLM,
    file: Path | None,
    *,
    trust: bool,
    embedder: str,
    ask: Ask | None,
    approve: Callable[[str], bool] | None,
    answer: Callable[[Question], Answer] | None,
) -> Iterator[ToolChat | None]:
    """None without a file, which check_tools has looked at. Servers start when first needed and are gone afterwards.
    `ask`: whether a call that the policy asks about may be made; None: it is refused. `approve`: agrees to a server by
    its name, as `heedful mcp approve` does, and says whether it was; one that was not is left out. `answer`: puts a
    server's own question to the person; None: servers are told that nobody is there."""
    if file is None:
        yield None
        return
    from heedful.mcp.chat.loop import ToolChat
    from heedful.mcp.client.blocking import McpThread
    from heedful.mcp.client.desk import Desk
    from heedful.mcp.client.manager import not_approved
    from heedful.mcp.settings.approvals import Approvals
    from heedful.mcp.settings.config import McpConfig, read_config

    config, approvals = read_config(file), Approvals.open()
    unknown = [] if trust else [server for server in config.servers.values() if not approvals.is_approved(server)]
    refused = {server.name for server in unknown if approve is None or not approve(server.name)}
    agreed = {name: each for name, each in config.servers.items() if name not in refused}
    if not agreed:
        raise not_approved(unknown[0], config)
    desk = Desk()
    asked = None if answer is None else asking(desk, answer)
    with McpThread(McpConfig(agreed, config.source), Approvals.open(), trust=trust, ask=asked) as tools:
        yield ToolChat(llm, tools, embedder=lambda: _embedder(embedder), ask=ask, desk=desk)


def asking(desk: Desk, answer: Callable[[Question], Answer]) -> AskServers:
    """For servers' questions, which come up in their thread: they are answered in the person's, over the desk."""

    async def ask(question: Question) -> Answer:
        return await desk.put(lambda: answer(question))

    return ask


def _embedder(name: str) -> Embedder | None:
    if name == "none":
        return None
    from heedful.engine.embedder import load_embedder

    return load_embedder(name)


def agree(file: Path, server: str) -> bool:
    """Shows a server's command and tools and asks, as `heedful mcp approve` does."""
    from heedful.cli.mcp import approve
    from heedful.mcp.settings.approvals import Approvals
    from heedful.mcp.settings.config import read_config

    print(f"MCP server {server!r} has not been agreed to yet.", file=sys.stderr)
    approve([server], config=file, yes=False, forget=False)
    return Approvals.open().is_approved(read_config(file).servers[server])
