"""Servers for all tests of the folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.running import KEYS, RunningServer, start_server

from heedful.engine.llm import LLM
from heedful.testing import make_tiny_model


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), context_len=2048)


@pytest.fixture(scope="session")
def server(tiny_dir: Path) -> Iterator[RunningServer]:
    running = start_server(tiny_dir)
    yield running
    running.stop()


@pytest.fixture(scope="session")
def locked_server(tiny_dir: Path) -> Iterator[RunningServer]:
    """It asks for one of KEYS."""
    running = start_server(tiny_dir, api_keys=KEYS)
    yield running
    running.stop()


@pytest.fixture(scope="session")
def llm(tiny_dir: Path) -> LLM:
    """The server's model on a path of its own, without the server."""
    return LLM(str(tiny_dir), threads=1)
