"""`heedful runs`: what is listed, what is compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heedful.cli.main import run
from heedful.train.loop import complete
from heedful.train.settings import TrainSettings, changed


def write_run(folder: Path, losses: list[float], **settings: float) -> Path:
    """A run as its files tell of it; without a model."""
    folder.mkdir(parents=True)
    values = {name.replace("__", "."): value for name, value in settings.items()}
    told = complete(changed(TrainSettings(), {"run.threads": 1, "run.steps": 60} | values))
    (folder / "run.json").write_text(json.dumps({"settings": told.as_dict()}))
    rows = [{"step": i + 1, "loss": loss, "tokens": 100, "visits": 3000} for i, loss in enumerate(losses)]
    more = [{"step": len(losses), "judged_by": "bits_per_byte", "bits_per_byte": bits} for bits in (2.5, 2.25)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows + more) + '{"step": 9')
    return folder


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "a", [float(n) for n in range(60, 0, -1)])
    write_run(tmp_path / "runs" / "b", [3.0] * 40, optim__lr=0.5)
    return tmp_path / "runs"


def test_all_runs_of_a_folder_are_listed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "no_run").mkdir()
    assert run(["runs"]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split()[:3] == ["run", "steps", "tokens"]
    cells = [row.split() for row in rows]
    assert cells[0] == ["runs/a", "60/60", "6", "k", "180", "k", "2.0000", "2.2500", "bits_per_byte", "-", "none"]
    assert cells[1] == ["runs/b", "40/60", "4", "k", "120", "k", "3.0000", "2.2500", "bits_per_byte", "-", "none"]


def test_named_runs_are_compared(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", "runs/a", "runs/b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["differences"] == {"optim.lr": [0.003, 0.5]}
    assert found["losses"][0] == {"steps": "1-4", "losses": [58.5, 3.0]}
    assert found["losses"][-1] == {"steps": "37-40", "losses": [22.5, 3.0]}
    assert run(["runs", "runs/a", "runs/b"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["setting", "a", "b"] in lines
    assert ["optim.lr", "0.003", "0.5"] in lines
    assert lines[-1] == ["37-40", "22.5000", "3.0000"]


def test_where_no_run_is(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "empty").mkdir()
    for folder, message in (("runs/empty", "no training run is in runs/empty"), ("nowhere", "nowhere is no folder")):
        assert run(["runs", folder]) == 1
        assert message in capsys.readouterr().err


def test_a_damaged_run_is_named(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "a" / "metrics.jsonl").write_text("{\n{}\n")
    assert run(["runs", "runs/a"]) == 1
    assert "line 1 of runs/a/metrics.jsonl is no JSON" in capsys.readouterr().err


def test_a_report_of_all_that_are_named(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert run(["runs", "runs/a", "--html", "--open"]) == 0
    assert capsys.readouterr().out.strip() == (runs / "a" / "report.html").as_uri()
    assert opened == [], "without a screen"
    monkeypatch.setenv("DISPLAY", ":0")
    assert run(["runs", "runs/a", "runs/b", "--html", "--open"]) == 0
    assert opened == [(runs / "report.html").as_uri()]
    capsys.readouterr()
    assert run(["runs", "--html", "--out", "all.html"]) == 0
    page = Path("all.html").read_text(encoding="utf-8")
    assert "<h1>a · b</h1>" in page
    for wrong, message in (
        (["--open"], "--open: belongs to --html"),
        (["--html", "--out", "no/a.html"], "no is no folder"),
    ):
        assert run(["runs", *wrong]) == 2
        assert message in capsys.readouterr().err
