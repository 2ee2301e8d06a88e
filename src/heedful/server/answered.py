"""An assistant's answer as Responses and Messages show it, whoever gives it: a model here, or a router's target."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from heedful.router.dispatch import Routed
from heedful.server.asks import ChatTurn
from heedful.server.bodies import JSON
from heedful.server.chat_api import usage_of
from heedful.text.tool_calls import CallArguments, CallBegin, CallEnd, Event, TextDelta


@dataclass(frozen=True)
class Ending:
    finish_reason: str
    """OpenAI's word."""
    matched_stop: str | None
    usage: JSON
    """As a chat completion has it."""

    @property
    def is_cut(self) -> bool:
        """At its limit, so that what is open stays incomplete."""
        return self.finish_reason == "length"


class Answered(Protocol):
    """An answer that has begun. One of the first two is called, once; then there is an ending."""

    async def complete(self) -> Sequence[Event]:
        """Of a request that does not stream."""
        ...

    def events(self) -> AsyncGenerator[Sequence[Event], None]:
        """Of one that does, step by step. What gives the answer stops when this closes."""
        ...

    @property
    def ending(self) -> Ending: ...

    @property
    def prompt_tokens(self) -> int:
        """Known from the start, or 0."""
        ...


class LocalAnswer:
    def __init__(self, turn: ChatTurn) -> None:
        self._turn = turn

    async def complete(self) -> Sequence[Event]:
        return await self._turn.complete()

    async def events(self) -> AsyncGenerator[Sequence[Event], None]:
        async with aclosing(self._turn.deltas()) as deltas:
            async for delta in deltas:
                yield delta.events

    @property
    def ending(self) -> Ending:
        completion = self._turn.completion
        return Ending(completion.finish_reason, completion.matched_stop, usage_of([completion]))

    @property
    def prompt_tokens(self) -> int:
        return len(self._turn.stream.sequence.request.prompt_ids)


class RoutedAnswer:
    """A chat completion, or its chunks, read back into events."""

    prompt_tokens = 0

    def __init__(self, routed: Routed) -> None:
        self._routed = routed
        self._ending: Ending | None = None

    async def complete(self) -> Sequence[Event]:
        body = await self._routed.whole()
        choice = body["choices"][0]
        self._ending = _ending(choice, body["usage"])
        reader = _DeltaReader()
        message = choice["message"]
        calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls") or ())]
        return [*reader.read({**message, "tool_calls": calls}), *reader.end(is_cut=self._ending.is_cut)]

    async def events(self) -> AsyncGenerator[Sequence[Event], None]:
        reader = _DeltaReader()
        last: Mapping[str, Any] = {}
        usage: JSON = {}
        async with aclosing(self._routed.chunks()) as chunks:
            async for chunk in chunks:
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"][:1]:
                    last = choice if choice.get("finish_reason") else last
                    yield reader.read(choice.get("delta") or {})
        self._ending = _ending(last, usage)
        yield reader.end(is_cut=self._ending.is_cut)

    @property
    def ending(self) -> Ending:
        assert self._ending is not None, "the answer has not ended"
        return self._ending


class _DeltaReader:
    """Deltas of one choice as events. A call ends where the next one begins, or the answer does."""

    def __init__(self) -> None:
        self._open: int | None = None

    def read(self, delta: Mapping[str, Any]) -> list[Event]:
        events: list[Event] = []
        if text := delta.get("content"):
            events += [*self.end(is_cut=False), TextDelta(str(text))]
        for call in delta.get("tool_calls") or ():
            function, index = call.get("function") or {}, int(call.get("index", 0))
            if index != self._open:
                events += [*self.end(is_cut=False), CallBegin(index, str(function.get("name") or ""))]
                self._open = index
            if arguments := function.get("arguments"):
                events.append(CallArguments(index, str(arguments)))
        return events

    def end(self, *, is_cut: bool) -> list[Event]:
        index, self._open = self._open, None
        return [] if index is None or is_cut else [CallEnd(index)]


def _ending(choice: Mapping[str, Any], usage: JSON) -> Ending:
    stop = choice.get("stop_reason")
    return Ending(str(choice.get("finish_reason")), stop if isinstance(stop, str) else None, usage)
