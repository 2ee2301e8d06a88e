"""Our MCP client before the conformance suite's servers: lists the tools of the URL that comes last, and calls them.
What a server asks in a form is answered with the form's defaults.

The suite says in MCP_CONFORMANCE_CONTEXT which calls it wants; without that each tool is called once.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from heedful.errors import McpCallFailed
from heedful.mcp.catalogue.catalog import CatalogTool
from heedful.mcp.client.elicit import Answer, Form, Question
from heedful.mcp.client.manager import McpManager
from heedful.mcp.settings.config import config_from_json

SAMPLES: dict[str, Any] = {"number": 5, "integer": 3, "string": "text", "boolean": True, "array": [], "object": {}}


async def main(url: str) -> None:
    config = config_from_json({"mcpServers": {"suite": {"type": "http", "url": url, "x-heedful": {"prefix": ""}}}})
    async with McpManager(config, trust=True, ask=with_defaults) as manager:
        catalogue = await manager.catalogue()
        for problem in manager.problems().values():
            raise problem
        wanted = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT") or "{}").get("toolCalls")
        calls = wanted or [{"name": tool.name, "arguments": sample_of(tool)} for tool in catalogue.tools]
        for call in calls:
            try:
                result = await manager.call(call["name"], call["arguments"])
            except McpCallFailed as error:
                print(f"{call['name']}: {error.message}", file=sys.stderr)
            else:
                print(call["name"], result.content)


async def with_defaults(question: Question) -> Answer:
    return Answer("accept", question.defaults()) if isinstance(question, Form) else Answer("decline")


def sample_of(tool: CatalogTool) -> dict[str, Any]:
    properties = tool.parameters.get("properties", {})
    return {name: SAMPLES.get(str(schema.get("type")), "text") for name, schema in properties.items()}


if __name__ == "__main__":
    asyncio.run(main(sys.argv[-1]))
