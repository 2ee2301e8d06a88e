"""docs/decisions.md shows what its commands and its Python print: words alike, numbers up to rounding."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "decisions.md"
SHOWN = re.findall(
    r"^```(console|python)\n(.*?)^```\n```text\n(.*?)^```$",
    PAGE.read_text(encoding="utf-8"),
    flags=re.DOTALL | re.MULTILINE,
)
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w)")


def test_the_page_shows_outputs() -> None:
    assert [kind for kind, _, _ in SHOWN].count("console") >= 3


@pytest.mark.parametrize(("kind", "text", "shown"), SHOWN, ids=[str(at) for at in range(len(SHOWN))])
def test_an_output_is_reproduced(kind: str, text: str, shown: str, smollm2_path: Path, tmp_path: Path) -> None:
    python = shlex.quote(sys.executable)
    command = [sys.executable, "-c", text]
    if kind == "console":
        runnable = re.sub(r"(^|\| )heedful\b", rf"\g<1>{python} -m heedful", text.removeprefix("$ "))
        command = ["bash", "-euo", "pipefail", "-c", runnable]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "HEEDFUL_DATA": str(tmp_path)}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert words(done.stdout) == words(shown)
    for found, expected in zip(numbers(done.stdout), numbers(shown), strict=True):
        assert found == pytest.approx(expected, abs=0.02)


def words(text: str) -> list[str]:
    """A line without its numbers, and without what only lines columns up."""
    return [" ".join(NUMBER.sub("#", line).split()) for line in text.splitlines()]


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]
