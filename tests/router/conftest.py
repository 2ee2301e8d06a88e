"""A tiny model for the servers of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from heedful.testing import make_tiny_model


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), context_len=2048)
