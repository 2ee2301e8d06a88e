"""A decider's way to a model that a Service steps: its prompts run beside everybody else's requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as ListLike
from concurrent.futures import Future

from heedful.cost.receipt import Receipt
from heedful.engine.service import AnswerStream, Service
from heedful.request import Request, Sequence
from heedful.server.asks import check_ended

MOST_OPEN = 32
"""Requests of one decision at a time, so that it never fills the queue alone."""

Reading = list[tuple[Sequence, Receipt]]


class ServiceReader:
    """Made in the loop's thread, called in the decider's. For one decision.

    most_open: of its requests at a time.
    """

    def __init__(self, service: Service, most_open: int = MOST_OPEN) -> None:
        self._service = service
        self._most_open = most_open
        self._loop = asyncio.get_running_loop()
        self._future: Future[Reading] | None = None
        self._is_stopped = False

    def __call__(self, requests: ListLike[Request]) -> Reading:
        """The sequences of requests that ask for no output, read to their ends, and what each cost.

        Raises QueueFull, EngineStopped, what Engine.prepare does, and CancelledError once it is stopped.
        """
        self._future = asyncio.run_coroutine_threadsafe(self._read(requests), self._loop)
        if self._is_stopped:
            self._future.cancel()
        return self._future.result()

    def stop(self) -> None:
        """Nobody waits any more: free what is held before the engine's next step."""
        self._is_stopped = True
        if self._future is not None:
            self._future.cancel()

    async def _read(self, requests: ListLike[Request]) -> Reading:
        found: Reading = []
        for begin in range(0, len(requests), self._most_open):
            streams: list[AnswerStream] = []
            try:
                for request in requests[begin : begin + self._most_open]:
                    streams.append(await self._service.open(request, wants_pieces=False))
                for stream in streams:
                    completion = await stream.complete()
                    check_ended(completion)
                    found.append((stream.sequence, completion.receipt))
            finally:
                for stream in streams:
                    stream.close()
        return found
