"""Work that takes turns: one at a time, in a thread of its own, with a bounded number that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from heedful.errors import QueueFull

T = TypeVar("T")


class Turns:
    """Whoever is cancelled while waiting leaves the queue. Work that has begun runs to its end, and the next begins
    after it."""

    def __init__(self, name: str, most_waiting: int) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._most_waiting = most_waiting
        self.num_open = 0
        """Callers that wait or whose work runs."""

    async def run(self, work: Callable[[], T]) -> T:
        """Raises QueueFull, and what the work does."""
        if self.num_open > self._most_waiting:
            raise QueueFull(self._most_waiting)
        self.num_open += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self.num_open -= 1

    async def close(self) -> None:
        """Drop what waits and end the thread after what runs."""
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)
