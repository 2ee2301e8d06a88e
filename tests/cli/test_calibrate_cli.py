"""`heedful calibrate`: what it prints, what it keeps, and that `heedful decide` takes what was kept."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from heedful import LLM
from heedful.cli.main import run
from heedful.decide import Likelihood
from heedful.decide.calibrate import softmax
from heedful.decide.load import find_decider
from heedful.decide.question import questions_from_json
from heedful.testing import make_tiny_model

QUESTIONS = {"team": {"type": "choice", "criteria": {"a": None, "bb": None}}, "rude": {"type": "noul"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def rows(model: str) -> list[dict[str, Any]]:
    """Labels drawn from the model's own distribution at temperature 3."""
    decider, rng = Likelihood(LLM(model)), random.Random(0)
    questions, made = questions_from_json(QUESTIONS), []
    for number in range(60):
        state = f"row {number}"
        drawn = [softmax(logits, 3.0).tolist() for logits in decider.logits(state, questions)]
        team, rude = (rng.choices(range(2), shares)[0] for shares in drawn)
        made.append(
            {"state": state, "questions": QUESTIONS, "expected": {"team": ["a", "bb"][team], "rude": bool(rude)}}
        )
    return made


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))


def written(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def kept_in(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "data").rglob("*.json"))


def noul(model: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> float:
    capsys.readouterr()
    assert run(["decide", "-m", model, "--text", "row 1", "--noul", "rude: ?", "--json", *arguments]) == 0
    found: float = json.loads(capsys.readouterr().out)["answers"]["rude"]["noul"]
    return found


def test_what_is_kept_is_what_decide_takes(
    model: str, rows: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = noul(model, capsys)
    data = written(tmp_path / "rows.jsonl", rows)
    assert run(["calibrate", "-m", model, "--data", data, "--json"]) == 0
    done = capsys.readouterr()
    report = json.loads(done.out)
    (kept,) = kept_in(tmp_path)
    assert done.err == f"kept in {kept}\n"
    assert report["saved"] == str(kept)
    assert kept.stem == report["calibration"]["model_sha256"] == find_decider(model).sha256()
    fitted, held_out = sum(report["fitted"].values()), report["measured"]["all"]["after"]["rows"]
    assert (fitted + held_out, report["fitted"]["score"]) == (120, 0)
    assert 20 <= held_out <= 54
    temperature = report["calibration"]["temperature"]["noul"]
    assert 1.5 < temperature < 5
    (logits,) = Likelihood(LLM(model)).logits(
        "row 1", questions_from_json({"rude": {"type": "noul", "instructions": "?"}})
    )
    assert noul(model, capsys) == pytest.approx(softmax(logits, temperature)[1], abs=1e-9)
    assert noul(model, capsys, "--calibration", "none") == plain == pytest.approx(softmax(logits)[1], abs=1e-9)
    assert noul(model, capsys, "--orders", "2") != noul(model, capsys)


def test_people_get_tables(
    model: str, rows: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit, held = written(tmp_path / "fit.jsonl", rows[:40]), written(tmp_path / "held.jsonl", rows[40:])
    out = tmp_path / "own.json"
    arguments = ["calibrate", "-m", model, "--data", fit, "--validate", held, "--error", "0.4", "--out", str(out)]
    assert run(arguments) == 0
    done = capsys.readouterr()
    lines = done.out.splitlines()
    assert lines[0] == f"{model}: fitted on 80 questions, measured on 40 others"
    assert lines[2].split() == ["questions", "number", "accuracy", "NLL", "Brier", "ECE"]
    assert [line.split()[:3] for line in lines[3:9]] == [
        [kind, when, count] for kind, count in (("all", "40"), ("choice", "20"), ("noul", "20"))
        for when in ("before", "after")
    ]  # fmt: skip
    assert "Temperatures: choice " in done.out
    assert "noul: take answers of probability 0." in done.out
    assert "for at most 40.0% errors. Held out: " in done.out
    assert done.err == f"kept in {out}\n"
    assert kept_in(tmp_path) == []  # a file is written instead
    assert json.loads(out.read_text())["report"]["wanted_error"] == 0.4
    assert noul(model, capsys, "--calibration", str(out)) != noul(model, capsys)
    other = str(make_tiny_model(tmp_path / "other", seed=1))
    assert run(["decide", "-m", other, "--text", "x", "--noul", "a: ?", "--calibration", str(out)]) == 2
    assert "belongs to another decider" in capsys.readouterr().err


def test_what_makes_it_worse_is_not_kept_unless_that_is_asked_for(
    model: str, rows: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fitted on labels that are always what the model finds likeliest, checked on the true ones."""
    decider, questions = Likelihood(LLM(model)), questions_from_json({"rude": {"type": "noul"}})
    sure = []
    for row in rows[:30]:
        (logits,) = decider.logits(row["state"], questions)
        label = logits[1] > logits[0]
        sure.append({"state": row["state"], "questions": {"rude": {"type": "noul"}}, "expected": label})
    wrong = [{**row, "expected": not row["expected"]} for row in sure]
    data, held = written(tmp_path / "sure.jsonl", sure), written(tmp_path / "wrong.jsonl", wrong)
    arguments = ["calibrate", "-m", model, "--data", data, "--validate", held]
    assert run(arguments) == 0
    assert capsys.readouterr().err == "heedful: not kept, for it is worse on the rows held out; --save keeps it\n"
    assert kept_in(tmp_path) == []
    assert run([*arguments, "--save"]) == 0
    assert len(kept_in(tmp_path)) == 1


def test_a_row_that_is_too_long_is_left_out(
    model: str, rows: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = written(tmp_path / "rows.jsonl", [{**rows[0], "state": "x" * 600}, *rows[:20]])
    assert run(["calibrate", "-m", model, "--data", data, "--no-save"]) == 0
    done = capsys.readouterr()
    assert done.err.startswith("heedful: 1 row left out, the first because the prompt has 6")
    assert kept_in(tmp_path) == []


@pytest.mark.parametrize(
    ("lines", "arguments", "problem"),
    [
        (["{"], [], "--data: line 1: row: is not JSON"),
        (["", '{"state": "x", "questions": {"a": {"type": "noul"}}, "label": 3}'], [], "line 2: expected: 3 does not"),
        ([], [], "rows.jsonl has no rows"),
        (["\xff"], [], "line 1: row: is not UTF-8"),
        (None, ["--validate", "1.5"], "--validate: must be a share of the rows"),
        (None, ["--validate", "nowhere.jsonl"], "--validate: nowhere.jsonl cannot be read"),
        (None, ["--error", "0"], "--error: must be more than 0"),
        (None, ["--validate", "0.000001"], "there is no question held out"),
        (None, ["-m", "jev"], "jev sends probabilities, and no logits"),
        (None, ["-m", "nobody"], "no model is called 'nobody'"),
        (None, ["--out", "/dev/null/c.json"], "--out: /dev/null/c.json cannot be written"),
        (None, ["--out", "-"], "--out: must be a file"),
    ],
)  # fmt: skip
def test_wrong_things_are_named(
    model: str, rows: list[dict[str, Any]], lines: list[str] | None, arguments: list[str], problem: str,
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "rows.jsonl"
    if lines is None:
        written(path, rows[:10])
    else:
        path.write_bytes("".join(f"{line}\n" for line in lines).encode("latin-1"))
    assert run(["calibrate", "-m", model, "--data", str(path), *arguments]) in (1, 2)
    assert problem in capsys.readouterr().err
