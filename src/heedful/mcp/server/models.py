"""The models behind the tools of heedful's MCP server, each loaded when it is first needed.

What generates text is stepped by a Service: any number of calls share its steps, and one that is cancelled frees its
pages before the next one. Deciders and embedders take turns, in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from heedful.errors import QueueFull

if TYPE_CHECKING:
    from heedful.decide.decider import DecisionModel
    from heedful.engine.embedder import Embedder
    from heedful.engine.service import Service
    from heedful.sampling.grammar import GrammarCompiler

T = TypeVar("T")
MAX_WAITING = 64
"""Calls that wait for a model; further ones are told that it is busy."""


@dataclass(frozen=True)
class ModelNames:
    """As the command line takes them."""

    generator: str
    decider: str
    embedder: str
    threads: int | None = None


class ServedModels:
    """For one event loop. Nothing is fetched or loaded before it is asked for."""

    def __init__(self, names: ModelNames) -> None:
        self.names = names
        self._service = _Once(self._load_generator)
        self._decider = _Once(self._load_decider)
        self._embedder = _Once(self._load_embedder)
        self._grammars: GrammarCompiler | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def generator(self) -> Service:
        """Raises what loading does; so do the next two."""
        return await self._service.get()

    async def decider(self) -> DecisionModel:
        return await self._decider.get()

    async def embedder(self) -> Embedder:
        return await self._embedder.get()

    @property
    def running(self) -> Service | None:
        """What generates, where it is loaded already."""
        return self._service.made

    async def grammars(self) -> GrammarCompiler:
        from heedful.sampling.grammar import GrammarCompiler

        service = await self.generator()
        if self._grammars is None:
            self._grammars = GrammarCompiler(service.llm.tokenizer)
        return self._grammars

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """One call at a time decides or embeds. Raises QueueFull."""
        if self._waiting >= MAX_WAITING:
            raise QueueFull(self._waiting)
        self._waiting += 1
        try:
            async with self._turn:
                yield
        finally:
            self._waiting -= 1

    async def close(self) -> None:
        """Cancels what is being written, and ends the thread that writes it."""
        service = await self._service.left()
        if service is not None:
            await service.close()

    def _load_generator(self) -> Service:
        from heedful.engine.llm import LLM
        from heedful.engine.service import Service

        return Service(LLM(self.names.generator, threads=self.names.threads), most_waiting=MAX_WAITING)

    def _load_decider(self) -> DecisionModel:
        from heedful.decide.load import load_decider

        is_remote = names_remote(self.names.decider)
        return load_decider(self.names.decider, threads=None if is_remote else self.names.threads)

    def _load_embedder(self) -> Embedder:
        from heedful.engine.embedder import load_embedder

        return load_embedder(self.names.embedder, threads=self.names.threads)


def names_remote(decider: str) -> bool:
    """Whether what it is asked about leaves this machine."""
    return decider == "jev" or decider.startswith(("http://", "https://"))


class _Once(Generic[T]):
    """Made once, in a thread, for all who ask; a caller that is cancelled takes nothing from the others. After a
    failure the next one tries again."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._task: asyncio.Task[T] | None = None

    async def get(self) -> T:
        if self._task is None or (self._task.done() and self._task.exception() is not None):
            self._task = asyncio.create_task(asyncio.to_thread(self._make))
        return await asyncio.shield(self._task)

    @property
    def made(self) -> T | None:
        is_made = self._task is not None and self._task.done() and self._task.exception() is None
        return self._task.result() if is_made and self._task is not None else None

    async def left(self) -> T | None:
        """What there is, if anything, once nothing is being made any more."""
        if self._task is not None:
            await asyncio.wait([self._task])
        return self.made
