"""Laya against answers recorded from the laya package: tokens, logits, probabilities, refusals; and alone as together.

What is not compared: custom labels of a noul, which a question here has not, and the package's own confidences.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.decide import Choice, Noul, Score
from heedful.decide.calibrate import Calibration
from heedful.decide.laya import Laya
from heedful.decide.laya_cost import option_visits
from heedful.decide.laya_input import Dropped, LayaPacker, QuestionTooLong
from heedful.decide.question import Question, questions_from_json
from heedful.engine.pooled import STEP_TOKENS
from heedful.errors import BadLogits, BadParameter, ContextOverflow
from heedful.models.laya_config import LayaLayout, LayaSequence

GOLDEN = Path(__file__).parent.parent / "golden" / "decisions" / "laya"
LAYOUTS = ("sequential", "parallel")
RECORDED = {layout: json.loads((GOLDEN / f"{layout}.json").read_text()) for layout in LAYOUTS}
REQUESTS = [(layout, request["name"]) for layout in LAYOUTS for request in RECORDED[layout]["requests"]]
LOADED: dict[tuple[str, bool], Laya] = {}
TEAM = Choice("team", {"billing": "owns invoices", "returns": None, "other": "none of these"}, "Who owns this?")
ANGER = Score("anger", ["calm", "annoyed", "furious"], "How upset is the writer?")
REFUND = Noul("refund", "Does the writer want money back?")
STATE = "I was charged twice for order 88, and nobody answers the phone."


def laya(layout: str, *, truncate: bool = False) -> Laya:
    if (layout, truncate) not in LOADED:
        LOADED[layout, truncate] = Laya.load(str(GOLDEN / layout), truncate=truncate, threads=1)
    return LOADED[layout, truncate]


def request_of(layout: str, name: str) -> dict[str, Any]:
    (found,) = [one for one in RECORDED[layout]["requests"] if one["name"] == name]
    return found  # type: ignore[no-any-return]


def questions_of(request: dict[str, Any]) -> tuple[Question, ...]:
    """The recorded questions that can be asked here; the package takes lists and numbers for names, and numbers for
    levels, and shows them as text."""
    asked = {}
    for name, question in request["questions"].items():
        criteria = question.get("criteria")
        if question["type"] == "choice" and isinstance(criteria, list):
            criteria = dict.fromkeys(map(str, criteria))
        if question["type"] == "score":
            criteria = [str(level) if isinstance(level, float) else level for level in criteria]
        if "labels" not in question:
            asked[name] = {**question, "criteria": criteria}
    return questions_from_json(asked)


def as_recorded(sequence: LayaSequence) -> dict[str, Any]:
    found = {"input_ids": sequence.ids, "markers": sequence.markers, "qtype": sequence.type}
    if sequence.options is not None:
        found |= {"position_ids": sequence.positions, "option_ids": sequence.options}
    return {key: list(value) if key != "qtype" else value for key, value in found.items()}  # type: ignore[call-overload]


def plain_text_for_sep(ids: list[int], decider: Laya) -> list[int]:
    """The tokens of a text that says [SEP], which the package makes the token itself: here it stays text."""
    marks, tokenizer = decider.packer.marks, decider.packer.tokenizer
    third = [at for at, token in enumerate(ids) if token == marks.sep][2]
    as_text = tokenizer.encode(" [SEP]", add_bos=False)
    assert tokenizer.token_bytes(ids[third - 1]) == b" ", "the space before it, which here is part of its first token"
    return [*ids[: third - 1], *as_text, *ids[third + 1 :]]


# ---- as recorded ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "name"), REQUESTS)
def test_tokens_logits_and_answers_are_the_recorded_ones(layout: str, name: str) -> None:
    decider, request = laya(layout, truncate=True), request_of(layout, name)
    questions = questions_of(request)
    packed, logits = decider.packed(request["state"], questions), decider.logits(request["state"], questions)
    answers = decider.decide(request["state"], questions)
    assert answers.receipt.to_dict()["dropped_tokens"] == sum(one.dropped.total for one in packed.values())
    for question, found in zip(questions, logits, strict=True):
        recorded, expected = request["packed"][question.name], request["expected"]["answers"][question.name]
        order = request["questions"][question.name].get("option_order")
        if order is not None:
            continue  # shown as asked here; below it is shown as recorded
        if name == "mask_text":
            plain = plain_text_for_sep(recorded["input_ids"], decider)
            assert list(packed[question.name].sequence.ids) == plain
            continue
        ours = packed[question.name]
        assert as_recorded(ours.sequence) == {key: recorded[key] for key in as_recorded(ours.sequence)}
        assert ours.dropped.state == recorded["state_stats"]["state_tokens_dropped"]
        assert np.abs(np.array(found) - recorded["logits"]).max() < 1e-3
        assert decider.calibration.temperature(question.type, len(found)) == recorded["temperature"]
        answer = answers[question.name]
        shares = [1 - answer.noul, answer.noul] if question.type == "noul" else probabilities(answer)  # type: ignore[union-attr]
        assert np.abs(np.array(shares) - recorded["probabilities"]).max() < 3e-4
        if question.type == "choice":  # cut options may be the same tokens, and tie
            assert shares[question.labels.index(str(expected["choice"]))] > max(shares) - 1e-4
        assert question.type != "score" or abs(answer.score - expected["score"]) < 2e-3  # type: ignore[union-attr]


def probabilities(answer: Any) -> list[float]:
    found = answer.probabilities
    return list(found.values()) if isinstance(found, dict) else list(found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_options_in_another_order_are_the_recorded_ones(layout: str) -> None:
    decider, request = laya(layout), request_of(layout, "odd_shapes")
    recorded = request["packed"]["perm"]
    order = request["questions"]["perm"]["option_order"]
    question = next(one for one in questions_of(request) if one.name == "perm")
    packed = decider.packer.pack(question, decider.packer.state(request["state"]), order)
    assert list(packed.sequence.ids) == recorded["input_ids"]
    assert [packed.sequence.markers[label] for label in order] == recorded["markers"]
    (logits,) = decider._run([packed.sequence])
    assert np.abs(np.array([logits[label] for label in order]) - recorded["logits"]).max() < 1e-3


@pytest.mark.parametrize(("layout", "name"), REQUESTS)
def test_without_truncate_what_the_package_cuts_is_refused(layout: str, name: str) -> None:
    strict, cutting, request = laya(layout), laya(layout, truncate=True), request_of(layout, name)
    questions = questions_of(request)
    dropped = {key: one.dropped for key, one in cutting.packed(request["state"], questions).items()}
    for question in questions:
        if dropped[question.name] == Dropped():
            assert strict.packed(request["state"], [question]) == cutting.packed(request["state"], [question])
            continue
        with pytest.raises(QuestionTooLong) as caught:
            strict.decide(request["state"], [question])
        assert isinstance(caught.value, ContextOverflow)
        assert (caught.value.question, caught.value.dropped) == (question.name, dropped[question.name])


def test_the_recorded_cuts_are_of_every_kind() -> None:
    cuts = {
        name: laya(layout, truncate=True).packed(
            request_of(layout, name)["state"], questions_of(request_of(layout, name))
        )
        for layout, name in REQUESTS
    }
    assert cuts["choice60"]["theme"].dropped.options > 800
    assert cuts["choice60"]["theme"].dropped.instructions > 30
    assert cuts["odd_shapes"]["long_ins"].dropped.instructions > 80
    assert cuts["odd_shapes"]["long_opt"].dropped == Dropped(options=37)
    assert cuts["list_state_long"]["waiting"].dropped.state > 700


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("truncate", [False, True])
def test_refusals_are_the_recorded_ones(layout: str, truncate: bool) -> None:
    """All but one: a question without instructions has an answer in the contract. A noul's strange criteria and an
    option_order are no field of a question here, and as such ignored."""
    refused = {}
    for error in RECORDED[layout]["errors"]:
        try:
            laya(layout, truncate=truncate).decide("a state", questions_from_json(error["questions"]))
        except (BadParameter, QuestionTooLong) as caught:
            refused[error["name"]] = caught
    assert {name: type(error) for name, error in refused.items()} == {
        "no_criteria": BadParameter,
        "empty_criteria": BadParameter,
        "unknown_type": BadParameter,
        "null_level": BadParameter,
        "markers_do_not_fit": QuestionTooLong,
    }
    assert "only 127 of its 150 options fit" in str(refused["markers_do_not_fit"])


def test_a_refusal_says_how_many_tokens_of_what() -> None:
    words = "word " * 600
    with pytest.raises(QuestionTooLong) as caught:
        laya("sequential").decide(words, [REFUND])
    whole = len(laya("sequential").packer.tokenizer.encode(words, add_bos=False))
    lost = caught.value.dropped.state
    assert 0 < lost < whole
    assert f"{lost:,} tokens of the state do not fit; the model reads 512 at 1,024 positions" in caught.value.message
    assert caught.value.context_len == 512
    assert caught.value.prompt_tokens == 512 + lost
    assert "truncate=True" in caught.value.remedy


# ---- alone, together, in any order ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_question_among_others_has_its_own_answer(layout: str) -> None:
    decider = laya(layout)
    many = [TEAM, ANGER, REFUND, *(Noul(f"n{i}", "Is it so? " * (i % 7)) for i in range(48))]
    packed = decider.packed(STATE, many)
    assert sum(len(one.sequence.ids) for one in packed.values()) > STEP_TOKENS
    together = decider.logits(STATE, many)
    for question, logits in list(zip(many, together, strict=True))[:4]:
        assert np.abs(np.array(decider.logits(STATE, [question])[0]) - logits).max() < 1e-4


def test_options_that_do_not_see_each_other_answer_alike_in_any_order() -> None:
    decider = laya("parallel")
    (straight,) = decider.logits(STATE, [TEAM])
    turned = Choice("team", dict(reversed(TEAM.described().items())), TEAM.instructions)
    (other,) = decider.logits(STATE, [turned])
    assert np.abs(np.array(straight) - other[::-1]).max() < 1e-5
    (sequential,), (turned_sequential,) = (laya("sequential").logits(STATE, [one]) for one in (TEAM, turned))
    assert np.abs(np.array(sequential) - turned_sequential[::-1]).max() > 0.01


def test_orders_average_the_logits_of_rotations() -> None:
    options, straight = list(TEAM.described().items()), laya("sequential")
    sums = dict.fromkeys(TEAM.labels, 0.0)
    for start in range(3):
        rotated = Choice("team", dict(options[start:] + options[:start]), TEAM.instructions)
        for label, logit in zip(rotated.labels, straight.logits(STATE, [rotated])[0], strict=True):
            sums[label] += logit / 3
    averaged = Laya.load(str(GOLDEN / "sequential"), orders=16, threads=1)
    assert np.abs(np.array(averaged.logits(STATE, [TEAM])[0]) - list(sums.values())).max() < 1e-5
    receipt = averaged.decide(STATE, [TEAM, ANGER, REFUND]).receipt.to_dict()
    assert receipt["sequences"] == 3 + 2 + 2
    assert Laya.load(str(GOLDEN / "parallel"), orders=16, threads=1).orders == 1
    with pytest.raises(BadParameter, match="orders"):
        Laya.load(str(GOLDEN / "sequential"), orders=0, threads=1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_255_options_have_an_answer_where_they_fit(layout: str) -> None:
    names = [f"{first}{second}" for first in "abcdefghijklmnop" for second in "abcdefghijklmnop"][:255]
    question = Choice("which", names, "Which?")
    room = {"sequential": (1024, 1000), "parallel": (4096, 2048)}[layout]
    decider = Laya.load(str(GOLDEN / layout), max_len=room[0], head_max_len=room[1], threads=1)
    answer = decider.decide("ba", [question])["which"]
    assert list(answer.probabilities) == names  # type: ignore[union-attr]
    assert math.isclose(sum(answer.probabilities.values()), 1)  # type: ignore[union-attr]
    with pytest.raises(QuestionTooLong, match=r"of its options do not fit|of its 255 options fit"):
        laya(layout).decide("ba", [question])


# ---- temperatures, numbers, costs -------------------------------------------------------------------------------


def test_one_option_is_certain() -> None:
    answer = laya("sequential").decide(STATE, [Choice("only", ["this"], "Which?")])["only"]
    assert answer.to_dict()["probabilities"] == {"this": 1.0}


def test_a_calibration_takes_the_place_of_the_models_own() -> None:
    (logits,) = laya("sequential").logits(STATE, [TEAM])
    given = Laya.load(str(GOLDEN / "sequential"), calibration=Calibration({"choice": 3.0}), digits=3, threads=1)
    shares = np.exp(np.array(logits) / 3)
    expected = [round(float(share), 3) for share in shares / shares.sum()]
    assert list(given.decide(STATE, [TEAM])["team"].to_dict()["probabilities"].values()) == expected


@pytest.mark.parametrize(
    ("field", "value"), [("max_len", 0), ("max_len", True), ("head_max_len", 1.5), ("max_len", 1025)]
)
def test_impossible_budgets_are_refused(field: str, value: Any) -> None:
    with pytest.raises(BadParameter, match=field):
        Laya.load(str(GOLDEN / "sequential"), threads=1, **{field: value})


def test_numbers_that_are_none_are_refused() -> None:
    whole = laya("sequential")
    broken = Laya("broken", whole._config, whole.packer, lambda sequences: [[math.nan] * 3 for _ in sequences])
    with pytest.raises(BadLogits):
        broken.decide(STATE, [TEAM])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_receipt_counts_what_was_read(layout: str) -> None:
    decider = laya(layout)
    packed = [one.sequence for one in decider.packed(STATE, [TEAM, ANGER, REFUND]).values()]
    receipt = decider.decide(STATE, [TEAM, ANGER, REFUND]).receipt.to_dict()
    lengths = [len(one.ids) for one in packed]
    assert (receipt["questions"], receipt["sequences"], receipt["prompt_tokens"]) == (3, 3, sum(lengths))
    windows = {"sequential": (None, 9, 9), "parallel": (None, 7, None)}[layout]
    heads, layers, head_heads, width = {"sequential": (4, 1, 2, 128), "parallel": (2, 2, 1, 64)}[layout]
    trunk = sum(heads * pairs(one, window) for one in packed for window in windows)
    dense = sum(heads * pairs(one, None) for one in packed for window in windows)
    head = head_heads * layers * sum(length**2 for length in lengths)
    visits = receipt["visits"]
    assert (visits["total"], visits["dense"]) == (trunk + head, dense + head)
    assert visits["dense"] == visits["total"] + sum(visits["saved"].values())
    # matrices: of a trunk's layer 4 d² and 3 d · 64, of a head's 12 d²; the last MLP and the scorer at options alone
    weights = 3 * (4 * width**2 + 3 * width * 64) + layers * 12 * width**2 + width**2 + width
    at_options = 8 * width**2 + width**2 + width
    options = 3 + 3 + 2
    assert receipt["weights"]["bytes_read"] == 4 * weights
    assert receipt["flops"]["linear"] == 2 * ((weights - at_options) * sum(lengths) + at_options * options)
    assert receipt["flops"]["attention"] == 4 * (width // heads * trunk + width // head_heads * head)
    assert receipt["as_text"]["visits"] > 0


def pairs(sequence: LayaSequence, window: int | None) -> int:
    """Counted one by one."""
    places = sequence.positions or range(len(sequence.ids))
    options = sequence.options or [0] * len(sequence.ids)
    tokens = list(zip(places, options, strict=True))
    return sum(
        (o1 == o2 or 0 in (o1, o2)) and (window is None or abs(p1 - p2) < window)
        for p1, o1 in tokens
        for p2, o2 in tokens
    )


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 9), st.integers(0, 9), st.integers(1, 12))
def test_pairs_of_tokens_apart_are_counted(options: list[int], before: int, after: int, window: int) -> None:
    of = [0] * before + [i for i, length in enumerate(options, 1) for _ in range(length)] + [0] * after
    end = before + max(options)
    positions = [*range(before), *(before + at for length in options for at in range(length)), *range(end, end + after)]
    sequence = LayaSequence([5] * len(of), [before], 0, positions, of)
    assert option_visits(sequence, window) == pairs(sequence, window)
    assert option_visits(sequence, None) == pairs(sequence, None)


# ---- packing ----------------------------------------------------------------------------------------------------

TEXTS = st.text(st.sampled_from("ab c[MASK]SP."), max_size=60)


@settings(max_examples=150)
@given(
    layout=st.sampled_from(LAYOUTS),
    room=st.tuples(st.integers(20, 200), st.integers(4, 120), st.integers(20, 200)),
    names=st.lists(TEXTS.filter(bool), min_size=1, max_size=12, unique=True),
    instructions=TEXTS,
    state=st.one_of(TEXTS, st.lists(TEXTS, max_size=4)),
    shuffled=st.randoms(use_true_random=False),
)
def test_what_is_packed_fits_and_is_whole_unless_cutting_was_asked_for(
    layout: str, room: tuple[int, int, int], names: list[str], instructions: str, state: Any, shuffled: Any
) -> None:
    usual = laya(layout).packer
    budgets = LayaLayout(room[0], room[1], room[2], parallel=layout == "parallel")
    question, order = Choice("q", names, instructions), shuffled.sample(range(len(names)), len(names))
    strict, cutting = (LayaPacker(usual.tokenizer, usual.marks, budgets, truncate) for truncate in (False, True))
    tokens = usual.state(state)
    cut = packed_or_error(lambda: cutting.pack(question, tokens, order))
    whole = packed_or_error(lambda: strict.pack(question, tokens, order))
    if isinstance(cut, QuestionTooLong):
        assert isinstance(whole, QuestionTooLong)
        return
    sequence = cut.sequence
    assert len(sequence.ids) <= room[0]
    assert max(sequence.positions or range(len(sequence.ids))) < room[2]
    assert [sequence.ids[at] for at in sequence.markers] == [usual.marks.mask] * len(names)
    assert sum(token == usual.marks.mask for token in sequence.ids) == len(names)
    if isinstance(whole, QuestionTooLong):
        assert whole.dropped == cut.dropped
        return
    assert whole == cut
    assert cut.dropped == Dropped()
    shown = [usual.tokenizer.decode(part) for part in split_at(list(sequence.ids), usual.marks.sep)]
    clean = [name.replace("[MASK]", " ") for name in names]
    assert shown[0] == f"choice question: {instructions.replace('[MASK]', ' ')}"
    assert shown[1] == "".join(f" {clean[at]}" for at in order)
    text = state if isinstance(state, str) else json.dumps(state, ensure_ascii=False)
    assert shown[2:] == [text.replace("[MASK]", " "), ""]


def packed_or_error(pack: Callable[[], Any]) -> Any:
    try:
        return pack()
    except QuestionTooLong as error:
        return error


def split_at(ids: list[int], mark: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in ids:
        if token == mark:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts
