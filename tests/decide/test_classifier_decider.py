"""Classifiers as deciders: recorded logits to answers, which label is asked for, inference over statements."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from safetensors.numpy import load_file
from tokenizers import models, pre_tokenizers, processors

from heedful.decide.answer import ChoiceAnswer, NoulAnswer, ScoreAnswer
from heedful.decide.calibrate import Calibration
from heedful.decide.classifier import ClassifierDecider
from heedful.decide.question import Choice, Noul, Question, Score
from heedful.decide.statements import TooLongToJudge
from heedful.errors import BadParameter, ContextOverflow, UnsupportedModel

GOLDEN = Path(__file__).parent.parent / "golden" / "encoders"
THREE = {"0": "Entailment", "1": "neutral", "2": "CONTRADICTION"}
LONGER = {"max_position_embeddings": 96, "max_relative_positions": 64}
"""DeBERTa's recorded texts are longer than its config says; the same distances, room for 96 tokens."""


def model_folder(folder: Path, model: str, **changes: Any) -> Path:
    """A recorded classifier with a tokenizer of words "w5", "w6", …, whose ids are these numbers."""
    if model.startswith("deberta"):
        changes = LONGER | changes
    config = json.loads((GOLDEN / model / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(GOLDEN / model / "model.safetensors", folder)
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, **{f"w{token}": token for token in range(4, 120)}}
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.save(str(folder / "tokenizer.json"))
    return folder


def decider(folder: Path, model: str, *, changes: dict[str, Any] | None = None, **options: Any) -> ClassifierDecider:
    return ClassifierDecider.load(str(model_folder(folder, model, **(changes or {}))), threads=1, **options)


def recorded(model: str) -> list[tuple[str, list[float]]]:
    """(text, logits); of BERT the one text that was no pair."""
    tensors = load_file(GOLDEN / model / "golden.safetensors")
    found = []
    for at, mask in enumerate(tensors["attention_mask"].astype(bool)):
        ids = tensors["input_ids"][at][mask].tolist()
        if "token_type_ids" not in tensors or not tensors["token_type_ids"][at].any():
            assert (ids[0], ids[-1]) == (2, 3)
            found.append((" ".join(f"w{token}" for token in ids[1:-1]), tensors["logits"][at].tolist()))
    return found


def shares(logits: list[float]) -> list[float]:
    powers = [math.exp(z) for z in logits]
    return [power / sum(powers) for power in powers]


def probabilities(model: ClassifierDecider, state: Any, question: Question) -> list[float]:
    answer = model.decide(state, [question])[question.name]
    if isinstance(answer, NoulAnswer):
        return [1 - answer.noul, answer.noul]
    return list(answer.probabilities.values() if isinstance(answer, ChoiceAnswer) else answer.probabilities)


# ---- plain classifiers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["bert_seqcls", "deberta_v2_seqcls", "modernbert_seqcls_mean"])
def test_three_recorded_classes(model: str, tmp_path: Path) -> None:
    names = {"0": "billing", "1": "Returns", "2": "other"}
    asked = decider(tmp_path, model, changes={"id2label": names}, yes_label="returns")
    texts = recorded(model)
    assert len(texts) == (1 if model == "bert_seqcls" else 3)
    for text, logits in texts:
        every = Choice("q", ["Other", "BILLING", "returns"], "does not matter")
        expected = shares(logits)
        assert probabilities(asked, text, every) == pytest.approx([expected[2], *expected[:2]], abs=1e-4)
        some = Choice("q", {"other": "as well", "returns": None})
        assert probabilities(asked, text, some) == pytest.approx(shares([logits[2], logits[1]]), abs=1e-4)
        levels = Score("q", ["low", "middle", "high"])
        assert probabilities(asked, text, levels) == pytest.approx(expected, abs=1e-4)
        assert probabilities(asked, text, Noul("q", "Any?"))[1] == pytest.approx(expected[1], abs=1e-4)
        assert asked.logits(text, [every])[0] == pytest.approx([logits[2], *logits[:2]], abs=1e-4)


@pytest.mark.parametrize(("options", "yes"), [({}, 1), ({"yes_label": "label_0"}, 0), ({"yes_label": "LABEL_1"}, 1)])
def test_two_recorded_classes(options: dict[str, str], yes: int, tmp_path: Path) -> None:
    asked = decider(tmp_path, "modernbert_seqcls_cls", **options)
    for text, logits in recorded("modernbert_seqcls_cls"):
        assert probabilities(asked, text, Noul("q"))[1] == pytest.approx(shares(logits)[yes], abs=1e-4)
        assert asked.logits(text, [Noul("q")])[0] == pytest.approx((logits[1 - yes], logits[yes]), abs=1e-4)


def test_classes_that_may_hold_together(tmp_path: Path) -> None:
    changes = {"problem_type": "multi_label_classification"}
    asked = decider(tmp_path, "deberta_v2_seqcls", changes=changes, yes_label="LABEL_2")
    for text, logits in recorded("deberta_v2_seqcls"):
        assert probabilities(asked, text, Noul("q"))[1] == pytest.approx(1 / (1 + math.exp(-logits[2])), abs=1e-4)


def test_the_state_is_read_once(tmp_path: Path) -> None:
    asked = decider(tmp_path, "modernbert_seqcls_cls", calibration=Calibration({"noul": 2.0}), digits=2)
    (text, logits), *_ = recorded("modernbert_seqcls_cls")
    answers = asked.decide(text, [Noul("a"), Choice("b", ["LABEL_0", "LABEL_1"]), Score("c", ["no", "yes"])])
    assert isinstance(answers["a"], NoulAnswer)
    assert answers["a"].noul == round(shares([z / 2 for z in logits])[1], 2)
    assert isinstance(answers["c"], ScoreAnswer)
    assert answers["c"].score == round(shares(logits)[1], 2)
    receipt = answers.receipt.to_dict()
    assert (receipt["questions"], receipt["sequences"], receipt["prompt_tokens"]) == (3, 1, 80)
    assert receipt["as_text"]["visits"] > receipt["visits"]["total"] > 0
    assert answers.model == asked.name == str(tmp_path)


@pytest.mark.parametrize(
    ("question", "said"),
    [
        (
            Choice("q", ["LABEL_0", "spam"]),
            r"\['q'\]: 'spam' is no label of .*\nIts labels: LABEL_0, LABEL_1, LABEL_2",
        ),
        (Choice("q", ["LABEL_0", "label_0"]), "two options name the same label"),
        (Score("q", ["a", "b"]), "has 2 levels and .* 3 labels"),
        (
            Noul("q", "Is it?"),
            r"3 labels, and none of them is known to mean yes\n.*yes_label=…, of LABEL_0,",
        ),
    ],
)
def test_questions_that_the_labels_do_not_answer(question: Question, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match=said):
        decider(tmp_path, "deberta_v2_seqcls").decide("w5", [Choice("fine", ["LABEL_0"]), question])


def test_labels_that_differ_in_case_alone(tmp_path: Path) -> None:
    asked = decider(tmp_path, "deberta_v2_seqcls", changes={"id2label": {"0": "No", "1": "no", "2": "yes"}})
    (text, logits), *_ = recorded("deberta_v2_seqcls")
    assert asked.logits(text, [Choice("q", ["no", "YES"])])[0] == pytest.approx(logits[1:], abs=1e-4)
    with pytest.raises(BadParameter, match="'NO' is no label"):
        asked.logits(text, [Choice("q", ["NO", "yes"])])


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="yes_label: 'maybe' is no label"):
        decider(tmp_path, "modernbert_seqcls_cls", yes_label="maybe")
    with pytest.raises(BadParameter, match=r"hypothesis: has no \{\}"):
        decider(tmp_path, "modernbert_seqcls_cls", hypothesis="This is it.")
    with pytest.raises(UnsupportedModel, match="computes numbers, not classes"):
        decider(tmp_path, "modernbert_seqcls_cls", changes={"problem_type": "regression"})
    with pytest.raises(BadParameter, match="yes_label: means nothing"):
        decider(tmp_path, "deberta_v2_seqcls", changes={"id2label": THREE}, yes_label="neutral")


