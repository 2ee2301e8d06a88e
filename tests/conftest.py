"""Shared fixtures: golden files, the real models (fetched once through heedful's own sources), tiny random models."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent / "golden"

# a run in the background of a script ignores Ctrl-C, and so would all that the tests start
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def golden() -> Path:
    return GOLDEN


@pytest.fixture(scope="session")
def golden_json() -> Callable[[str], Any]:
    return lambda name: json.loads((GOLDEN / name).read_text(encoding="utf-8"))


def _fetched(name: str) -> Path:
    from heedful.weights.sources import resolve

    return resolve(name, accept_licence=True).path


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return _fetched("smollm2")


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    return _fetched("gemma3-270m")


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    return _fetched("minilm")
