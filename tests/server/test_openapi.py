"""The OpenAPI document is valid, names every path, and whatever it allows ends in no 5xx."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.server.conftest import RunningServer, start_server


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Of a model with a short context: answers end soon, however many tokens are asked for."""
    from heedful.testing import make_tiny_model

    folder = tmp_path_factory.mktemp("small")
    running = start_server(make_tiny_model(folder, context_len=128), history_path=str(folder / "page.sqlite"))
    yield running
    running.stop()


def test_every_path_of_the_apis_is_in_it(small_server: RunningServer) -> None:
    from heedful.server.app import _routes

    document = httpx.get(f"{small_server.url}/openapi.json").json()
    served = {(method.lower(), route.path) for route in _routes() for method in route.methods or ()} - {("head", "")}
    described = {(method, path) for path, item in document["paths"].items() for method in item}
    served = {(method, path.replace(":path", "")) for method, path in served if method != "head"}
    pages = {
        pair for pair in served - described if pair[1] in ("/", "/openapi.json", "/history/export") or "." in pair[1]
    }
    assert served - pages == described


def test_nothing_that_it_allows_ends_in_a_5xx(small_server: RunningServer, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{small_server.url}/openapi.json"]
    checks = ["--checks", "not_a_server_error", "--phases", "examples,coverage,fuzzing", "--max-examples", "25"]
    limits = [
        "--request-timeout",
        "60",
        "--suppress-health-check",
        "all",
        "--seed",
        "1",
        "--generation-allow-x00",
        "true",
    ]
    done = subprocess.run([*command, *checks, *limits], capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
