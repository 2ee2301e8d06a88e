"""Work that takes turns: one at a time, in a thread of its own, with a bounded number that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import TypeVar

from heedful.errors import EngineStopped, QueueFull

T = TypeVar("T")
Goes = Callable[[], bool]
"""Whether anybody still wants what is being done."""


class Turns:
    """Whoever is cancelled while waiting leaves the queue. Work that has begun is asked to end, by what it is called
    with, and the next begins after it."""

    def __init__(self, name: str, most_waiting: int) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._most_waiting = most_waiting
        self._is_closing = False
        self._is_over = False
        self.num_open = 0
        """Callers that wait or whose work runs."""

    async def run(self, work: Callable[[Goes], T]) -> T:
        """Raises QueueFull, EngineStopped, and what the work does."""
        if self._is_closing:
            raise EngineStopped
        if self.num_open > self._most_waiting:
            raise QueueFull(self._most_waiting)
        self.num_open += 1
        is_wanted = True

        def goes() -> bool:
            return is_wanted and not self._is_over

        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work, goes)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_over and task is not None and not task.cancelling():
                raise EngineStopped from None  # it is the work that was cancelled, not its caller
            raise
        finally:
            is_wanted = False
            self.num_open -= 1

    async def close(self, drain_seconds: float = 0.0, in_hurry: Callable[[], bool] = lambda: False) -> None:
        """As Service.close, but without waiting for what runs then: `ended` does."""
        self._is_closing = True
        deadline = perf_counter() + drain_seconds
        while self.num_open and perf_counter() < deadline and not in_hurry():
            await asyncio.sleep(0.05)
        self._is_over = True
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def ended(self) -> None:
        """After close(): the thread is gone."""
        await asyncio.to_thread(self._executor.shutdown)