def test_a_state_that_is_too_long(tmp_path: Path) -> None:
    state = "w5 " * 200
    with pytest.raises(TooLongToJudge, match=r"the state with the question has 202 tokens .* at most 128") as caught:
        decider(tmp_path, "modernbert_seqcls_cls").decide(state, [Noul("q")])
    assert isinstance(caught.value, ContextOverflow)
    receipt = decider(tmp_path, "modernbert_seqcls_cls", truncate=True).decide(state, [Noul("q")]).receipt.to_dict()
    assert (receipt["prompt_tokens"], receipt["dropped_tokens"]) == (128, 74)


# ---- natural language inference ---------------------------------------------------------------------------------


STATE = "w5 w6 w7 w8"
TEAM = Choice("q", {"w10": "w11", "w12": None}, "w13 w14")


@pytest.mark.parametrize(
    ("question", "hypotheses"),
    [
        (TEAM, ["w13 w14 w10: w11", "w13 w14 w12"]),
        (Choice("q", ["w10", "w12"]), ["w20 w10 w21", "w20 w12 w21"]),
        (Score("q", ["w10", "w11", "w12"], "w13"), ["w13 w10", "w13 w11", "w13 w12"]),
        (Noul("q", "w13", true="w10", false="w11"), ["w13 w11", "w13 w10"]),
        (Noul("q"), ["w20 no w21", "w20 yes w21"]),
    ],
)
def test_the_statement_that_is_entailed_most(question: Question, hypotheses: list[str], tmp_path: Path) -> None:
    changes, sentence = {"id2label": THREE}, "w20 {} w21"
    asked = decider(tmp_path, "deberta_v2_seqcls", changes=changes, hypothesis=sentence)
    rows = asked.classifier.classify([(STATE, one) for one in hypotheses]).logits
    entailed = [float(row[0]) for row in rows]
    assert asked.logits(STATE, [question])[0] == pytest.approx(entailed, abs=1e-5)
    assert probabilities(asked, STATE, question) == pytest.approx(shares(entailed), abs=1e-5)


