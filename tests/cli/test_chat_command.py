"""The command `heedful chat`: what it refuses, in a pipe, and on a terminal with the real model."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest
import typer
from typer.testing import CliRunner

import heedful
from heedful.cli.chat import chat
from heedful.cli.history import History
from heedful.errors import HeedfulError, HistoryError, TemplateError
from heedful.testing import make_tiny_model


def invoke(*arguments: str, model: str = "no-such-model-anywhere") -> tuple[HeedfulError, str]:
    """The error that it ends with, and what was on stderr; but for a given model, it comes before one is looked for."""
    app = typer.Typer()
    app.command()(chat)
    result = CliRunner().invoke(app, ["-m", model, *arguments], input="Hi\n")
    assert isinstance(result.exception, HeedfulError), result.exception
    assert result.stdout == ""
    return result.exception, result.stderr


@pytest.fixture
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--temperature", "-1"], "temperature: must be between"),
        (["--top-p", "0"], "top_p: must be above 0"),
        (["--max-tokens", "0"], "max_tokens: must be at least 1"),
        (["12"], "ID: '12' comes without --resume"),
        (["--resume", "x1"], "ID: 'x1' is neither a number nor last"),
        (["--resume", "²"], "is neither a number nor last"),
        (["--resume", "--no-history"], "--resume: needs the history"),
        (["--resume"], "--resume: no chat is kept yet"),
        (["--resume", "last"], "--resume: no chat is kept yet"),
        (["--resume", "7"], "--resume: there is no chat 7"),
        (["--system", "\udce9"], "--system: is not UTF-8"),
        ([], "no-such-model-anywhere"),
    ],
)
def test_what_is_refused(arguments: list[str], says: str, data_folder: Path) -> None:
    assert says in invoke(*arguments)[0].message


def test_a_base_model_is_refused_with_what_to_do_instead(data_folder: Path, tmp_path: Path) -> None:
    model = str(make_tiny_model(tmp_path / "tiny", chat=False))
    error, _ = invoke(model=model)
    assert isinstance(error, TemplateError)
    assert f"heedful generate -m {model}" in error.remedy


def test_a_history_that_cannot_open_is_a_warning(data_folder: Path) -> None:
    (data_folder / "history.db").write_text("no database " * 100)
    error, warned = invoke()
    assert "no-such-model-anywhere" in error.message
    assert warned.count("This chat will not be kept") == 1
    assert "not a database" in warned


def test_a_history_that_cannot_open_cannot_be_resumed(data_folder: Path) -> None:
    (data_folder / "history.db").write_text("no database " * 100)
    assert isinstance(invoke("--resume")[0], HistoryError)


def test_importing_it_imports_nothing_heavy() -> None:
    heavy = {"numpy", "torch", "sqlite3", "readline", "termios", "heedful.engine.llm", "heedful.cli.chat_loop"}
    code = (
        "import sys, typer; before = set(sys.modules); import heedful.cli.chat\n"
        f"print(sorted({heavy!r} & (set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# The real thing


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(Path(heedful.__file__).parents[1]),
        "HEEDFUL_DATA": str(tmp_path),
        "TERM": "xterm",
        "LC_ALL": "C.UTF-8",
        "INPUTRC": os.devnull,
    }


def test_the_command_in_a_pipe(environment: dict[str, str], tmp_path: Path) -> None:
    model = str(make_tiny_model(tmp_path / "tiny"))
    command = [sys.executable, "-m", "heedful", "chat", "-m", model, "--max-tokens", "6", "--seed", "1"]
    asked = "What is this?\n/system Be brief.\nAnd this?\n"
    done = subprocess.run(command, input=asked.encode(), capture_output=True, env=environment, check=True)
    history = History.open(tmp_path / "history.db")
    stored, messages = history.chat(1), history.messages(1)
    history.close()
    assert stored is not None
    assert (stored.model, stored.system) == (model, "Be brief.")
    first, second = messages[1].content, messages[3].content
    assert [messages[0].content, messages[2].content] == ["What is this?", "And this?"]
    assert done.stdout.decode() == f"{first}\nsystem: Be brief.\n{second}\n"
    assert "visits" not in done.stderr.decode()


def test_guessing_ahead_says_the_same_and_is_counted(environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "heedful", "chat", "-m", str(make_tiny_model(tmp_path / "tiny"))]
    command += ["--temperature", "0", "--max-tokens", "60", "--receipts"]
    plain, guessing = (
        subprocess.run(
            [*command, *more], input=b"one two three\n" * 2, capture_output=True, env=environment, check=True
        )
        for more in ([], ["--speculate"])
    )
    assert guessing.stdout == plain.stdout
    assert b"guesses right" in guessing.stderr
    assert b"guesses right" not in plain.stderr
    assert b"nanobind" not in plain.stderr + guessing.stderr  # it tells of kernels' objects that outlive Python


def test_a_terminal_with_the_real_model(smollm2_path: Path, environment: dict[str, str]) -> None:
    arguments = ["-m", "heedful", "chat", "-m", str(smollm2_path), "--temperature", "0", "--max-tokens", "500"]
    child = pexpect.spawn(
        sys.executable, arguments, env=environment, encoding="utf-8", timeout=60, dimensions=(24, 200)
    )
    child.logfile_read = io.StringIO()
    set_region, reset_region = "\x1b[1;23r", "\x1b[r"
    child.expect_exact("> ")
    child.send("What is the capital of France? Answer in one word.\r")
    child.expect_exact(set_region)
    child.expect(r"\x1b\[24;1H.*?\d+ tokens.*? visits")
    child.expect_exact(reset_region)
    child.expect(r"\d+ in \(0 cached\) · (\d+) out")
    child.expect_exact("> ")
    child.send("Write a very long story about a lighthouse keeper.\r")
    child.expect_exact(set_region)
    child.expect(r"\d+ tokens · \d+\.\d tok/s")
    child.send("\x03")
    child.expect_exact(reset_region)
    child.expect_exact("stopped; what had come is kept")
    child.expect(r"· (\d+) out")
    assert 2 <= int(child.match[1]) < 500
    child.expect_exact("> ")
    child.send("What is two plus two?\r")
    child.expect_exact(reset_region)
    child.expect(r"· (\d+) out")
    child.expect_exact("> ")
    child.send("/cost\r")
    child.expect(r"answers +3 +3\r")
    child.expect(r"visits +([\d,]+) +([\d,]+)\r")
    assert child.match[1] == child.match[2]
    child.send("/quit\r")
    child.expect_exact("heedful chat --resume 1")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert re.findall(r"\x1b\[[\d;]*r", child.logfile_read.getvalue()) == [set_region, reset_region] * 3
