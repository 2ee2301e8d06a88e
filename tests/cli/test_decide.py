"""`heedful decide`, run as a program: what it asks, what it prints, and how wrong things are named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from heedful import LLM
from heedful.decide import Choice, Likelihood, Noul, Score
from heedful.testing import make_tiny_model

STATE = {"ticket": "I was charged twice, 환불해 주세요"}
CHOICE = "team: Who answers? billing, returns=wants money back, other"
SCORE = "anger: calm | annoyed | furious"
NOUL = "urgent: Is this urgent?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), context_len=2048))


def heedful(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "heedful", "decide", *arguments]
    done = subprocess.run(command, input=stdin.encode(), capture_output=True, timeout=120, check=False)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.fixture(scope="module")
def expected(model: str) -> dict[str, Any]:
    """By the Python face."""
    questions = [
        Choice("team", {"billing": None, "returns": "wants money back", "other": None}, "Who answers?"),
        Score("anger", ["calm", "annoyed", "furious"]),
        Noul("urgent", "Is this urgent?"),
    ]
    return Likelihood(LLM(model)).decide(STATE, questions).to_dict()


def test_json_is_the_contracts_answer_with_the_receipt(model: str, expected: dict[str, Any]) -> None:
    state = json.dumps(STATE)
    done = heedful("-s", "-", "--choice", CHOICE, "--score", SCORE, "--noul", NOUL, "-m", model, "--json", stdin=state)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    receipt = found.pop("receipt")
    assert found == expected
    assert (receipt["questions"], receipt["sequences"]) == (3, 8)
    assert receipt["cached_tokens"] > 0
    assert receipt["visits"]["dense"] == receipt["visits"]["total"] + sum(receipt["visits"]["saved"].values())


def test_people_get_lines(model: str, expected: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps(STATE))
    questions = {"urgent": {"type": "noul", "instructions": "Is this urgent?"}}
    (tmp_path / "questions.json").write_text(json.dumps(questions))
    done = heedful(
        *("--state", str(tmp_path / "state.json"), "--questions", str(tmp_path / "questions.json")),
        *("--score", SCORE, "-m", model, "--receipt"),
    )
    assert done.returncode == 0, done.stderr
    anger, urgent = expected["answers"]["anger"], expected["answers"]["urgent"]["noul"]
    assert done.stdout.splitlines() == [
        f"urgent: {'yes' if urgent > 0.5 else 'no'}, probability of yes {urgent:.3f}",
        f"anger: {anger['score']:.2f}, confidence {anger['confidence']:.3f}",
        *(f"  {anger['probabilities'][i]:.3f}  {i}  {text}" for i, text in anger["legend"].items()),
    ]
    assert done.stderr.startswith("2 questions in 5 sequences · ")


def test_text_that_is_no_object_stays_text(model: str) -> None:
    for text in ("[not JSON", "3", "plain words"):
        done = heedful("-s", "-", "--noul", NOUL, "-m", model, "--json", stdin=text)
        expected = Likelihood(LLM(model)).decide(text, [Noul("urgent", "Is this urgent?")]).to_dict()["answers"]
        assert json.loads(done.stdout)["answers"] == expected


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "questions: there are none"),
        (["--choice", "nothing"], "choice: 'nothing' has no name"),
        (["--noul", NOUL, "--noul", NOUL], "two are called 'urgent'"),
        (["--questions", "/nowhere.json"], "--questions: /nowhere.json cannot be read"),
        (["--questions", "-"], "--questions: is not JSON"),
        (["--noul", NOUL, "--orders", "0"], "orders: must be a whole number from 1 to 16"),
    ],
)
def test_wrong_things_are_named(model: str, arguments: list[str], problem: str) -> None:
    done = heedful("-s", "-", "-m", model, *arguments, stdin="a state")
    assert done.returncode == 2
    assert problem in done.stderr
    assert done.stdout == ""


def test_json_of_names_that_no_utf8_can_write(model: str, tmp_path: Path) -> None:
    """Half of a surrogate pair may stand in JSON; a byte order mark before it may too."""
    names = {"\ud800": {"type": "choice", "criteria": {"\udfff": None, "é": None}}}
    (tmp_path / "questions.json").write_text(json.dumps(names), encoding="utf-8-sig")
    done = heedful("-t", "x", "--questions", str(tmp_path / "questions.json"), "-m", model, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)["answers"]["\ud800"]
    assert list(answer["probabilities"]) == ["\udfff", "é"]


def test_an_empty_name_is_no_model() -> None:
    done = heedful("-t", "x", "--noul", NOUL, "-m", "")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no model is called ''" in done.stderr


def test_a_server_that_is_not_there() -> None:
    done = heedful("-s", "-", "--noul", NOUL, "-m", "http://u:secret@127.0.0.1:1", stdin="x")
    assert done.returncode == 2
    assert "url: must carry no user" in done.stderr
    assert "secret" not in done.stderr
