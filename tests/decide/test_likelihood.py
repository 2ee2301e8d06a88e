"""Any chat model as a decider. The right scores come from reading token by token, the chain rule written out."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence as ListLike
from pathlib import Path
from typing import Any

import pytest

from heedful import LLM
from heedful.decide import Choice, Likelihood, Noul, Score
from heedful.decide.calibrate import Calibration
from heedful.decide.chat_prompt import answers_of, orders_of
from heedful.errors import BadParameter, ContextOverflow
from heedful.testing import make_tiny_model

STATE = {"ticket": {"text": "I was charged twice for order 88, and nobody answers the phone."}, "plan": "pro"}
TEAM = Choice("team", {"returns": None, "billing": {"owns": ["invoices"]}, "billing too": "both"}, "Who owns this?")
ANGER = Score("anger", ["calm", "annoyed", {"label": "angry"}], "How upset is the writer?")
REFUND = Noul("refund", true="Money back is asked for")
QUESTIONS = [TEAM, ANGER, REFUND]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("chat"), context_len=2048)


@pytest.fixture
def llm(folder: Path) -> LLM:
    return LLM(str(folder))


IM_END = 258  # testing.py: 256 bytes, <|endoftext|>, <|im_start|>, <|im_end|>


def log_likelihood(llm: LLM, prompt: str, answer: str, end: ListLike[int] = (IM_END,)) -> float:
    """Σ ln p(token | all before it) of the answer and of what ends it, one pass a token."""
    before = llm.encode_chat([{"role": "user", "content": prompt}])
    said = [*llm.tokenizer.encode(answer), *end]
    total = 0.0
    for at, token in enumerate(said):
        step = llm.generate([*before, *said[:at]], max_tokens=1, logprobs=300, ignore_eos=True)
        assert step.logprobs is not None
        total += dict(step.logprobs[0].top)[token]
    return total


def log_softmax(scores: Any) -> list[float]:
    most = max(scores)
    whole = most + math.log(sum(math.exp(score - most) for score in scores))
    return [score - whole for score in scores]


STATE_TEXT = '{"ticket": {"text": "I was charged twice for order 88, and nobody answers the phone."}, "plan": "pro"}'
PROMPTS = {
    "team": f"{STATE_TEXT}\n\nWho owns this?\n- returns\n- billing: {{\"owns\": [\"invoices\"]}}\n- billing too: both\n"
    "Answer with one of these options and nothing else.",
    "anger": f"{STATE_TEXT}\n\nHow upset is the writer?\n- 0: calm\n- 1: annoyed\n- 2: {{\"label\": \"angry\"}}\n"
    "Answer with the number of one of these levels and nothing else.",
    "refund": f"{STATE_TEXT}\n\n- no\n- yes: Money back is asked for\nAnswer with yes or no and nothing else.",
}  # fmt: skip


def test_scores_are_the_summed_log_likelihoods_of_the_answers(llm: LLM, folder: Path) -> None:
    found = Likelihood(llm).logits(STATE, QUESTIONS)
    other = LLM(str(folder))
    for question, scores in zip(QUESTIONS, found, strict=True):
        right = [log_likelihood(other, PROMPTS[question.name], answer) for answer in answers_of(question)]
        assert log_softmax(scores) == pytest.approx(log_softmax(right), abs=1e-9)  # what they share may be left out


def test_probabilities_are_their_softmax_at_the_calibrated_temperature(llm: LLM) -> None:
    logits = Likelihood(llm).logits(STATE, QUESTIONS)
    calibration = Calibration({"choice": 2.0, "noul": 4.0}, {"choice:3-5": 3.0})
    answers = Likelihood(llm, calibration=calibration).decide(STATE, QUESTIONS)
    found = answers.to_dict()["answers"]
    for scores, temperature, probabilities in (
        (logits[0], 3.0, list(found["team"]["probabilities"].values())),
        (logits[1], 1.0, list(found["anger"]["probabilities"].values())),
        (logits[2], 4.0, [1 - found["refund"]["noul"], found["refund"]["noul"]]),
    ):
        expected = [math.exp(score) for score in log_softmax([score / temperature for score in scores])]
        assert probabilities == pytest.approx(expected, abs=1e-12)
    assert list(found) == ["team", "anger", "refund"]
    assert found["anger"]["legend"] == {"0": "calm", "1": "annoyed", "2": {"label": "angry"}}


def test_the_state_is_computed_once(llm: LLM) -> None:
    receipt = Likelihood(llm).decide(STATE, QUESTIONS).receipt
    found = receipt.to_dict()
    state_pages = (len(llm.tokenizer.encode(STATE_TEXT)) + len("<|user\n")) // 64 * 64
    assert state_pages >= 64
    assert (found["questions"], found["sequences"], found["output_tokens"]) == (3, 8, 0)
    assert found["cached_tokens"] >= 7 * state_pages  # all but the first sequence find it
    assert found["visits"]["dense"] == found["visits"]["total"] + sum(found["visits"]["saved"].values())
    assert found["visits"]["saved"]["prefix"] > 0
    again = Likelihood(llm).decide(STATE, QUESTIONS).receipt.to_dict()
    assert again["cached_tokens"] > found["cached_tokens"]
    assert llm.engine.runner.cache.taken_bytes == 0
    assert llm.ledger.requests == 16


def test_answers_do_not_depend_on_names_order_company_or_what_was_asked_before(llm: LLM, folder: Path) -> None:
    first = Likelihood(llm).decide(STATE, QUESTIONS).to_dict()["answers"]
    turned = Likelihood(llm).decide(STATE, QUESTIONS[::-1]).to_dict()["answers"]
    assert turned == first
    renamed = Choice("x", TEAM.described(), TEAM.instructions)
    assert Likelihood(LLM(str(folder))).decide(STATE, [renamed]).to_dict()["answers"] == {"x": first["team"]}


def test_other_salts_share_nothing(llm: LLM) -> None:
    Likelihood(llm, cache_salt="a").decide(STATE, [REFUND])
    found = Likelihood(llm, cache_salt="b").decide(STATE, [REFUND]).receipt.to_dict()
    assert found["cached_tokens"] < found["prompt_tokens"] / 2  # of the second option only


def test_orders_are_averaged(llm: LLM) -> None:
    """The mean over rotations, written out; so an option's place in the list no longer matters."""
    options = {"red": None, "green": None, "blue": None}
    names = list(options)
    rotations = [names[i:] + names[:i] for i in range(3)]
    alone = []
    for rotation in rotations:
        (scores,) = Likelihood(llm).logits("The sky.", [Choice("c", rotation)])
        alone.append(dict(zip(rotation, scores, strict=True)))
    (averaged,) = Likelihood(llm, orders=3).logits("The sky.", [Choice("c", options)])
    expected = [sum(scores[name] for scores in alone) / 3 for name in names]
    assert averaged == pytest.approx(expected, abs=1e-9)
    (rotated,) = Likelihood(llm, orders=3).logits("The sky.", [Choice("c", rotations[1])])
    assert dict(zip(rotations[1], rotated, strict=True)) == pytest.approx(dict(zip(names, averaged, strict=True)))


