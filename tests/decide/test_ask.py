"""The short way to ask: plain values stand for the same questions as the long way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import heedful
from heedful import LLM
from heedful.decide import Choice, Decider, Likelihood, Noul, Score
from heedful.decide.ask import question_from
from heedful.errors import BadParameter, UnknownModel
from heedful.testing import make_tiny_model

PLAIN: list[tuple[Any, Any]] = [
    ("Is this urgent?", Noul("q", "Is this urgent?")),
    ("The writer is angry", Noul("q", "The writer is angry")),
    (["billing", "returns"], Choice("q", ["billing", "returns"])),
    (("billing", "returns"), Choice("q", ["billing", "returns"])),
    ({"billing": "owns invoices", "returns": None}, Choice("q", {"billing": "owns invoices", "returns": None})),
    ("calm | annoyed|furious", Score("q", ["calm", "annoyed", "furious"])),
    (" How upset? calm | a: b ", Score("q", ["calm", "a: b"], "How upset?")),
    (
        {"type": "choice", "instructions": "Who?", "criteria": {"a": None, "b": {"c": 1}}},
        Choice("q", {"a": None, "b": {"c": 1}}, "Who?"),
    ),
    ({"type": "score", "criteria": ["low", "high"]}, Score("q", ["low", "high"])),
    ({"type": "noul", "criteria": {"true": "yes it does"}}, Noul("q", None, "yes it does")),
    (Choice("q", ["a"]), Choice("q", ["a"])),
]


@pytest.mark.parametrize(("plain", "question"), PLAIN)
def test_plain_values_stand_for_questions(plain: Any, question: Any) -> None:
    assert question_from("q", plain) == question
    assert question_from("a: name", "calm | b") == Score("a: name", ["calm", "b"])


@pytest.mark.parametrize(
    "plain",
    [3, None, True, [], {}, ["a", "a"], [1], {"type": "maybe"}, {"type": None}, {"type": "choice"}, "a || b", "x? | b",
     "Does the log say a | b?", Noul("other", "?"), {"a": 3}, object()],
)  # fmt: skip
def test_values_that_stand_for_none(plain: Any) -> None:
    with pytest.raises(BadParameter):
        question_from("q", plain)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("chat"), context_len=1024))


@pytest.fixture(autouse=True)
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path))


def test_asking_gives_the_models_answers(folder: str) -> None:
    decider = heedful.Decider(folder, orders=2, threads=1)
    assert decider.name == folder
    found = decider.ask("I was charged twice", {"team": ["billing", "returns"], "urgent": "Is this urgent?"})
    long = Likelihood(LLM(folder), orders=2)
    questions = [Choice("team", ["billing", "returns"]), Noul("urgent", "Is this urgent?")]
    expected = long.decide("I was charged twice", questions)
    assert found.to_dict() == expected.to_dict()
    assert Decider(long).ask("I was charged twice", questions).to_dict() == expected.to_dict()
    assert Decider(long).name == folder


def test_what_is_no_set_of_questions(folder: str) -> None:
    decider = Decider(folder)
    for questions in ({}, [], "Is it?", 3, [Noul("a"), Noul("a")]):
        with pytest.raises(BadParameter):
            decider.ask("x", questions)  # type: ignore[arg-type]
    with pytest.raises(BadParameter, match="means nothing"):
        Decider("http://127.0.0.1:1", orders=2)


def test_options_of_a_decider_that_is_there_already_are_refused(folder: str) -> None:
    there = Likelihood(LLM(folder))
    for options in ({"orders": 2}, {"truncate": True}, {"weights": "q8"}, {"calibration": None}, {"threads": 1}):
        with pytest.raises(BadParameter, match="is a decider already"):
            Decider(there, **options)  # type: ignore[arg-type]


def test_no_name_is_not_the_default_one() -> None:
    with pytest.raises(UnknownModel):
        Decider("")
