"""A tool of our own for models that know tools: reads parts of results that are kept behind handles, and what links
lead to.

    tool = read_result_tool(store)               # as chat templates take it; None while nothing is kept
    done = await read_result(caller, shower, '{"handle": "h1", "grep": "tea"}')
"""

from __future__ import annotations

import json
import re
from time import perf_counter
from typing import Any

from heedful.errors import HeedfulError, McpBadArguments
from heedful.mcp.calls.call import CallDone, CallRecord, Outcome, ToolCaller
from heedful.mcp.calls.handles import Handle, HandleStore
from heedful.mcp.calls.results import Shower, as_data
from heedful.mcp.schemas.arguments import fitted, parsed

READ_RESULT = "read_result"
_SIGNATURE = f"{READ_RESULT}(handle: str, lines?: str, grep?: str, path?: str)"
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "handle": {"type": "string", "description": "As h1."},
        "lines": {"type": "string", "pattern": r"^-?\d*:-?\d*$", "description": "From 0, as 0:20 or -5:."},
        "grep": {"type": "string", "description": "Only lines with this text; * is anything, | is or."},
        "path": {"type": "string", "description": "Of JSON, as .rows[0:3].name."},
    },
    "required": ["handle"],
    "additionalProperties": False,
}


def read_result_tool(store: HandleStore) -> dict[str, Any] | None:
    """To be offered beside the others."""
    if not len(store):
        return None
    told = "Reads a part of a long result, or what a link leads to, by its handle."
    return {"type": "function", "function": {"name": READ_RESULT, "description": told, "parameters": _SCHEMA}}


async def read_result(caller: ToolCaller, shower: Shower, arguments: str) -> CallDone:
    """Never raises for what a model does wrong."""
    begun = perf_counter()
    try:
        values = fitted(parsed(arguments, READ_RESULT, _SIGNATURE), _SCHEMA, READ_RESULT, _SIGNATURE).values
        handle = await caller.opened(values["handle"])
        shown = shower.excerpt(_part(handle, values), handle)
    except HeedfulError as error:
        outcome: Outcome = "bad_arguments" if isinstance(error, McpBadArguments) else "failed"
        text = as_data(" ".join(f"error: {error.message}. {error.remedy}".split()))
        return CallDone(text, _record(outcome, begun, text, shower, 0), error=error)
    record = _record("ok", begun, shown.text, shower, shown.held_bytes)
    return CallDone(shown.text, record, shown=shown)


def _part(handle: Handle, values: dict[str, Any]) -> str:
    if "path" in values:
        found = handle.path(values["path"])
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
    if "grep" in values:
        matches = handle.grep(values["grep"])
        lines = [f"{match.line}: {match.excerpt}" for match in matches.first]
        return "\n".join([*lines, f"[{matches.total:,} lines, {len(lines):,} shown]"])
    match = re.fullmatch(r"(-?\d*):(-?\d*)", values.get("lines", "0:"))
    assert match is not None, values
    start, stop = (int(each) if each.strip("-") else None for each in match.groups())
    return handle.lines(start, stop)


def _record(outcome: Outcome, begun: float, text: str, shower: Shower, held_bytes: int) -> CallRecord:
    tokens = shower.count(text) if shower.count is not None else None
    ms = (perf_counter() - begun) * 1000
    return CallRecord(
        READ_RESULT, "", outcome, ms, len(text.encode("utf-8", "replace")), tokens, None, held_bytes, True
    )
