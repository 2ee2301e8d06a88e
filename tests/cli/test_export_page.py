"""docs/export.md: its commands run in the order they stand in, and what it says of names is so."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from heedful.cli.main import run
from heedful.text.json_to_gguf import PRE_NAMES, SAMPLES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")


def test_the_commands_run_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```console\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    commands = [line.removeprefix("$ heedful ") for block in blocks for line in block.splitlines()]
    assert len(commands) == 9
    for command in commands:
        assert run(shlex.split(command)) == 0, command
    out = capsys.readouterr().out
    assert "first.gguf: 24 tensors" in out
    assert (tmp_path / "all-runs.html").as_uri() in out
    assert re.search(r"^perplexity [\d.]+ a token, [\d.]+ bits a byte$", out, re.MULTILINE)
    assert re.search(r"^chance   25\.0%  over 8 rows$", out, re.MULTILINE)
    assert re.search(r"choices_acc 0\.\d+", out)


def test_the_names_of_pre_tokenizers_are_those_that_are_written() -> None:
    sentence = re.search(r"what is written are the names (.*?), where", PAGE, re.DOTALL)
    assert sentence is not None
    assert re.findall(r"`(.*?)`", sentence[1]) == list(PRE_NAMES)
    assert "some fifteen awkward texts" in PAGE
    assert 13 <= len(SAMPLES) <= 17
