"""`heedful generate --explain-cost` as a user meets it, as processes on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from heedful.cli.explain_cost import table
from heedful.cost.explain import Explained
from heedful.cost.quality import Quality
from heedful.testing import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), context_len=2048))


def generate(model: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "heedful", "generate", "-m", model, "--max-tokens", "5", "--explain-cost"]
    return subprocess.run([*command, *arguments], text=True, capture_output=True, timeout=120, check=True)


def test_the_table_follows_the_answer_on_stderr(model: str, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("a" * 1200)
    done = generate(model, "--file", str(tmp_path / "prompt.txt"))
    lines = done.stderr[done.stderr.index("this request with") :].splitlines()
    endings = {"--window 1024 --sinks 4": "not measured", "--prefill sparse": "changes nothing over 1,205 tokens"}
    for policy, ending in endings.items():
        (line,) = (line for line in lines if line.startswith(policy))
        assert line.endswith(ending)
    assert "--kv" not in done.stdout


def test_in_json_it_is_a_field(model: str) -> None:
    found = json.loads(generate(model, "--json", "hello").stdout)
    first = found["explained"][0]
    assert first["policy"] == "--kv q8"
    assert first["visits"] == found["receipt"]["visits"]["total"]
    assert first["quality"] is None
    assert first["seconds"] > 0


def test_a_table_by_hand() -> None:
    exact = Explained("--kv q8", 1000, 1000, 2_000_000, 500_000, 0.0125, None, False)
    found = Quality(0.0123, 0.1, 0.01, 0.95, "a text")
    window = Explained("--window 1024", 250, 1000, 400_000, 90_000, 0.01, found, False)
    short = Explained("--kv q4", 1000, 1000, 2_000_000, 500_000, 0.0125, None, True)
    assert table([exact, window, short], tokens=300).splitlines() == [
        "this request with  visits    less  KV read  KV held  time, at least  measured loss",
        "--kv q8               1 k             2 MB   500 kB         12.5 ms  not measured",
        "--window 1024         250  75.0 %   400 kB    90 kB           10 ms  KLD 0.0123, 95% of facts found",
        "--kv q4                                                              changes nothing over 300 tokens",
    ]
