"""`heedful view` as a user meets it, on a tiny model: once as a process, else in this one, where PyTorch is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from heedful.cli.main import run as run_here
from heedful.testing import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), context_len=1024))


def run(verb: str, model: str, *arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "heedful", verb, "-m", model, "--max-tokens", "12", *arguments]
    return subprocess.run(command, text=True, capture_output=True, timeout=120, check=False, **{"input": "", **how})


def test_a_page_and_its_json_are_the_run_that_generate_makes(model: str, tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    done = run("view", model, "a" * 300, "--window", "64", "--sinks", "4", "-o", str(page), "--json")
    assert done.returncode == 0, done.stderr
    view = json.loads(done.stdout)
    same = json.loads(run("generate", model, "a" * 300, "--window", "64", "--sinks", "4", "--json").stdout)
    assert view["tokens"]["id"] == same["prompt_token_ids"] + same["token_ids"]
    assert view["receipt"]["visits"] == same["receipt"]["visits"]
    assert view["receipt"]["kv"] == same["receipt"]["kv"]
    html = page.read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>")
    data = html.partition('<script type="application/json" id="data">')[2].partition("</script>")[0]
    assert json.loads(data) == view
    assert "visits of" in done.stderr


def test_a_page_is_written_where_one_is_and_no_more(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_here(["view", "-m", model, "--max-tokens", "12", "hello"]) == 0
    done = capsys.readouterr()
    assert done.out == "view.html\n"
    assert [path.name for path in tmp_path.iterdir()] == ["view.html"]
    assert done.err.startswith("5 in (0 cached) · 12 out")


def test_the_compact_form(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt.txt").write_text("tell me \x1b[31m more " * 20)
    monkeypatch.chdir(tmp_path)
    assert run_here(["view", "-m", model, "--max-tokens", "12", "-f", "prompt.txt", "--term", "--chat"]) == 0
    text = capsys.readouterr().out
    assert "visits of" in text.splitlines()[0]
    total, dense = text.partition("visits   ")[2].split("\n")[0].rpartition("  ")[2].split(" of ")
    assert total.replace(",", "") == dense.removesuffix(" dense").replace(",", "")
    assert text.count("  head ") == 4
    assert "--window 64 --sinks 4" in text
    assert "\x1b" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["prompt.txt"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--json", "--term", "x"], "--json: and --term both want stdout"),
        (["x", "-o", "/nowhere/at/all.html"], "/nowhere/at does not exist"),
        (["x", "-o", "/tmp"], "/tmp is a folder"),
        (["x", "--budget", "5"], "budget: must be at least 256 tokens"),
        (["x", "--temperature", "-1"], "temperature: must be between"),
        (["x", "--max-tokens", "5000", "--window", "64"], "5,001 tokens are more than 1,024"),
        ([""], "PROMPT: is empty"),
    ],
)
def test_wrong_use_is_named(model: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(["view", "-m", model, *arguments]) == 2
    done = capsys.readouterr()
    assert said in done.err
    assert done.out == ""


def test_without_torch_the_remedy_is_said_at_once(model: str) -> None:
    program = (
        "import importlib.util, sys\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'torch' else real(name, *rest)\n"
        "from heedful.cli.main import run\n"
        f"sys.exit(run(['view', '-m', {model!r}, 'hello']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'heedful[torch]'" in done.stderr
