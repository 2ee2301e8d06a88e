"""The MCP server of bench/routing.py, without any package: a shop's shelf, and a calculator."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

SHELF = {
    "tea": 12, "coffee": 31, "sugar": 40, "salt": 7, "rice": 88, "flour": 23, "pasta": 64, "honey": 5, "butter": 19,
    "cocoa": 27, "oats": 52, "lentils": 71, "raisins": 16, "almonds": 9, "vinegar": 34, "mustard": 45,
}  # fmt: skip
_SUM = re.compile(r"(-?[0-9]{1,9}) ?([-+*]) ?(-?[0-9]{1,9})")


def stock(item: str) -> int:
    """Raises ValueError."""
    if item not in SHELF:
        raise ValueError(f"there is no {item}")
    return SHELF[item]


def calculate(expression: str) -> int:
    """Raises ValueError."""
    match = _SUM.fullmatch(expression.strip())
    if match is None:
        raise ValueError("two whole numbers and +, - or * between them are calculated")
    a, b = int(match[1]), int(match[3])
    return {"+": a + b, "-": a - b, "*": a * b}[match[2]]


def _tool(name: str, description: str, parameter: str, schema: dict[str, Any]) -> dict[str, Any]:
    taken = {"type": "object", "properties": {parameter: schema}, "required": [parameter]}
    return {"name": name, "description": description, "inputSchema": taken, "annotations": {"readOnlyHint": True}}


TOOLS = [
    _tool("stock", "Tells how many packets of an item are left.", "item", {"type": "string", "enum": list(SHELF)}),
    _tool("calculate", "Adds, subtracts or multiplies two whole numbers.", "expression", {"type": "string"}),
]


def called(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The value by the tool's name. Raises ValueError, TypeError, KeyError."""
    functions: dict[str, Callable[..., int]] = {"stock": stock, "calculate": calculate}
    return {name: functions[name](**arguments)}


def _answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        server = {"name": "desk", "version": "1"}
        return {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":
        return {"tools": TOOLS}
    try:
        value = called(params["name"], params.get("arguments", {}))
    except (ValueError, TypeError, KeyError) as error:
        return {"content": [{"type": "text", "text": str(error)}], "isError": True}
    return {"content": [{"type": "text", "text": json.dumps(value)}], "structuredContent": value}


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        reply = {"jsonrpc": "2.0", "id": message.get("id")}
        if message.get("method") in ("initialize", "tools/list", "tools/call"):
            reply["result"] = _answer(message["method"], message.get("params", {}))
        elif "id" in message:
            reply["error"] = {"code": -32601, "message": "no such method"}
        else:
            continue
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
