"""What `heedful generate` does not import: a gate on its start that needs no clock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from heedful.cli.main import VERBS
from heedful.testing import make_tiny_model

HEAVY = {
    "asyncio",
    "concurrent.futures",
    "email",
    "http.client",
    "huggingface_hub",
    "importlib.metadata",
    "jinja2",
    "multiprocessing",
    "pydantic",
    "rich",
    "sqlite3",
    "ssl",
    "torch",
    "unittest",
    "urllib.request",
    "zipfile",
}


@pytest.mark.parametrize("receipt", [[], ["--receipt"]])
def test_generate_imports_nothing_that_it_does_not_need(tmp_path: Path, receipt: list[str]) -> None:
    pytest.importorskip("heedful._native", exc_type=ImportError)  # without it generate runs on PyTorch
    model = make_tiny_model(tmp_path)
    other_verbs = {f"heedful.cli.{verb}" for verb in VERBS} - {"heedful.cli.generate"}
    arguments = ["generate", "-m", str(model), "hello", "--max-tokens", "1", "--temperature", "0", *receipt]
    program = (
        "import sys\n"
        "from heedful.cli.main import run\n"
        f"assert run({arguments!r}) == 0\n"
        f"print(sorted({HEAVY | other_verbs!r} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (0, ["[]"]), done.stderr
    assert done.stdout
