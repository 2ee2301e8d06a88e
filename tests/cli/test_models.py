"""`heedful models`: the list, removal, and paths for scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from heedful.cli import models
from heedful.cli.models import app
from heedful.errors import SourceError, UnknownModel, UsageError
from heedful.weights.model_cache import (
    MODEL_FOLDER,
    ModelRecord,
    StoredFile,
    finished_folder,
    put_in_cache,
    work_folder,
    write_synced,
)
from heedful.weights.source_names import parse_source

HUB_NAME = "hf:some-org/some-model@v1"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Holds the encoder among the aliases, and a model of the hub."""
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    for name, licence, entry in (("minilm", "Apache-2.0", ""), (HUB_NAME, None, "w.gguf")):
        files = (StoredFile("w.gguf", 5000, "00"),)
        with work_folder() as work:
            write_synced(finished_folder(work) / MODEL_FOLDER / "w.gguf", [bytes(5000)])
            source = str(parse_source(name))
            put_in_cache(work, ModelRecord(name, source, licence, None, "2026-01-01", entry, files), False)
    return tmp_path / "cache" / "models"


def listed() -> dict[str, dict[str, object]]:
    return {row["name"]: row for row in json.loads(CliRunner().invoke(app, ["--json"]).stdout)}


def test_the_list_has_aliases_first_then_what_else_is_fetched() -> None:
    rows = listed()
    assert list(rows) == ["smollm2", "gemma3-270m", "minilm", HUB_NAME]
    assert [row["kind"] for row in rows.values()] == ["chat", "base", "encoder", None]
    assert [row["fetched"] for row in rows.values()] == [False, False, True, True]
    assert [row["size_bytes"] for row in rows.values()] == [98_362_432, 253_113_024, 5000, 5000]
    assert [row["licence"] for row in rows.values()] == ["Apache-2.0", "Gemma Terms of Use", "Apache-2.0", None]


def test_the_list_has_the_path_of_what_is_fetched(cache: Path) -> None:
    rows = listed()
    assert rows["smollm2"]["path"] is None
    assert rows["minilm"]["path"] == str(cache / "minilm" / "model")
    assert Path(str(rows[HUB_NAME]["path"])).read_bytes() == bytes(5000)


def test_a_pipe_gets_each_model_on_one_line(cache: Path) -> None:
    lines = CliRunner().invoke(app, []).stdout.splitlines()
    assert len(lines) == 5
    assert lines[0].split() == ["name", "kind", "size", "licence", "state", "path"]
    assert lines[1].split() == ["smollm2", "chat", "98.4", "MB", "Apache-2.0", "not", "fetched"]
    assert lines[3].split() == ["minilm", "encoder", "5.0", "kB", "Apache-2.0", "fetched", str(cache / "minilm/model")]


def test_a_narrow_terminal_gets_the_folder_below_the_list(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    models._print_table(models.model_rows())
    shown = capsys.readouterr().out
    assert "path" not in shown.splitlines()[0]
    assert f"Fetched models lie in {cache};" in shown


def test_a_damaged_model_is_listed_as_such(cache: Path) -> None:
    (cache / "minilm" / "model" / "w.gguf").write_bytes(b"cut")
    assert listed()["minilm"]["damaged"] is True
    assert "damaged" in CliRunner().invoke(app, []).stdout


def test_removal_says_what_went(cache: Path) -> None:
    result = CliRunner().invoke(app, ["remove", "minilm", HUB_NAME, "-y"])
    assert result.stdout.splitlines() == ["removed minilm (5.0 kB)", f"removed {HUB_NAME} (5.0 kB)"]
    assert list(cache.iterdir()) == []


def test_removal_of_an_unknown_model_names_the_nearest() -> None:
    error = CliRunner().invoke(app, ["remove", "mini-lm", "-y"]).exception
    assert isinstance(error, UnknownModel)
    assert error.nearest == ["minilm"]


def test_removal_that_nobody_is_there_to_confirm_is_refused(cache: Path) -> None:
    error = CliRunner().invoke(app, ["remove", "minilm"]).exception
    assert isinstance(error, UsageError)
    assert "-y" in error.remedy
    assert (cache / "minilm").exists()


@pytest.mark.parametrize(("answer", "is_kept"), [("y\n", False), ("n\n", True)])
def test_removal_asks_on_a_terminal(cache: Path, answer: str, is_kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_somebody_can_answer", lambda: True)
    result = CliRunner().invoke(app, ["remove", "minilm"], input=answer)
    assert result.exit_code == 0
    assert "Remove minilm (5.0 kB)?" in result.stderr
    assert (cache / "minilm").exists() == is_kept


def test_the_path_alone_for_scripts(cache: Path) -> None:
    assert CliRunner().invoke(app, ["path", "minilm"]).stdout == f"{cache}/minilm/model\n"


def test_the_path_of_what_is_not_fetched_is_an_error_with_the_way_to_it() -> None:
    error = CliRunner().invoke(app, ["path", "smollm2"]).exception
    assert isinstance(error, SourceError)
    assert "heedful pull smollm2" in error.remedy
