"""What a router needs of whatever can answer. server/ has the ones that run here, remote.py the one that does not.

Bodies are OpenAI's: a chat completion, or its chunks, whose last one has no choices and the usage. Under
usage["heedful"] stands what the answer cost.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack
from typing import Any, Protocol

from heedful.router.signals import JSON, Asked


class Opened(Protocol):
    """An answer that has begun: from here on it is this target's. One of the two is called, once."""

    async def whole(self) -> JSON:
        """Of a request that does not stream."""
        ...

    def chunks(self) -> AsyncGenerator[JSON, None]:
        """Of one that does. Closing it early stops whoever answers."""
        ...


class Target(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def books_itself(self) -> bool:
        """Whether engines here tell the ledger what its answers cost, finished or not; else their receipts do."""
        ...

    async def open(self, asked: Asked, held: AsyncExitStack) -> Opened:
        """`held`: releases what the answer needs. Whether it streams, `asked.stream` says.

        Raises UsageError for what is the caller's fault, TargetFailed and other HeedfulErrors where somebody else may
        be asked instead.
        """
        ...

    async def aclose(self) -> None: ...


class WholeAnswer:
    """An answer that is there already, for callers of either kind."""

    def __init__(self, body: JSON) -> None:
        self._body = body

    async def whole(self) -> JSON:
        return self._body

    async def chunks(self) -> AsyncGenerator[JSON, None]:
        head: JSON = {"object": "chat.completion.chunk"}
        head |= {key: value for key, value in self._body.items() if key in ("id", "created", "model")}
        for choice in self._body["choices"]:
            message = choice["message"]
            delta = {"role": "assistant", "content": message.get("content") or ""}
            if calls := message.get("tool_calls"):
                delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
            yield {**head, "choices": [_chunk(choice, delta, None)]}
            yield {**head, "choices": [_chunk(choice, {}, choice.get("finish_reason"))]}
        yield {**head, "choices": [], "usage": self._body.get("usage")}


def _chunk(choice: Mapping[str, Any], delta: JSON, reason: Any) -> JSON:
    logprobs = choice.get("logprobs") if delta else None
    return {"index": choice.get("index", 0), "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def receipt_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """{} where it brings none."""
    usage = body.get("usage") or {}
    receipt = usage.get("heedful") if isinstance(usage, Mapping) else None
    return receipt if isinstance(receipt, Mapping) else {}


def text_of_body(body: Mapping[str, Any]) -> str:
    """Of the first choice."""
    message = body["choices"][0].get("message") or {}
    content = message.get("content")
    return content if isinstance(content, str) else ""