@pytest.mark.parametrize(
    ("question", "statement", "about_true"),
    [
        (Noul("q", "w13"), "w13", True),
        (Noul("q", "w13", true="w10"), "w13 w10", True),
        (Noul("q", "w13", false="w10"), "w13 w10", False),
        (Noul("q", true="w10"), "w10", True),
    ],
)
def test_a_statement_is_entailed_or_contradicted(
    question: Noul, statement: str, about_true: bool, tmp_path: Path
) -> None:
    asked = decider(tmp_path, "deberta_v2_seqcls", changes={"id2label": THREE})
    row = [float(logit) for logit in asked.classifier.classify([(STATE, statement)]).logits[0]]
    expected = shares([row[2], row[0]])[1]
    found = probabilities(asked, STATE, question)[1]
    assert found == pytest.approx(expected if about_true else 1 - expected, abs=1e-5)


def test_without_a_contradiction_all_others_are_against(tmp_path: Path) -> None:
    names = {"0": "not_entailment", "1": "unclear", "2": "entailment"}
    asked = decider(tmp_path, "deberta_v2_seqcls", changes={"id2label": names})
    row = [float(logit) for logit in asked.classifier.classify([(STATE, "w13")]).logits[0]]
    assert probabilities(asked, STATE, Noul("q", "w13"))[1] == pytest.approx(shares(row)[2], abs=1e-5)


def test_questions_run_together_and_apart(tmp_path: Path) -> None:
    asked = decider(tmp_path, "bert_seqcls", changes={"id2label": THREE})
    questions = [TEAM, Noul("urgent", "w30"), Score("anger", ["w10", "w11", "w12"])]
    together = asked.decide(STATE, questions)
    assert together.receipt.to_dict()["sequences"] == 2 + 1 + 3
    for question, logits in zip(questions, asked.logits(STATE, questions), strict=True):
        assert asked.logits(STATE, [question])[0] == pytest.approx(logits, abs=1e-5)


def test_the_state_is_cut_and_never_a_statement(tmp_path: Path) -> None:
    options: dict[str, Any] = {"changes": {"id2label": THREE}, "truncate": True}
    asked = decider(tmp_path, "deberta_v2_seqcls", **options)
    receipt = asked.decide("w5 " * 120, [Noul("q", "w13 " * 40)]).receipt.to_dict()
    assert (receipt["prompt_tokens"], receipt["dropped_tokens"]) == (96, 3 + 120 + 40 - 96)
    whole, cut = ([("w5 " * count, "w13 " * 40)] for count in (53, 120))
    rows = [asked.classifier.classify(pair, truncate=True).logits[0].tolist() for pair in (whole, cut)]
    assert rows[0] == pytest.approx(rows[1], abs=1e-5)
    with pytest.raises(TooLongToJudge, match="a statement of a question has 50 tokens and the model takes at most 46"):
        asked.decide("w5", [Noul("q", "w13 " * 50)])
