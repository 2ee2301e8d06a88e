"""The servers that the tests talk to: hostile ones of ours, and real ones of the registries, installed once."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from real_servers import RealServers, installed

from heedful.mcp.client.connection import Patience
from heedful.mcp.settings.config import McpConfig, config_from_json

SERVERS = Path(__file__).parent / "servers"
QUICK = Patience(start_s=30.0, backoff_first_s=0.01, backoff_most_s=0.05, breaker_failures=3, breaker_s=0.5)


@pytest.fixture(scope="session")
def real_servers(tmp_path_factory: pytest.TempPathFactory) -> RealServers:
    return installed(tmp_path_factory)


@pytest.fixture
def hostile() -> Callable[..., McpConfig]:
    """hostile("mode", state=…, name=…, env=…, ours={…}) → a configuration of one such server."""

    def make(
        mode: str,
        *,
        state: Path | None = None,
        name: str = "bad",
        env: dict[str, str] | None = None,
        ours: dict[str, Any] | None = None,
    ) -> McpConfig:
        args = ["-S", str(SERVERS / "hostile.py"), mode, *([str(state)] if state else [])]
        entry = {"command": sys.executable, "args": args, "env": env or {}, "x-heedful": ours or {}}
        return config_from_json({"mcpServers": {name: entry}})

    return make


@pytest.fixture
def both_eras(tmp_path: Path) -> McpConfig:
    entry = {"command": sys.executable, "args": [str(SERVERS / "both_eras.py"), str(tmp_path)]}
    return config_from_json({"mcpServers": {"both": entry}})


@pytest.fixture
def running() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a coroutine to its end; the loop must be empty then."""

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        async def watched() -> Any:
            result = await asyncio.wait_for(work, 240)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, left
            return result

        return asyncio.run(watched())

    return run
