"""Models come when asked for and go when nobody uses them; the server goes down in order."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.conftest import start_server
from tests.server.test_hang_up import wait_until

from heedful.engine.llm import LLM
from heedful.engine.service import NoObserver, Service
from heedful.errors import EngineStopped, QueueFull, UnknownModel
from heedful.request import Request, SamplingParams
from heedful.server.pool import ModelPool


class Loads:
    """Counts what is loaded of a tiny model under any name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.names: list[str] = []

    def __call__(self, name: str) -> LLM:
        self.names.append(name)
        return LLM(str(self._folder), threads=1)


@asynccontextmanager
async def pool_of(loads: Loads, **settings: Any) -> AsyncIterator[ModelPool]:
    chosen = {"most_waiting": 4, "most_loaded": 2, "idle_unload_seconds": None, **settings}
    pool = ModelPool(
        ("a", "b", "c"), loads, lambda name: pytest.fail(name), observer=lambda name: NoObserver(), **chosen
    )
    pool.start()
    yield pool
    await pool.close(1.0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), 60)

    asyncio.run(bounded())


def test_a_model_is_loaded_once_however_many_ask(tiny_dir: Path) -> None:
    loads = Loads(tiny_dir)

    async def test() -> None:
        async with pool_of(loads) as pool:

            async def use() -> int:
                async with pool.lease("a") as hosted:
                    return id(hosted.service)

            assert len(set(await asyncio.gather(*(use() for _ in range(10))))) == 1

    run(test)
    assert loads.names == ["a"]


def test_the_longest_unused_makes_room_and_those_in_use_stay(tiny_dir: Path) -> None:
    loads = Loads(tiny_dir)

    async def test() -> None:
        async with pool_of(loads) as pool, pool.lease("a"):
            async with pool.lease("b"):
                pass
            async with pool.lease("c"):
                loaded = [hosted.name for hosted in pool.models if hosted.is_loaded]
                assert loaded == ["a", "c"]

    run(test)
    assert loads.names == ["a", "b", "c"]


def test_idle_models_are_unloaded_and_come_back(tiny_dir: Path) -> None:
    loads = Loads(tiny_dir)

    async def test() -> None:
        async with pool_of(loads, idle_unload_seconds=0.0) as pool:
            async with pool.lease("a") as hosted:
                thread = hosted.service._thread  # type: ignore[union-attr]
                await asyncio.sleep(1.5)  # the watch has passed at least once
                assert hosted.is_loaded
            while hosted.is_loaded or thread.is_alive():
                await asyncio.sleep(0.01)
            async with pool.lease("a"):
                assert hosted.is_loaded

    run(test)
    assert loads.names == ["a", "a"]


def test_a_load_that_fails_is_tried_again(tiny_dir: Path) -> None:
    calls = []

    def load(name: str) -> LLM:
        calls.append(name)
        if len(calls) == 1:
            raise UnknownModel(name, [], "first time")
        return LLM(str(tiny_dir), threads=1)

    async def test() -> None:
        async with pool_of(load) as pool:  # type: ignore[arg-type]
            with pytest.raises(UnknownModel):
                async with pool.lease("a"):
                    pass
            assert pool.find("a").users == 0
            async with pool.lease("a") as hosted:
                assert hosted.is_loaded

    run(test)


REQUEST = Request((1, 2, 3), SamplingParams(max_tokens=300, ignore_eos=True))


def test_the_queue_is_bounded(tiny_dir: Path) -> None:
    async def test() -> None:
        llm = LLM(str(tiny_dir), threads=1)
        service = Service(llm, most_waiting=2)
        release = threading.Event()
        service._command(release.wait)  # the engine's thread stands still: nothing is admitted
        streams = [await service.open(REQUEST), await service.open(REQUEST)]
        with pytest.raises(QueueFull):
            await service.open(REQUEST)
        release.set()
        for stream in streams:
            stream.close()
        await service.close()

    run(test)


def test_a_failing_step_fails_its_requests_and_not_the_next_ones(tiny_dir: Path) -> None:
    async def test() -> None:
        llm = LLM(str(tiny_dir), threads=1)
        service = Service(llm)
        run_batch, broken = llm.engine.runner.run, []

        def fail_once(batch: Any) -> Any:
            if not broken:
                broken.append(batch)
                raise RuntimeError("out of order")
            return run_batch(batch)

        llm.engine.runner.run = fail_once  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="out of order"):
            await (await service.open(REQUEST)).complete()
        completion = await (await service.open(REQUEST)).complete()
        assert completion.receipt.output_tokens == 300
        assert llm.engine.scheduler.cache.taken_bytes == 0
        await service.close()

    run(test)


def test_closing_lets_answers_end_and_cancels_those_that_do_not(tiny_dir: Path) -> None:
    async def test() -> None:
        service = Service(LLM(str(tiny_dir), threads=1))
        short = await service.open(REQUEST)
        ended = asyncio.create_task(short.complete())
        await service.close(drain_seconds=30)
        assert (await ended).finish_reason == "length"
        with pytest.raises(EngineStopped):
            await service.open(REQUEST)

        service = Service(LLM(str(tiny_dir), threads=1))
        long = await service.open(Request((1, 2, 3), SamplingParams(max_tokens=1900, ignore_eos=True)))
        ended = asyncio.create_task(long.complete())
        await asyncio.sleep(0)
        await service.close()
        completion = await ended
        assert completion.finish_reason == "cancelled"
        assert completion.receipt.output_tokens < 1900

    run(test)


def test_a_server_that_goes_down_ends_its_streams(tiny_dir: Path) -> None:
    """With a last event that says why, not in the middle of a line."""
    server = start_server(tiny_dir)
    body = {"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        rest = [line for line in lines if line]
        stopping.join()
    last = rest[-1].removeprefix("data: ")
    assert last == "[DONE]" or "shutting down" in json.loads(last)["error"]["message"]
    wait_until(lambda: server.state.pool.find("tiny").service is not None, "it was loaded")
    assert server.state.is_ready is False
