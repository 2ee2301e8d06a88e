"""docs/distributed.md: its commands run in the order they stand in, and say what it says they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from heedful.train.settings import ParallelSettings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")


def test_the_commands_run_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    blocks = re.findall(r"^```console\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    commands = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    assert [command.partition(" ")[0] for command in commands] == ["torchrun", "heedful"]
    programs = {"torchrun": "-m torch.distributed.run", "heedful": "-m heedful"}
    runnable = [f"{sys.executable} {programs[name]} {rest}" for name, _, rest in (c.partition(" ") for c in commands)]
    done = [
        subprocess.run(command.split(), cwd=tmp_path, capture_output=True, text=True, check=False, timeout=900)
        for command in runnable
    ]
    for each in done:
        assert each.returncode == 0, each.stderr
    assert len(re.findall(r"^step 6/6 · loss", done[0].stdout, flags=re.MULTILINE)) == 1, "one process prints"
    assert "runs/two goes on after step 6\n" in done[1].stdout
    assert "step 8/8 · loss" in done[1].stdout


@pytest.mark.parametrize("name", ["data", "tensor", "timeout"])
def test_every_setting_is_spoken_of(name: str) -> None:
    assert f"parallel.{name}" in PAGE
    assert hasattr(ParallelSettings(), name)
