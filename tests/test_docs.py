"""Every command and every Python block in the README and the docs runs; every error class is in docs/errors.md."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
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


@pytest.fixture(scope="module")
def served(smollm2_path: Path) -> Iterator[str]:
    """`heedful serve` as the docs start it, on a free port; its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    models = ["-m", "smollm2", "-m", "minilm"]
    command = [sys.executable, "-m", "heedful", "serve", *models, "--no-history", "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "heedful: smollm2" in process.stderr.readline()  # it listens by then
        yield f"http://localhost:{port}"
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGTERM, "ended in order, then by the signal, as its caller expects"


IN_BACKGROUND = ("make", "heedful serve")
ON_THE_SERVER = [line for line in commands() if "localhost:8080" in line]


@pytest.mark.parametrize("command", ON_THE_SERVER)
def test_command_against_the_server(command: str, served: str, minilm_dir: Path) -> None:
    runnable = command.replace("http://localhost:8080", served).replace("localhost:8080", served)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", runnable], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode in (0, 23), done.stderr  # 23: `head` has enough
    assert done.stdout.strip()
    assert '"error"' not in done.stdout


@pytest.mark.parametrize(
    "command",
    [line for line in commands() if not line.startswith(IN_BACKGROUND) and line not in ON_THE_SERVER],
)
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
def test_python_blocks(page: Path, environment: dict[str, str], request: pytest.FixtureRequest) -> None:
    for block in blocks(page, "python"):
        if "HEEDFUL_URL" in block:
            environment["HEEDFUL_URL"] = request.getfixturevalue("served")
        done = subprocess.run(
            [sys.executable, "-c", block], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


@pytest.mark.skipif(shutil.which("node") is None, reason="JavaScript needs Node.js")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "js")], ids=lambda page: page.name)
def test_javascript_blocks(page: Path, served: str) -> None:
    for block in blocks(page, "js"):
        done = subprocess.run(
            ["node", "--input-type=module", "-e", block],
            env={**os.environ, "HEEDFUL_URL": served}, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


def test_the_readme_gets_to_the_point() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert lines.index("make demo") < 15
    assert len(lines) <= 170


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
