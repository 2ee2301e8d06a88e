"""What the rules would call for requests that were labelled before there were rules: tests/mcp/requests.jsonl, over the
recorded catalogue of 58 tools. No server runs, so nothing is listed; only what the request itself says is filled in.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful.mcp.catalogue.select import ToolSelector
from heedful.mcp.delegation.delegate import Delegate, sure
from heedful.mcp.settings.config import config_from_json

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import tool_selection

if TYPE_CHECKING:
    from heedful.engine.embedder import Embedder


class _Silent:
    """A caller whose tools say nothing."""

    async def call(self, tool: Any, arguments: Any) -> Any:
        class Done:
            output = record = None

        return Done()


def calls_by_rules(count: Callable[[str], int], embedder: Embedder | None = None) -> Counter[str]:
    """How many requests got a "right" tool, a "wrong" one, "none" though there was one to get, or "rightly none"."""
    catalogue = tool_selection.recorded_catalogue()
    servers = {
        server: {
            "command": "-",
            "args": ["/tmp"] if server in ("git", "filesystem") else [],
            "x-heedful": {"trusted": True},
        }
        for server in {tool.server for tool in catalogue.tools}
    }
    delegate = Delegate(_Silent(), config_from_json({"mcpServers": servers}))  # type: ignore[arg-type]
    selector = ToolSelector(catalogue, count, embedder=embedder)
    found: Counter[str] = Counter()
    for row in [*tool_selection.labelled("calibration"), *tool_selection.labelled("test")]:
        plans, _ = asyncio.run(delegate.plans(row.request, catalogue, selector.select(row.request)))
        plan = sure(plans)
        if plan is None:
            found["none" if row.tools else "rightly none"] += 1
        else:
            found["right" if plan.tool.model_name in row.tools else "wrong"] += 1
    return found
