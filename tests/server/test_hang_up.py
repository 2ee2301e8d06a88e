"""Clients that hang up: whatever they were waiting for, everything that they held is free again."""

from __future__ import annotations

import gc
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from tests.server.conftest import RunningServer

from heedful.server.pool import Hosted

WAIT_SECONDS = 30.0


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def tiny(server: RunningServer) -> Hosted:
    return server.state.pool.find("tiny")


def load(server: RunningServer) -> None:
    httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}).raise_for_status()


def is_idle(server: RunningServer) -> bool:
    hosted = tiny(server)
    assert hosted.service is not None
    scheduler = hosted.llm.engine.scheduler
    return not scheduler.has_work and scheduler.cache.taken_bytes == 0 and hosted.users == 0


def post(server: RunningServer, path: str, body: object) -> socket.socket:
    """Send a request and return the open connection."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


LONG = {"max_tokens": 1500, "ignore_eos": True, "temperature": 0}
CASES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello " * 20}], **LONG},
    "/v1/completions": {"prompt": "hello " * 20, **LONG},
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", CASES)
def test_a_client_that_hangs_up_frees_its_pages(server: RunningServer, path: str, stream: bool) -> None:
    load(server)
    engine = tiny(server).llm.engine
    connection = post(server, path, {**CASES[path], "stream": stream})
    wait_until(lambda: engine.scheduler.cache.taken_bytes > 0, "the request begins")
    (sequence,) = list(engine._state)
    connection.close()
    wait_until(lambda: is_idle(server), "the request ends")
    assert sequence.finish is not None
    assert sequence.finish.value == "cancelled"
    assert sequence.output_len < 1500


def test_the_next_step_after_a_close_is_without_it(server: RunningServer) -> None:
    """In the engine's own steps: from the cancel on, no batch has the sequence."""
    load(server)
    hosted = tiny(server)
    service, engine = hosted.service, hosted.llm.engine
    assert service is not None
    connection = post(server, "/v1/completions", {**CASES["/v1/completions"], "stream": True})
    wait_until(lambda: bool(engine._state) and next(iter(engine._state)).output_len > 0, "the answer begins")
    (sequence,) = list(engine._state)
    connection.close()
    wait_until(lambda: sequence.finish is not None, "it is cancelled")
    said = sequence.output_len
    wait_until(lambda: is_idle(server), "it ends")
    assert sequence.output_len == said


def test_500_streams_aborted_at_random_points_leave_nothing_behind(server: RunningServer) -> None:
    load(server)
    draw = random.Random(5)
    abort_some(server, draw, 60)  # whatever is made once is made now
    before = holdings(server)
    abort_some(server, draw, 500)
    wait_until(lambda: holdings(server)[:3] == before[:3], f"{holdings(server)} instead of {before}")
    grown = holdings(server)[3] - before[3]
    assert grown < 30e6, f"{grown / 1e6:.0f} MB more"


def abort_some(server: RunningServer, draw: random.Random, count: int) -> None:
    """Eight at a time."""
    points = [(draw.choice(list(CASES)), draw.random() < 0.7, draw.random() ** 3 * 0.1) for _ in range(count)]

    def abort(mine: list[tuple[str, bool, float]]) -> None:
        for path, stream, seconds in mine:
            connection = post(server, path, {**CASES[path], "stream": stream, "max_tokens": 400})
            connection.settimeout(seconds or None)
            try:
                while connection.recv(1000):
                    pass
            except TimeoutError:
                pass
            connection.close()

    threads = [threading.Thread(target=abort, args=(points[i::8],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: is_idle(server), "all requests end")


def holdings(server: RunningServer) -> tuple[int, int, int, int]:
    """Bytes of pages in use, threads but those of asyncio's bounded pool, descriptors, resident memory."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    pages = tiny(server).llm.engine.scheduler.cache.taken_bytes
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")]
    return pages, len(threads), len(os.listdir("/proc/self/fd")), resident