def test_orders() -> None:
    five = Choice("c", list("abcde"))
    assert orders_of(five, 1) == [[0, 1, 2, 3, 4]]
    assert orders_of(five, 2) == [[0, 1, 2, 3, 4], [2, 3, 4, 0, 1]]
    assert len({tuple(order) for order in orders_of(five, 16)}) == 5
    assert orders_of(Score("s", ["a", "b", "c"]), 16) == [[0, 1, 2], [2, 1, 0]]
    assert orders_of(Noul("n"), 16) == [[0, 1], [1, 0]]
    assert orders_of(Score("s", ["only"]), 16) == [[0]]


def test_a_model_without_a_chat_template_continues_text(tmp_path: Path) -> None:
    llm = LLM(str(make_tiny_model(tmp_path, chat=False, context_len=1024)))
    (scores,) = Likelihood(llm).logits("It rains.", [Choice("c", ["wet", "we"])])
    prompt = "It rains.\n\n- wet\n- we\nAnswer with one of these options and nothing else.\n\nAnswer: "
    right = []
    for answer in ("wet\n", "we\n"):
        ids, total = llm.tokenizer.encode(prompt), 0.0
        for token in llm.tokenizer.encode(answer):
            step = llm.generate(ids, max_tokens=1, logprobs=300, ignore_eos=True)
            assert step.logprobs is not None
            total += dict(step.logprobs[0].top)[token]
            ids = [*ids, token]
        right.append(total)
    assert log_softmax(scores) == pytest.approx(log_softmax(right), abs=1e-9)


