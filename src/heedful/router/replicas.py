"""A target with several endpoints that answer alike: each request goes where most of its prompt was before, unless
that endpoint has more to do (affinity.py); one that fails before its answer begins is stood in for by another.

Each endpoint has a breaker of its own, and is left alone while that is open. An answer that breaks off in the middle
is an error for its client: what it has seen cannot be said again in other words. The others go on.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from heedful.errors import TargetFailed
from heedful.router.affinity import BLOCK_BYTES, BLOCK_TOKENS, Affinity, Placement, Work, blocks_of
from heedful.router.policy import OpenAISpec
from heedful.router.remote import FIRST_WAIT_S, LONGEST_WAIT_S, OpenAITarget
from heedful.router.signals import JSON, Asked
from heedful.router.target import Opened, Target

if TYPE_CHECKING:
    import httpx

OUTPUT_TOKENS = 256
"""Expected of a request that does not say how many it wants at most."""


def remote_target(spec: OpenAISpec) -> Target:
    """Raises PolicyError where the environment lacks what the policy names."""
    return ReplicatedTarget(spec) if spec.endpoints else OpenAITarget(spec)


class ReplicatedTarget:
    """`transport`, `sleep` and `clock` are the tests'. For one loop."""

    books_itself = False

    def __init__(
        self,
        spec: OpenAISpec,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises PolicyError where the environment lacks what the policy names."""
        self._spec = spec
        self._sleep = sleep
        of_one = [
            replace(spec, name=f"{spec.name}.endpoints[{i}]", base_url=url, endpoints=(), retries=0)
            for i, url in enumerate(spec.endpoints)
        ]
        self.endpoints = {one.name: OpenAITarget(one, transport=transport, sleep=sleep, clock=clock) for one in of_one}
        self.affinity = Affinity(self.endpoints)

    @property
    def name(self) -> str:
        return self._spec.name

    async def open(self, asked: Asked, held: AsyncExitStack) -> Opened:
        """Asks `retries` + 1 times at most, each time somebody else as long as there is somebody else."""
        prompt = prompt_bytes(asked)
        blocks = blocks_of(prompt)
        work = Work(-(-len(prompt) * BLOCK_TOKENS // BLOCK_BYTES), asked.max_tokens or OUTPUT_TOKENS)
        tried: set[str] = set()
        failure: TargetFailed | None = None
        for attempt in range(self._spec.retries + 1):
            among = self._admitting() - tried
            if not among and attempt:  # all were asked: again, but not at once
                await self._sleep(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**attempt))
                tried, among = set(), self._admitting()
            if not among:
                break
            placement = self.affinity.choose(blocks, work, among)
            tried.add(placement.replica)
            try:
                return await self._opened(placement, blocks, asked, held)
            except TargetFailed as error:
                failure = error
        raise failure or self._nobody()

    async def aclose(self) -> None:
        for endpoint in self.endpoints.values():
            await endpoint.aclose()

    async def _opened(
        self, placement: Placement[str], blocks: tuple[int, ...], asked: Asked, held: AsyncExitStack
    ) -> Opened:
        self.affinity.begin(placement, blocks)
        async with AsyncExitStack() as mine:
            try:
                opened = await self.endpoints[placement.replica].open(asked, mine)
            except BaseException as error:
                self.affinity.end(placement)
                self._note(placement.replica, error)
                raise
            mine.callback(self.affinity.end, self.affinity.answering(placement))
            held.push_async_exit(mine.pop_all())
        return _Watched(opened, lambda error: self._note(placement.replica, error))

    def _note(self, replica: str, error: BaseException) -> None:
        """What breaks off or cannot be reached comes back with nothing in its cache."""
        import httpx

        if isinstance(error.__cause__, httpx.NetworkError | httpx.RemoteProtocolError):
            self.affinity.forget(replica)

    def _admitting(self) -> set[str]:
        return {name for name, endpoint in self.endpoints.items() if endpoint.breaker.state != "open"}

    def _nobody(self) -> TargetFailed:
        seconds = min(endpoint.breaker.seconds_left for endpoint in self.endpoints.values())
        remedy = "Wait until one may be tried again, and look at the endpoints."
        return TargetFailed(
            self.name, "has no endpoint that is not left alone after failures", remedy, status=503, retry_after=seconds
        )


class _Watched:
    """An answer whose breaking off is told."""

    def __init__(self, opened: Opened, failed: Callable[[TargetFailed], None]) -> None:
        self._opened = opened
        self._failed = failed

    async def whole(self) -> JSON:
        return await self._opened.whole()

    async def chunks(self) -> AsyncGenerator[JSON, None]:
        try:
            async with aclosing(self._opened.chunks()) as chunks:
                async for chunk in chunks:
                    yield chunk
        except TargetFailed as error:
            self._failed(error)
            raise


def prompt_bytes(asked: Asked) -> bytes:
    """What a chat's prompt is made of, in the order of templates: one more message only makes it longer."""
    pieces = [*asked.tools, *asked.messages]
    text = "".join(json.dumps(piece, sort_keys=True, ensure_ascii=False) for piece in pieces)
    return text.encode("utf-8", "surrogatepass")
