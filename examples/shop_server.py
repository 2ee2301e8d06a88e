"""A small MCP server without any package, to try things with: what a shop has. See docs/mcp.md.

heedful mcp call shop stock '{"item": "tea"}' --config examples/servers.json --trust
"""

import json
import sys

SHELF = {"tea": (12, 3.5), "coffee": (0, 7.9), "sugar": (40, 1.2)}
ITEM = {"type": "object", "properties": {"item": {"type": "string", "enum": list(SHELF)}}, "required": ["item"]}
READS = {"readOnlyHint": True}
TOOLS = [
    {
        "name": "stock",
        "description": "Tells how many packets of an item are left.",
        "inputSchema": ITEM,
        "annotations": READS,
    },
    {
        "name": "price",
        "description": "Tells what a packet of an item costs, in euros.",
        "inputSchema": ITEM,
        "annotations": READS,
    },
]


def called(name: str, item: str) -> dict:
    if item not in SHELF:
        return {"content": [{"type": "text", "text": f"there is no {item}"}], "isError": True}
    value = {"item": item, name: SHELF[item][name == "price"]}
    return {"content": [{"type": "text", "text": json.dumps(value)}], "structuredContent": value}


def answer(method: str, params: dict) -> dict:
    if method == "initialize":
        server = {"name": "shop", "version": "1"}
        return {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":
        return {"tools": TOOLS}
    return called(params["name"], params.get("arguments", {}).get("item", ""))


for line in sys.stdin:
    message = json.loads(line)
    reply = {"jsonrpc": "2.0", "id": message.get("id")}
    if message.get("method") in ("initialize", "tools/list", "tools/call"):
        print(json.dumps({**reply, "result": answer(message["method"], message.get("params", {}))}), flush=True)
    elif "id" in message:
        print(json.dumps({**reply, "error": {"code": -32601, "message": "no such method"}}), flush=True)
