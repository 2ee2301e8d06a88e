"""The tables of docs/plan.md are what the commands above them print; simulating them is left to who has a minute."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from heedful.cli.main import run

PAGE = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^(?:\$ )?heedful (plan smollm2 --users \d+ --turns .*)$", PAGE, flags=re.MULTILINE)


def test_there_are_two() -> None:
    assert len(COMMANDS) == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_the_table_is_what_the_command_prints(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path))  # no figures but those that ship
    assert run([*shlex.split(command), "--requests", "0"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 13
    assert "\n".join(lines) in PAGE
