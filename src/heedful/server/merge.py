"""Several asynchronous iterators read as they bring things."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T | None], None]:
    """(index of the source, what it brought), and None once where a source ends. Closes all when closed."""
    if len(sources) == 1:
        async for item in sources[0]:
            yield 0, item
        yield 0, None
        return
    waiting = {asyncio.ensure_future(anext(source)): index for index, source in enumerate(sources)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    yield index, None
                    continue
                waiting[asyncio.ensure_future(anext(sources[index]))] = index
                yield index, item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:
            await source.aclose()