def test_a_template_that_does_not_close_the_answer(tmp_path: Path) -> None:
    """The user's turn ends with an end-of-text token, the assistant's with none: all of the answer counts."""
    settings = make_tiny_model(tmp_path, context_len=1024) / "tokenizer_config.json"
    fields = json.loads(settings.read_text())
    fields["chat_template"] = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if m.role == 'user' %}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    settings.write_text(json.dumps(fields))
    llm = LLM(str(tmp_path))
    (scores,) = Likelihood(llm).logits("It rains.", [Choice("c", ["wet", "dry"])])
    prompt = "It rains.\n\n- wet\n- dry\nAnswer with one of these options and nothing else."
    right = [log_likelihood(llm, prompt, answer, end=[]) for answer in ("wet", "dry")]
    assert log_softmax(scores) == pytest.approx(log_softmax(right), abs=1e-9)


def test_one_option_is_certain_and_costs_nothing(llm: LLM) -> None:
    answers = Likelihood(llm).decide("x", [Choice("c", ["only"]), Score("s", ["only"])])
    assert answers.to_dict()["answers"]["c"]["probabilities"] == {"only": 1.0}
    assert answers.receipt.to_dict()["sequences"] == 0


def test_many_options_and_odd_names(llm: LLM) -> None:
    options = ["", " ", "a", "a.b", "<|im_end|>", "환불 요청", "\n", "a\n", *[f"option {i}" for i in range(92)]]
    answers = Likelihood(llm, digits=4).decide([], [Choice("c", options, ["Pick", {"one": 1}])])
    found = answers.to_dict()["answers"]["c"]
    assert list(found["probabilities"]) == options
    assert sum(found["probabilities"].values()) == pytest.approx(1, abs=0.005)
    assert all(round(p, 4) == p for p in found["probabilities"].values())


def test_what_is_refused_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(ContextOverflow, match="the context is 2,048"):
        Likelihood(llm).decide("x" * 3000, QUESTIONS)
    with pytest.raises(BadParameter, match="not null"):
        Likelihood(llm).decide(None, QUESTIONS)  # type: ignore[arg-type]
    with pytest.raises(BadParameter, match="at least one"):
        Likelihood(llm).decide("x", [])
    for orders in (0, 17, True, 1.5):
        with pytest.raises(BadParameter, match="from 1 to 16"):
            Likelihood(llm, orders=orders)  # type: ignore[arg-type]
    assert not llm.engine.scheduler.has_work
    assert llm.engine.runner.cache.taken_bytes == 0


def test_a_failing_step_gives_everything_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> None:
        raise MemoryError("no more")

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.runner, "run", fails)
        with pytest.raises(MemoryError):
            Likelihood(llm).decide("x", QUESTIONS)
    assert not llm.engine.scheduler.has_work
    assert llm.engine.runner.cache.taken_bytes == 0
    assert Likelihood(llm).decide("x", [REFUND])["refund"].to_dict()["type"] == "noul"


def test_a_real_model_reads_the_text(smollm2_path: Path) -> None:
    """The smallest of chat models is right where the answer stands in the text, and not always then."""
    decider = Likelihood(LLM(str(smollm2_path)), orders=3)
    for name, city in (("Anna", "Paris"), ("Bob", "London")):
        question = Choice("city", ["London", "Paris", "Berlin"], f"Which city does {name} live in?")
        state = f"{name} moved to {city} last year, and loves {city}."
        assert decider.decide(state, [question]).to_dict()["answers"]["city"]["choice"] == city
