"""The manager for code without an event loop: one thread runs it, calls wait for it.

with McpThread(config, approvals) as tools:
    tools.catalogue()
    tools.call("time__get_current_time", {"timezone": "Asia/Tokyo"})
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from heedful.mcp.catalogue.catalog import CatalogTool, Catalogue
from heedful.mcp.client.connection import Patience, Progress, ServerStatus
from heedful.mcp.client.elicit import Ask
from heedful.mcp.client.manager import McpManager
from heedful.mcp.settings.approvals import Approvals
from heedful.mcp.settings.config import McpConfig

if TYPE_CHECKING:
    from mcp_types import CallToolResult

_Result = TypeVar("_Result")


class McpThread:
    """As McpManager, whose parameters it takes. From any thread; Ctrl-C while waiting cancels the call."""

    def __init__(
        self,
        config: McpConfig,
        approvals: Approvals | None = None,
        *,
        trust: bool = False,
        patience: Patience | None = None,
        ask: Ask | None = None,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self.manager = McpManager(config, approvals, trust=trust, patience=patience, ask=ask)
        self._thread = threading.Thread(target=self._loop.run_forever, name="heedful-mcp", daemon=True)
        self._thread.start()

    def __enter__(self) -> McpThread:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the servers and the thread. A second time it does nothing."""
        if self._loop.is_closed():
            return
        self.run(self.manager.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def catalogue(self, *, refresh: bool = False) -> Catalogue:
        return self.run(self.manager.catalogue(refresh=refresh))

    def status(self) -> tuple[ServerStatus, ...]:
        return self.manager.status()

    def call(
        self,
        tool: str | CatalogTool,
        arguments: Mapping[str, Any],
        *,
        on_progress: Progress | None = None,
        timeout_s: float | None = None,
        idle_timeout_s: float | None = None,
        replay: bool = False,
    ) -> CallToolResult:
        """As `McpManager.call`, or `call_tool` for a CatalogTool. `on_progress` is called in the other thread."""
        limits = {"on_progress": on_progress, "timeout_s": timeout_s, "idle_timeout_s": idle_timeout_s}
        if isinstance(tool, CatalogTool):
            return self.run(self.manager.call_tool(tool, arguments, replay=replay, **limits))  # type: ignore[arg-type]
        return self.run(self.manager.call(tool, arguments, replay=replay, **limits))  # type: ignore[arg-type]

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Waits for a coroutine of the manager. An interrupt or error here cancels it there."""
        return self.wait(self.submit(work))

    def submit(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Begins it; `.cancel()` of what comes back cancels the call in the server."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @staticmethod
    def wait(future: Future[_Result]) -> _Result:
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
