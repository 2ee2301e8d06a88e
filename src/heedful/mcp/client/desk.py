"""Where questions lie that come up in the servers' thread, until the person's thread asks them."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

TICK_S = 0.05
_T = TypeVar("_T")


@dataclass
class _Open:
    ask: Callable[[], Any]
    answer: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


class Desk:
    def __init__(self) -> None:
        self._open: queue.SimpleQueue[_Open] = queue.SimpleQueue()

    async def put(self, ask: Callable[[], _T]) -> _T:
        """In the servers' thread; `ask` is called in the other one."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_T] = loop.create_future()
        self._open.put(_Open(ask, answer, loop))
        return await answer

    def answer(self) -> None:
        """In the person's thread: asks what lies there, one after the other."""
        while not self._open.empty():
            question = self._open.get()
            if not question.answer.cancelled():
                question.loop.call_soon_threadsafe(_set, question.answer, question.ask())

    def wait(self, future: Future[_T]) -> _T:
        """For work of the servers' thread, answering meanwhile; whoever leaves cancels it."""
        try:
            while not future.done():
                wait([future], timeout=TICK_S)
                self.answer()
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _set(answer: asyncio.Future[Any], value: Any) -> None:
    if not answer.done():
        answer.set_result(value)
