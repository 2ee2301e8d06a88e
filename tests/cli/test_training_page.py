"""docs/training.md: its commands run in the order they stand in, and it names every setting with its default."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from heedful.cli.main import run
from heedful.train.loop import complete
from heedful.train.settings import SIZES, TrainSettings, by_name, changed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")


def test_the_commands_run_in_their_order(
    minilm_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("examples", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```console\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    commands = [line.removeprefix("$ heedful ") for block in blocks for line in block.splitlines()]
    assert len(commands) == 15
    for command in commands:
        assert run(shlex.split(command)) == 0, command
    out = capsys.readouterr().out
    assert "step 30/30 · loss" in out
    assert re.search(r'^optim.optimizer +"adamw" +"muon"$', out, re.MULTILINE)
    assert "step 40/40 · loss" in out
    assert re.search(r"^refund: (yes|no), probability of yes 0\.\d+$", out, re.MULTILINE)


def test_every_setting_is_in_the_table() -> None:
    rows = re.findall(r"^\| (`(?:model|data|optim|lora|dpo|decide|parallel|run)\..*?) \|", PAGE, flags=re.MULTILINE)
    named = set()
    for row in rows:
        section = row[1:].partition(".")[0]
        named |= {f"{section}.{name.rpartition('.')[2]}" for name in re.findall(r"`([\w.]+)`", row)}
    known = {f"{part.name}.{key.name}" for part in fields(TrainSettings) for key in fields(part.default_factory)}  # type: ignore[arg-type, misc]
    assert named == known
    assert set(by_name(TrainSettings().as_dict())) == known


def test_the_dial_is_as_its_table_says() -> None:
    rows = re.findall(
        r"^\| `(\w+)`(?: \(default\))? \| (\d+) \| (\d+) \| (\d+) / (\d+) \| ([\d,]+) \| ([\d,]+) \|$", PAGE, re.M
    )
    assert {name for name, *_ in rows} == set(SIZES)
    for name, *numbers in rows:
        told = complete(changed(TrainSettings(), {"model.size": name, "run.threads": 1}))
        model = told.model
        found = [model.layers, model.hidden_size, model.heads, model.kv_heads, model.context_len, told.data.vocab_size]
        assert found == [int(number.replace(",", "")) for number in numbers]
