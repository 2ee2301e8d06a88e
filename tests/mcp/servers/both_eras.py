"""A server of the SDK, which speaks both revisions of the protocol: progress, cancellation, output schemas.

python both_eras.py FOLDER [PORT]     notes go into FOLDER; with a port over streamable HTTP
"""

import sys
from pathlib import Path

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver import Context

FOLDER = Path(sys.argv[1])
server = MCPServer("both")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two whole numbers."""
    return a + b


@server.tool()
async def slow(ctx: Context, seconds: float, steps: int = 0) -> str:
    """Takes its time; says how far it is `steps` times."""
    try:
        for i in range(max(1, steps)):
            await anyio.sleep(seconds / max(1, steps))
            if steps:
                await ctx.report_progress(i + 1, steps, f"step {i + 1}")
    except anyio.get_cancelled_exc_class():
        (FOLDER / "cancelled").touch()
        raise
    return "done"


if len(sys.argv) > 2:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
else:
    server.run("stdio")
