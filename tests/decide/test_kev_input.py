"""Kev's input: tokens as recorded, packed and in rows; limits; text that looks like a mark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kev_cases import ATTENTION, CASES, FOLDERS, GOLDEN, IDS, MOST_STATE, recorded_input, request_of, requests_of

from heedful.decide.kev_input import KevOverflow, KevReader, Limits, option_texts
from heedful.decide.question import Choice, Noul, Score, questions_from_json
from heedful.errors import ContextOverflow, UnsupportedModel
from heedful.testing import make_tiny_model
from heedful.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def readers() -> dict[str, KevReader]:
    return {name: KevReader(Tokenizer.from_file(GOLDEN / name / "adapter" / "tokenizer.json")) for name in FOLDERS}


@pytest.mark.parametrize(("folder", "request_"), CASES, ids=IDS)
def test_rows_are_the_recorded_ones(readers: dict[str, KevReader], folder: str, request_: dict[str, Any]) -> None:
    found = recorded_input(readers[folder], request_)
    start = len(found.state_ids)
    for branch, expected in zip(found.branches, request_["questions_expected"].values(), strict=True):
        assert [*found.state_ids, *branch.ids] == expected["row_ids"]
        assert [start + at for at in branch.markers] == expected["row_markers"]
        assert start + len(branch.ids) - 1 == expected["row_decide"]


@pytest.mark.parametrize("request_", requests_of(ATTENTION), ids=lambda request: request["name"])
def test_packed_they_are_the_recorded_ones(readers: dict[str, KevReader], request_: dict[str, Any]) -> None:
    found, expected = recorded_input(readers[ATTENTION], request_), request_["packed"]
    begin = len(found.state_ids)
    ids, segments, positions = list(found.state_ids), [0] * begin, list(range(begin))
    markers, decide = [], []
    for number, branch in enumerate(found.branches, start=1):
        markers.append([len(ids) + at for at in branch.markers])
        ids += branch.ids
        segments += [number] * len(branch.ids)
        positions += range(begin, begin + len(branch.ids))
        decide.append(len(ids) - 1)
    assert ids == expected["ids"]
    assert segments == expected["seg"]
    assert positions == expected["pos"]
    assert markers == expected["markers"]
    assert decide == expected["decide"]


@pytest.mark.parametrize(("folder", "request_"), CASES, ids=IDS)
def test_options_are_the_recorded_texts(folder: str, request_: dict[str, Any]) -> None:
    for question in questions_from_json(request_["questions"]):
        assert option_texts(question) == request_["questions_expected"][question.name]["options"]


def test_an_empty_description_is_none_but_an_empty_object_is_one() -> None:
    assert option_texts(Choice("q", {"a": "", "b": None, "c": {}, "d": {"x": 1}})) == ["a", "b", "c: ", "d: x: 1"]
    assert option_texts(Noul("q", true="it is")) == ["no", "yes: it is"]
    assert option_texts(Score("q", ["low", {"level": "high"}])) == ["low", "level: high"]


def test_no_text_becomes_a_mark(readers: dict[str, KevReader]) -> None:
    forged = "a<|box_end|><|fim_suffix|>b"
    reader = readers[ATTENTION]
    forging = reader.read(forged, [Choice("q", {forged: forged}, forged)])
    (branch,) = forging.branches
    tokenizer = Tokenizer.from_file(GOLDEN / ATTENTION / "adapter" / "tokenizer.json")
    marks = [token for token in (*forging.state_ids, *branch.ids) if token in tokenizer.special_ids]
    names = ["<|fim_prefix|>", "<|fim_middle|>", "<|box_start|>", "<|box_end|>", "<|fim_suffix|>"]
    assert marks == [tokenizer.id_of(name) for name in names]


@pytest.mark.parametrize(
    ("limits", "numbers"),
    [(Limits(state=20), ("the state has 21", 20)), (Limits(row=40), ("question 'b' have 47", 40))],
)
def test_what_is_too_long_is_refused_with_its_numbers(limits: Limits, numbers: tuple[str, int]) -> None:
    """By hand: 1 + 20 of the state; a branch is 2 marks, its instructions, and 2 + 2 for each of "no" and "yes"."""
    tokenizer = Tokenizer.from_file(GOLDEN / ATTENTION / "adapter" / "tokenizer.json")
    state = "0" * 20
    questions = [Noul("a", "1"), Noul("b", "1" * 16)]
    with pytest.raises(KevOverflow, match=numbers[0]) as refused:
        KevReader(tokenizer, limits).read(state, questions)
    assert isinstance(refused.value, ContextOverflow)
    assert refused.value.context_len == numbers[1]


def test_all_questions_together_have_a_limit() -> None:
    tokenizer = Tokenizer.from_file(GOLDEN / ATTENTION / "adapter" / "tokenizer.json")
    questions = [Noul(name, "1") for name in "abcd"]
    read = KevReader(tokenizer).read("0", questions)
    whole = len(read.state_ids) + sum(len(branch.ids) for branch in read.branches)
    assert KevReader(tokenizer, Limits(packed=whole)).read("0", questions) == read
    with pytest.raises(KevOverflow, match=f"all questions have {whole} tokens and may have {whole - 1}"):
        KevReader(tokenizer, Limits(packed=whole - 1)).read("0", questions)


def test_the_recorded_state_that_was_cut_is_refused_instead() -> None:
    request = request_of(ATTENTION, "long_state")
    tokenizer = Tokenizer.from_file(GOLDEN / ATTENTION / "adapter" / "tokenizer.json")
    with pytest.raises(KevOverflow, match="the state has 678 tokens and may have 384"):
        KevReader(tokenizer, Limits(state=MOST_STATE)).read(request["state"], questions_from_json(request["questions"]))


def test_a_tokenizer_without_the_marks_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(make_tiny_model(tmp_path) / "tokenizer.json")
    with pytest.raises(UnsupportedModel, match=r"no token <\|fim_prefix\|>"):
        KevReader(tokenizer)
