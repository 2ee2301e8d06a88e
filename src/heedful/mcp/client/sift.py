"""Takes out of a server's list, before the SDK sees it, malformed tools, for the SDK would refuse the whole list; and
output schemas, for it would check results of any size, with the server's own patterns, while nothing else runs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MalformedTool:
    name: str
    """As far as it has one."""
    fault: str


@asynccontextmanager
async def sifted(
    transport: AbstractAsyncContextManager[Any], malformed: list[MalformedTool], output_schemas: dict[str, Any]
) -> AsyncIterator[tuple[Any, Any]]:
    """The transport's streams; what is taken out of what comes in is added to `malformed` and, by the tool's name, to
    `output_schemas`."""
    async with transport as (reading, writing):
        yield _Sifted(reading, malformed, output_schemas), writing


class _Sifted:
    """A stream of the SDK's messages, as its ReadStream protocol has it."""

    def __init__(self, stream: Any, malformed: list[MalformedTool], output_schemas: dict[str, Any]) -> None:
        self._stream = stream
        self._malformed = malformed
        self._output_schemas = output_schemas

    async def receive(self) -> Any:
        message = await self._stream.receive()
        result = getattr(getattr(message, "message", None), "result", None)
        if isinstance(result, dict) and isinstance(result.get("tools"), list):
            self._malformed += sift(result)
            for tool in result["tools"]:
                if "outputSchema" in tool:
                    self._output_schemas[tool["name"]] = tool.pop("outputSchema")
        return message

    def __aiter__(self) -> _Sifted:
        return self

    async def __anext__(self) -> Any:
        import anyio

        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> _Sifted:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *failure: Any) -> Any:
        return await self._stream.__aexit__(*failure)

    def __getattr__(self, name: str) -> Any:  # aclose, close, last_context
        return getattr(self._stream, name)


def sift(result: dict[str, Any]) -> list[MalformedTool]:
    """The tools of a tools/list result that its protocol revision does not allow; they are taken out of it."""
    version = "2026-07-28" if "resultType" in result else "2025-11-25"
    if _fault(result, version) is None:
        return []
    kept, malformed = [], []
    for tool in result["tools"]:
        fault = _fault({**result, "tools": [tool]}, version)
        if fault is None:
            kept.append(tool)
        else:
            name = tool.get("name") if isinstance(tool, dict) else None
            malformed.append(MalformedTool(name if isinstance(name, str) else "", fault))
    result["tools"] = kept
    return malformed


def _fault(result: dict[str, Any], version: str) -> str | None:
    from mcp_types import ListToolsResult
    from mcp_types.methods import validate_server_result
    from pydantic import ValidationError

    try:
        validate_server_result("tools/list", version, result)
        ListToolsResult.model_validate(result, by_name=False)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"][2:] or first["loc"]))
        return f"{where[:100]}: {first['msg'][:200]}"
    return None
