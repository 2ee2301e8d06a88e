"""Where deciders come from and how they go: loading, unloading, calibrations, remote ones, the server's end."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.conftest import start_server
from tests.server.scripted import Scripted
from tests.server.test_hang_up import post, wait_until
from tests.server.test_model_pool import Loads, run

from heedful import LLM
from heedful.decide import Likelihood, Noul
from heedful.decide.calibrate import Calibration
from heedful.decide.calibration_file import kept_path
from heedful.decide.load import find_decider
from heedful.decide.remote import RemoteFailed
from heedful.engine.service import NoObserver
from heedful.errors import (
    BadParameter,
    EngineStopped,
    NetworkUnavailable,
    QueueFull,
    SourceError,
    UnknownModel,
    UsageError,
)
from heedful.server import compressed
from heedful.server.compressed import decoded
from heedful.server.failures import HTTPFailure
from heedful.server.pool import LoadDecider, ModelPool
from heedful.server.turns import Turns

BODY = {"state": "x", "questions": {"q": {"type": "noul", "instructions": "?"}}}


@asynccontextmanager
async def pool_of(tiny_dir: Path, load: LoadDecider, **settings: Any) -> AsyncIterator[ModelPool]:
    chosen = {"most_waiting": 4, "most_loaded": 2, "idle_unload_seconds": None, **settings}
    pool = ModelPool(
        ("a", "b"), Loads(tiny_dir), lambda name: pytest.fail(name), observer=lambda name: NoObserver(),
        deciders=("d", "e", "a"), load_decider=load, **chosen,
    )  # fmt: skip
    pool.start()
    yield pool
    await pool.close(1.0)


def test_a_decider_is_loaded_once_when_asked_for(tiny_dir: Path) -> None:
    names: list[str] = []

    def load(name: str) -> Scripted:
        names.append(name)
        return Scripted()

    async def test() -> None:
        async with pool_of(tiny_dir, load) as pool:

            async def use(name: str) -> object:
                async with pool.lease_decider(name) as hosted:
                    return hosted.decider

            assert len({id(decider) for decider in await asyncio.gather(*(use("d") for _ in range(5)))}) == 1
            assert await use("a") is None, "a chat model of the server decides itself"

    run(test)
    assert names == ["d"]


def test_deciders_and_models_make_room_for_each_other(tiny_dir: Path) -> None:
    async def test() -> None:
        async with pool_of(tiny_dir, lambda name: Scripted()) as pool:
            async with pool.lease_decider("d") as first:
                pass
            async with pool.lease("a"), pool.lease_decider("e"):
                assert not first.is_loaded
                assert pool.find("a").is_loaded

    run(test)


def test_an_idle_decider_goes_and_a_load_that_fails_is_tried_again(tiny_dir: Path) -> None:
    calls: list[str] = []

    def load(name: str) -> Scripted:
        calls.append(name)
        if len(calls) == 1:
            raise SourceError("first time")
        return Scripted()

    async def test() -> None:
        async with pool_of(tiny_dir, load, idle_unload_seconds=0.0) as pool:
            with pytest.raises(SourceError):
                async with pool.lease_decider("d"):
                    pass
            async with pool.lease_decider("d") as hosted:
                assert hosted.is_loaded
            while hosted.is_loaded:
                await asyncio.sleep(0.01)

    run(test)
    assert calls == ["d", "d"]


def test_turns_end_in_order() -> None:
    """What runs is told that it is over, what waits is refused, and so is what comes later."""

    async def test() -> None:
        turns, begun, ended = Turns("t", 5), threading.Event(), []

        def work(goes: Callable[[], bool]) -> str:
            begun.set()
            while goes():
                begun.wait(0.001)
            ended.append(True)
            return "cut short"

        running = asyncio.create_task(turns.run(work))
        waiting = asyncio.create_task(turns.run(work))
        await asyncio.to_thread(begun.wait)
        assert turns.num_open == 2
        await turns.close()
        await turns.ended()
        assert await running == "cut short"
        with pytest.raises(EngineStopped):
            await waiting
        with pytest.raises(EngineStopped):
            await turns.run(work)
        assert ended == [True]

    run(test)


def test_work_of_a_caller_that_left_is_told_so_and_the_next_begins_after_it() -> None:
    async def test() -> None:
        turns, begun = Turns("t", 0), threading.Event()
        order: list[str] = []

        def work(goes: Callable[[], bool]) -> None:
            begun.set()
            while goes():
                begun.wait(0.001)
            order.append("first ends")

        first = asyncio.create_task(turns.run(work))
        await asyncio.to_thread(begun.wait)
        with pytest.raises(QueueFull):
            await turns.run(lambda goes: None)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await turns.run(lambda goes: order.append("second"))
        assert order == ["first ends", "second"]
        await turns.close()
        await turns.ended()

    run(test)


def test_a_server_that_goes_down_lets_a_decision_end(tiny_dir: Path) -> None:
    scripted = Scripted()
    scripted.may_go = threading.Event()
    server = start_server(tiny_dir, load_decider=lambda name: scripted, deciders=("scripted",))
    connection = post(server, "/v1/systemone", BODY)
    wait_until(lambda: bool(scripted.asked), "it runs")
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    wait_until(lambda: not server.state.is_ready, "the server goes down")
    scripted.may_go.set()
    assert b"200 OK" in connection.recv(100)
    stopping.join()
    connection.close()


OPTIONS = {f"Queue {i:03d}": None for i in range(100)}


@pytest.mark.parametrize(("drain_seconds", "status"), [(30.0, b"200"), (0.0, b"503")])
def test_going_down_a_chat_model_ends_its_decision_or_cuts_it(
    tiny_dir: Path, drain_seconds: float, status: bytes
) -> None:
    """It has more options than it reads at once."""
    server = start_server(tiny_dir, drain_seconds=drain_seconds)
    body = {"state": "x" * 500, "questions": {"q": {"type": "choice", "criteria": OPTIONS}}}
    httpx.post(f"{server.url}/v1/systemone", json=BODY, timeout=60).raise_for_status()  # it is loaded
    connection = post(server, "/v1/systemone", body)
    wait_until(lambda: server.state.pool.num_open > 0, "it is being read")
    server.stop()
    assert connection.recv(100).startswith(b"HTTP/1.1 " + status)
    connection.close()


class Failing:
    name = "failing"

    def __init__(self, error: Exception) -> None:
        self.error = error

    def decide(self, state: Any, questions: Any) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (RemoteFailed("there is overloaded", "Try again in 3 s.", status=529), 503, "overloaded"),
        (NetworkUnavailable("nothing answers there"), 503, "nothing answers"),
        (UnknownModel("gone", [], "Look again."), 404, "gone"),
        (UsageError("there refuses the request", "Say less."), 422, "refuses"),
        (BadParameter("questions['q'].options", "are too many for it"), 422, "too many"),
        (RuntimeError("a secret of ours"), 500, "its log says where"),
    ],
)
def test_what_a_decider_raises(tiny_dir: Path, error: Exception, status: int, words: str) -> None:
    server = start_server(tiny_dir, load_decider=lambda name: Failing(error), deciders=("failing",))  # type: ignore[arg-type,return-value]
    try:
        answer = httpx.post(f"{server.url}/v1/systemone", json=BODY)
        assert answer.status_code == status
        assert words in answer.text
        assert "secret" not in answer.text
        assert ("retry-after" in answer.headers) == (status == 503)
    finally:
        server.stop()


def test_a_chat_model_decides_with_the_calibration_kept_for_it(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path))
    calibration = Calibration({"noul": 3.0}, {}, find_decider(str(tiny_dir)).sha256())
    path = kept_path(calibration.model_sha256)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(calibration.to_dict()))
    llm = LLM(str(tiny_dir), threads=1)
    question = [Noul("q", "?")]
    expected = Likelihood(llm, calibration=calibration).decide("x", question)["q"].to_dict()["noul"]
    plain = Likelihood(llm).decide("x", question)["q"].to_dict()["noul"]
    assert abs(expected - plain) > 1e-3
    server = start_server(tiny_dir)
    try:
        answer = httpx.post(f"{server.url}/v1/systemone", json=BODY, timeout=60).json()
        assert answer["answers"]["q"]["noul"] == pytest.approx(expected, abs=1e-5)
    finally:
        server.stop()


def test_without_zstd_the_refusal_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "ZSTD_MODULES", ("no.such.module",))
    with pytest.raises(HTTPFailure, match=r"backports\.zstd") as refused:
        decoded(b"", "zstd", 10)
    assert refused.value.status == 415
