"""`heedful mcp serve`: this machine's models as tools for other assistants, over stdio or HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heedful.errors import BadParameter, McpServerDown
from heedful.weights.source_names import default_model

if TYPE_CHECKING:
    from types import FrameType

    from heedful.mcp.server.files import Roots
    from heedful.mcp.server.http import HttpSettings
    from heedful.mcp.server.models import ModelNames

KEY_VARIABLE = "HEEDFUL_API_KEY"
DEFAULT_PORT = 8090
INTERRUPTED = 130
"""Exit status after Ctrl-C, as a shell has it."""


def serve(
    model: Annotated[str, typer.Option("--model", "-m", help="Writes text: generate, summarize.")] = default_model,
    decider: Annotated[
        str | None, typer.Option(help="Decides and classifies, as `heedful decide -m`; default: as there.")
    ] = None,
    embedder: Annotated[str, typer.Option(help="Makes vectors.")] = "minilm",
    root: Annotated[
        list[Path] | None,
        typer.Option("--root", help="A folder whose files may be read and summarized; may be given again."),
    ] = None,
    http: Annotated[bool, typer.Option("--http", help="Streamable HTTP in place of stdin and stdout.")] = False,
    host: Annotated[str | None, typer.Option(help="With --http: address to listen on (127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help=f"With --http: 0 takes a free one ({DEFAULT_PORT}).")] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="With --http: a host name that requests may be addressed to.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="With --http: pages of this origin may call, as in https://app.example.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Processors to use; default: all.")] = None,
) -> None:
    """Offer generate, decide, classify, embed, cost and, with --root, summarize and the files themselves to any MCP
    client. Over stdio stdout is the protocol's; with --http requests must carry a key of HEEDFUL_API_KEY, where set."""
    from importlib.util import find_spec

    if find_spec("mcp") is None:
        raise McpServerDown(
            "heedful", "cannot be served: the package mcp is not installed", "pip install 'heedful[mcp]'"
        )
    given = {"--host": host, "--port": port, "--allow-host": allow_host, "--allow-origin": allow_origin}
    for option, value in given.items():
        if value and not http:
            raise BadParameter(option, "means something only with --http")
    if threads is not None and not 1 <= threads <= 1024:
        raise BadParameter("--threads", "must be between 1 and 1024")
    from heedful.decide.load import default_decider
    from heedful.mcp.server.files import Roots
    from heedful.mcp.server.http import HttpSettings
    from heedful.mcp.server.models import ModelNames

    roots = Roots(root or [])
    names = ModelNames(model, decider or default_decider(), embedder, threads)
    _check_names(names)
    if not http:
        asyncio.run(_stdio(names, roots))
        return
    settings = HttpSettings(
        host or "127.0.0.1",
        DEFAULT_PORT if port is None else port,
        _keys(),
        tuple(allow_host or ()),
        tuple(allow_origin or ()),
    )
    asyncio.run(_http(names, roots, settings))


def _check_names(names: ModelNames) -> None:
    """Here, where somebody reads it, rather than at the first call. Fetches nothing. Raises SourceError."""
    from heedful.decide.load import BUILT_IN
    from heedful.mcp.server.models import names_remote
    from heedful.weights.source_names import parse_source

    for name in (names.generator, names.embedder):
        parse_source(name)
    if names.decider != BUILT_IN and not names_remote(names.decider):
        parse_source(names.decider)


def _keys() -> tuple[str, ...]:
    return tuple(key.strip() for key in os.environ.get(KEY_VARIABLE, "").split(",") if key.strip())


async def _stdio(names: ModelNames, roots: Roots) -> None:
    from heedful.mcp.server.app import serve_stdio
    from heedful.mcp.server.models import ServedModels
    from heedful.mcp.server.offer import heedful_server

    if sys.stdin.isatty():
        print("heedful: speaking MCP on stdin and stdout, for a program at the other end; Ctrl-C ends", file=sys.stderr)
    # the thread that reads stdin cannot be interrupted, and nothing here needs an orderly end
    signal.signal(signal.SIGINT, _leave)
    models = ServedModels(names)
    try:
        await serve_stdio(heedful_server(models, roots))
    finally:
        await models.close()


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


async def _http(names: ModelNames, roots: Roots, settings: HttpSettings) -> None:
    from heedful.listening import listen
    from heedful.mcp.server.http import serve_http, url_of
    from heedful.mcp.server.models import ServedModels
    from heedful.mcp.server.offer import heedful_server

    listening = listen(settings.host, settings.port)
    models = ServedModels(names)
    print(f"heedful: MCP at {url_of(listening)}", file=sys.stderr, flush=True)
    if not settings.api_keys and not settings.is_loopback:
        message = f"heedful: anybody who reaches this address can use it; {KEY_VARIABLE} asks for a key"
        print(message, file=sys.stderr, flush=True)
    try:
        await serve_http(heedful_server(models, roots), settings, listening)
    finally:
        await models.close()
