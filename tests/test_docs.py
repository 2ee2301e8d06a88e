"""Every command and every Python block in the README and the docs runs; every error class is in docs/errors.md."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from heedful import errors

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
INSTALLED = Path(sys.prefix) / ".heedful-test-installed"
HEEDFUL = f"{shlex.quote(sys.executable)} -m heedful"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    lines = [line for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()]
    return sorted({line.partition("  #")[0].strip() for line in lines if line.strip()})


@pytest.fixture
def environment(smollm2_path: Path, tmp_path: Path) -> dict[str, str]:
    """The real model is there; histories go elsewhere."""
    return {**os.environ, "HEEDFUL_DATA": str(tmp_path)}


@pytest.mark.parametrize("command", [line for line in commands() if not line.startswith("make")])
def test_command(command: str, environment: dict[str, str]) -> None:
    runnable = re.sub(r"(^|\| )heedful\b", rf"\g<1>{HEEDFUL}", command)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", runnable],
        env=environment, input="Hello\n/quit\n", capture_output=True, text=True, timeout=300, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.skipif(
    not INSTALLED.exists(), reason="`make test` makes this environment; another one would be installed into"
)
def test_make_demo(environment: dict[str, str]) -> None:
    assert "make demo" in commands()
    done = subprocess.run(
        ["make", "demo", f"VENV={sys.prefix}"],
        env=environment, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d+ in \(0 cached\) · \d+ out · .* visits of .* dense · KV .* J \(", done.stderr)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_blocks(page: Path, environment: dict[str, str]) -> None:
    for block in blocks(page, "python"):
        done = subprocess.run(
            [sys.executable, "-c", block], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


def test_the_readme_gets_to_the_point() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert lines.index("make demo") < 15
    assert len(lines) <= 160


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readme_shows_every_folder() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for folder in (ROOT / "src" / "heedful").iterdir():
        if folder.is_dir() and folder.name != "__pycache__":
            assert f"  {folder.name}/ " in readme, folder.name


def test_every_error_is_documented_and_drawn() -> None:
    names = {
        name
        for name, thing in vars(errors).items()
        if isinstance(thing, type) and issubclass(thing, errors.HeedfulError)
    }
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    for name in names:
        assert f"`{name}`" in page, name
        assert re.search(rf"\b{name}\b", str(errors.__doc__)), name
