"""A tool of an MCP server as the router's target: its arguments from the request, the answer from its result, and no
token generated. Fails where either cannot be had, so that the policy's fallback answers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from heedful.errors import (
    HeedfulError,
    McpBadArguments,
    McpCallFailed,
    McpConfigError,
    McpDenied,
    McpHandleError,
    McpNotApproved,
    McpServerDown,
    McpTimeout,
    McpUnknownTool,
    PolicyError,
    TargetFailed,
)
from heedful.router.policy import McpSpec
from heedful.router.signals import JSON, Asked
from heedful.router.target import Opened, WholeAnswer
from heedful.server.ids import new_id

if TYPE_CHECKING:
    from heedful.mcp.calls.call import CallDone, ToolCaller
    from heedful.mcp.catalogue.catalog import CatalogTool, Catalogue
    from heedful.mcp.client.manager import McpManager
    from heedful.mcp.settings.config import McpConfig

log = logging.getLogger("heedful.server")

START_S = 20.0
"""For the server to be ready, before a request goes without it."""
MAX_TOLD_CHARS = 200
"""Of what a tool says when it fails, to the caller."""
_PROBLEMS: Mapping[type[HeedfulError], str] = {
    McpNotApproved: "needs a server that nobody has agreed to",
    McpServerDown: "needs a server that is down",
    McpUnknownTool: "needs a tool that is not offered",
    McpDenied: "would need somebody to allow the call",
    McpCallFailed: "was refused by its server",
}
_NO_TOKENS: Mapping[str, int] = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 0)


class McpTarget:
    """For one loop."""

    books_itself = False

    def __init__(self, spec: McpSpec, clock: Callable[[], float] = time.time) -> None:
        """Raises PolicyError where the server cannot be read from its file, or the SDK is not there."""
        if not find_spec("mcp"):
            raise PolicyError(f"targets.{spec.name}", "needs the package mcp", "pip install 'heedful[mcp]'")
        self._spec = spec
        self._clock = clock
        self._config = _config_of(spec)
        self._manager: McpManager | None = None

    @property
    def name(self) -> str:
        return self._spec.name

    async def warm(self) -> None:
        """Starts the server, and says now what would fail later."""
        try:
            await self._found()
        except HeedfulError as error:
            log.warning("heedful: target %s cannot answer yet: %s", self.name, error.message)

    async def open(self, asked: Asked, held: AsyncExitStack) -> Opened:
        began = time.perf_counter()
        try:
            catalogue, tool = await self._found()
            arguments = await self._arguments(asked, catalogue, tool)
            done = await self._caller().call(tool, arguments, timeout_s=self._spec.timeout_s)
            if done.error is not None:
                raise done.error
        except McpTimeout as error:
            raise self._failed(error.message, error.remedy, status=504) from error
        except McpBadArguments as error:
            raise self._failed("does not take these arguments", error.message) from error
        except TargetFailed:
            raise
        except HeedfulError as error:
            log.warning("heedful: target %s: %s", self.name, error.message)  # a command line, or what a server printed
            raise self._failed(_PROBLEMS.get(type(error), "failed"), "The server's log says why.") from error
        text = self._said(asked, arguments, done)
        return WholeAnswer(self._body(text, done, time.perf_counter() - began))

    async def aclose(self) -> None:
        if self._manager is not None:
            await self._manager.close()

    # ---- The call -------------------------------------------------------------------------------------------------

    async def _found(self) -> tuple[Catalogue, CatalogTool]:
        """Raises McpError."""
        from heedful.mcp.client.manager import McpManager
        from heedful.mcp.settings.approvals import Approvals

        if self._manager is None:
            self._manager = McpManager(self._config, Approvals.open())
        catalogue = await self._manager.catalogue(wait_s=START_S)
        for problem in self._manager.problems().values():
            raise problem
        tool = catalogue.find(self._spec.server, self._spec.tool)
        return catalogue, tool or self._manager.offered(catalogue, self._spec.model)

    def _caller(self) -> ToolCaller:
        """Nobody is there to be asked: what the servers' file does not allow is denied."""
        from heedful.mcp.calls.call import ToolCaller
        from heedful.mcp.calls.handles import HandleStore
        from heedful.mcp.calls.results import Shower

        assert self._manager is not None
        return ToolCaller(self._manager, Shower(HandleStore()))

    async def _arguments(self, asked: Asked, catalogue: Catalogue, tool: CatalogTool) -> JSON:
        if self._spec.arguments is None:
            return await self._from_the_message(asked, catalogue, tool)

        def lookup(name: str) -> str:
            value = asked.text if name == "text" else asked.given.get(name)
            if value is None:
                raise self._failed(f"finds no {name} in this request")
            return value

        given = self._spec.arguments.items()
        return {name: value.filled(lookup) if hasattr(value, "filled") else value for name, value in given}

    async def _from_the_message(self, asked: Asked, catalogue: Catalogue, tool: CatalogTool) -> JSON:
        """Only where one way to fill them is sure."""
        from heedful.mcp.delegation.fill import Filler
        from heedful.mcp.delegation.mentions import Request

        async def ask_nobody(tool: CatalogTool, arguments: Mapping[str, Any]) -> None: ...

        siblings = [other for other in catalogue.tools if other.server == tool.server]
        filler = Filler(Request.of(asked.text), self._config.servers[tool.server], siblings, ask_nobody)
        ways = [filled for filled in await filler.fill(tool, lists=False) if not filled.is_guess]
        if len(ways) != 1:
            raise self._failed(f"finds {'several ways' if ways else 'no way'} to fill its arguments from this request")
        return dict(ways[0].arguments)

    # ---- The answer -----------------------------------------------------------------------------------------------

    def _said(self, asked: Asked, arguments: JSON, done: CallDone) -> str:
        """Raises TargetFailed where the result does not hold it."""
        from heedful.mcp.calls.json_path import at
        from heedful.mcp.calls.reading import read
        from heedful.mcp.delegation.mentions import Request
        from heedful.mcp.delegation.say import said

        assert done.output is not None, done
        if done.output.is_error:
            raise self._failed("says that it failed", done.text[:MAX_TOLD_CHARS])
        value = done.output.value
        if self._spec.answer is None:
            text = said(Request.of(asked.text), arguments, read(value))
            if text is None:
                raise self._failed("gives a result that does not plainly say what was asked")
            return text

        def lookup(name: str) -> Any:
            try:
                return at(value, f".{name}")
            except McpHandleError as error:
                known = {**asked.given, **arguments}
                if name in known:
                    return known[name]
                raise self._failed(f"has no {name} in its result") from error

        return self._spec.answer.filled(lookup)

    def _body(self, text: str, done: CallDone, seconds: float) -> JSON:
        receipt = {
            "model": self._spec.model,
            "prompt_tokens": 0,
            "cached_tokens": 0,
            "output_tokens": 0,
            "visits": dict.fromkeys(("prefill", "decode", "total", "dense"), 0),
            "flops": {"linear": 0, "attention": 0},
            "seconds": {"total": seconds},
            "tool_ms": done.record.ms,
            "tool": asdict(done.record),
        }
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
        return {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion",
            "created": int(self._clock()),
            "model": self._spec.model,
            "choices": [choice],
            "usage": {**_NO_TOKENS, "heedful": receipt},
        }

    def _failed(self, problem: str, remedy: str = "", **more: Any) -> TargetFailed:
        """`problem` stands in headers and in the ledger: nothing of the message or the result is in it."""
        return TargetFailed(self.name, problem, remedy, **more)


def _config_of(spec: McpSpec) -> McpConfig:
    """The one server of the file. Raises PolicyError."""
    from heedful.mcp.settings.config import read_config

    try:
        config = read_config(spec.config)
    except McpConfigError as error:
        raise PolicyError(f"targets.{spec.name}.config", error.message, error.remedy) from error
    if spec.server not in config.servers:
        there = f"There are: {', '.join(config.servers) or 'none'}."
        raise PolicyError(f"targets.{spec.name}.server", f"{spec.config} names no server {spec.server!r:.80}", there)
    return type(config)({spec.server: config.servers[spec.server]}, config.source)
