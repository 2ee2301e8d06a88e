"""GLiClass against the package gliclass: recorded logits and answers, settings, typed questions, receipts."""

from __future__ import annotations

import json
import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heedful.decide.answer import ChoiceAnswer, NoulAnswer, ScoreAnswer
from heedful.decide.calibrate import Calibration
from heedful.decide.gliclass import GLiClass, LabelBatch
from heedful.decide.gliclass_pass import BiEncoder, LabelJudge, UniEncoder
from heedful.decide.gliclass_prompt import BiReader, UniReader
from heedful.decide.question import Choice, Noul, Question, Score
from heedful.engine.torch_embed import make_encoder
from heedful.engine.torch_gliclass import bi_logits, build_gliclass_head, label_vectors, uni_logits
from heedful.errors import BadLogits, BadParameter
from heedful.models.gliclass import text_state
from heedful.models.gliclass_config import gliclass_config_from_hf
from heedful.weights.load_gliclass import load_gliclass

GOLDEN = Path(__file__).parent.parent / "golden" / "decisions" / "gliclass"
MODELS = ("bi_encoder", "deberta_mlp", "deberta_simple", "deberta_weighted_dot", "modernbert_simple")
TOLERANCE = 2e-4
STATE = "I was charged twice for the camera."
SETTINGS: dict[str, Any] = json.loads((GOLDEN / "settings.json").read_text())


@cache
def loaded(model: str) -> GLiClass:
    return GLiClass.load(str(GOLDEN / model), threads=1, max_tokens=96)


def recorded() -> list[Any]:
    """Left out: what the reference fails on, and where it loses all labels, which is refused here."""
    return [
        pytest.param(model, case, id=f"{model}-{case['name']}")
        for model in MODELS
        for case in json.loads((GOLDEN / f"{model}.json").read_text())["cases"]
        if "error" not in case and "note" not in case
    ]


def classified(model: str, case: dict[str, Any], *, multi_label: bool) -> LabelBatch:
    """The reference's bi-encoder leaves examples out without a word; here they are refused, so none are given."""
    examples = case.get("examples", ()) if model != "bi_encoder" else ()
    prompt = case.get("prompt", "")
    return loaded(model).classify(
        case["texts"], case["labels"], multi_label=multi_label, prompt=prompt, examples=examples, truncate=True
    )


def test_all_recorded_cases_are_run() -> None:
    assert len(recorded()) == 5 * 7 - 2


@pytest.mark.parametrize(("model", "case"), recorded())
def test_recorded_logits_and_probabilities(model: str, case: dict[str, Any]) -> None:
    """Each text as it is alone: no padding."""
    one, several = (classified(model, case, multi_label=multi) for multi in (False, True))
    assert one.logits == several.logits
    assert one.token_counts == tuple(len(alone["input_ids"]) for alone in case["alone"])
    for at, alone in enumerate(case["alone"]):
        assert one.logits[at] == pytest.approx(alone["logits"], abs=TOLERANCE)
        for batch, name in ((one, "softmax"), (several, "sigmoid")):
            assert tuple(batch.probabilities[at]) == batch.labels[at]
            assert list(batch.probabilities[at].values()) == pytest.approx(alone[name], abs=TOLERANCE)


@pytest.mark.parametrize(("model", "case"), recorded())
def test_answers_of_the_references_pipeline(model: str, case: dict[str, Any]) -> None:
    """One text a batch: in larger ones it pools over padding, so some answers depend on the neighbours."""
    several = classified(model, case, multi_label=True).probabilities
    for found, row in zip(several, case["pipeline"]["multi_label_batch_size_1"], strict=True):
        assert list(found) == [one["label"] for one in row]
        assert list(found.values()) == pytest.approx([one["score"] for one in row], abs=TOLERANCE)
    if len(case["texts"]) == 1:
        (found,) = classified(model, case, multi_label=False).probabilities
        ((best,),) = case["pipeline"]["single_label"]
        assert max(found, key=found.__getitem__) == best["label"]
        assert found[best["label"]] == pytest.approx(best["score"], abs=TOLERANCE)


# ---- settings that the recorded checkpoints do not have ---------------------------------------------------------


class Parts:
    """A recorded checkpoint, opened once, whose settings can be changed: no weight depends on these."""

    def __init__(self, model: str) -> None:
        self.folder = GOLDEN / model
        self.opened = load_gliclass(str(self.folder))
        self.settings = json.loads((self.folder / "config.json").read_text())
        self.trunk = make_encoder(self.opened.config.encoder, self.opened.encoder, threads=1)
        if self.opened.config.label_encoder is not None:
            self.of_labels = make_encoder(self.opened.config.label_encoder, self.opened.label_encoder, threads=1)

    def model(self, *, masked: bool = False, **changes: Any) -> GLiClass:
        config, tokenizer = gliclass_config_from_hf(self.settings | changes), self.opened.tokenizer
        head = build_gliclass_head(config, self.opened.head)
        judge: LabelJudge
        if self.opened.label_tokenizer is None:
            reader = UniReader(config, tokenizer)
            judge = UniEncoder("changed", config, reader, partial(uni_logits, self.trunk, head, masked))
        else:
            apart = BiReader(config, tokenizer, self.opened.label_tokenizer)
            vectors = partial(label_vectors, self.of_labels, head)
            judge = BiEncoder("changed", config, apart, vectors, partial(bi_logits, self.trunk, head))
        return GLiClass("changed", tokenizer, judge)


@pytest.mark.parametrize("architecture", ["uni_encoder", "bi_encoder"])
def test_every_pooling_as_the_reference_has_it(architecture: str) -> None:
    recording = SETTINGS[architecture]
    assert len(recording["cases"]) == {"uni_encoder": 112, "bi_encoder": 16}[architecture]
    parts = Parts(recording["checkpoint"])
    for case in recording["cases"]:
        changes = {name: value for name, value in case.items() if name != "logits"}
        batch = parts.model(**changes).classify([recording["text"]], recording["labels"], prompt=recording["prompt"])
        assert batch.logits[0] == pytest.approx(case["logits"], abs=TOLERANCE, rel=1e-5), changes


def test_masked_pooling_leaves_the_zeros_out() -> None:
    """A sum does not feel them, a mean is larger without them, and where labels are pooled too there are none."""
    ids = torch.tensor([2, 300, 7, 301, 8, 9, 3])
    hidden = torch.arange(14.0).view(7, 2) + 1
    text = hidden[3:]
    settings = json.loads((GOLDEN / "deberta_simple" / "config.json").read_text())

    def pooled(pooling: str, text_only: bool, masked: bool) -> list[float]:
        changes = {"pooling_strategy": pooling, "extract_text_features": text_only}
        config = gliclass_config_from_hf(settings | changes)
        return text_state(config, ids, hidden, masked=masked)[0].tolist()

    assert pooled("avg", True, True) == text.mean(0).tolist()
    assert pooled("avg", True, False) == (text.sum(0) / 7).tolist()
    assert pooled("last", True, True) == [13, 14]
    assert pooled("last", True, False) == [0, 0]
    assert pooled("sum", True, True) == pooled("sum", True, False) == text.sum(0).tolist()
    assert pooled("avg", False, True) == pooled("avg", False, False) == hidden.mean(0).tolist()
    parts, changes = Parts("deberta_simple"), {"pooling_strategy": "avg", "extract_text_features": True}
    scores = [parts.model(masked=on, **changes).classify([STATE], ["a", "b"]).logits[0] for on in (True, False)]
    assert scores[0] != pytest.approx(scores[1], abs=0.01)


# ---- typed questions --------------------------------------------------------------------------------------------


def shares(logits: list[float]) -> list[float]:
    powers = [math.exp(z - max(logits)) for z in logits]
    return [power / sum(powers) for power in powers]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("question", "labels", "prompt"),
    [
        (Choice("q", ["billing", "returns"]), ["billing", "returns"], ""),
        (
            Choice("q", {"billing": "owns invoices", "other": None, "gone": {"to": 5}}, "Who answers?"),
            ["billing: owns invoices", "other", 'gone: {"to": 5}'],
            "Who answers?\n",
        ),
        (Score("q", ["calm", "furious"], ["How", "upset?"]), ["calm", "furious"], '["How", "upset?"]\n'),
        (Noul("q", "Is it?", true="paid twice", false="paid once"), ["paid once", "paid twice"], "Is it?\n"),
        (Noul("q"), ["no", "yes"], ""),
    ],
    ids=["choice", "described", "score", "both sides", "says nothing"],
)
def test_one_of_the_labels_is_right(model: str, question: Question, labels: list[str], prompt: str) -> None:
    decider = loaded(model)
    expected = decider.classify([STATE], labels, prompt=prompt)
    (logits,) = decider.logits(STATE, [question])
    assert logits == pytest.approx(expected.logits[0], abs=1e-5)
    answer = decider.decide(STATE, [question])["q"]
    probabilities = list(expected.probabilities[0].values())
    if isinstance(answer, NoulAnswer):
        assert answer.noul == pytest.approx(probabilities[1], abs=1e-5)
    else:
        found = answer.probabilities.values() if isinstance(answer, ChoiceAnswer) else answer.probabilities
        assert list(found) == pytest.approx(probabilities, abs=1e-5)
        assert isinstance(answer, ScoreAnswer) or list(answer.probabilities) == list(question.labels)


@pytest.mark.parametrize(
    ("question", "label", "prompt", "about_true"),
    [
        (Noul("q", "Was it paid twice?"), "Was it paid twice?", "", True),
        (Noul("q", "Is it?", true="paid twice"), "paid twice", "Is it?\n", True),
        (Noul("q", "Is it?", false="paid once"), "paid once", "Is it?\n", False),
        (Noul("q", {"is": "paid"}, true="", false=""), '{"is": "paid"}', "", True),
    ],
)
def test_a_statement_is_a_label_of_its_own(question: Noul, label: str, prompt: str, about_true: bool) -> None:
    decider = loaded("deberta_simple")
    expected = decider.classify([STATE], [label], multi_label=True, prompt=prompt).probabilities[0][label]
    answer = decider.decide(STATE, [question])["q"]
    assert isinstance(answer, NoulAnswer)
    assert answer.noul == pytest.approx(expected if about_true else 1 - expected, abs=1e-6)
    assert decider.logits(STATE, [question])[0][0 if about_true else 1] == 0


def test_questions_do_not_see_each_other() -> None:
    questions = [
        Choice("team", {"billing": "owns invoices", "other": None}, "Who answers?"),
        Noul("urgent", "Is this urgent?"),
        Score("anger", ["calm", "annoyed", "furious"]),
    ]
    state = {"text": STATE, "order": 88}
    decider = loaded("modernbert_simple")
    together = decider.logits(state, questions)
    for question, logits in zip(questions, together, strict=True):
        assert decider.logits(state, [question])[0] == pytest.approx(logits, abs=1e-5)
    assert decider.logits(json.dumps(state), questions)[0] == pytest.approx(together[0], abs=1e-6)


def test_calibration_and_digits() -> None:
    question = Choice("q", ["a", "b", "c"])
    plain = loaded("deberta_simple")
    warm = GLiClass("warm", plain.tokenizer, plain._judge, calibration=Calibration({"choice": 2.0}), digits=3)
    (logits,) = plain.logits(STATE, [question])
    assert warm.logits(STATE, [question])[0] == pytest.approx(logits, abs=1e-6)
    answer = warm.decide(STATE, [question])["q"]
    assert isinstance(answer, ChoiceAnswer)
    assert list(answer.probabilities.values()) == [round(p, 3) for p in shares([z / 2 for z in logits])]
    assert warm.name == "warm"


# ---- receipts ---------------------------------------------------------------------------------------------------


def test_the_receipt_of_one_encoder() -> None:
    answers = loaded("deberta_mlp").decide(STATE, [Choice("team", ["billing", "returns"]), Noul("urgent", "Is it?")])
    counts = loaded("deberta_mlp").classify([STATE], ["billing", "returns"]).token_counts[0]
    counts_noul = loaded("deberta_mlp").classify([STATE], ["Is it?"]).token_counts[0]
    receipt, config = answers.receipt, load_gliclass(str(GOLDEN / "deberta_mlp")).config
    assert (receipt.questions, receipt.sequences, receipt.prompt_tokens) == (2, 2, counts + counts_noul)  # type: ignore[attr-defined]
    assert receipt.visits.total == receipt.visits.dense == 2 * 2 * (counts**2 + counts_noul**2)  # type: ignore[attr-defined]
    text_projector = 2 * 32 * 32
    label = 2 * 32 * 32 + 64 * 256 + 256 * 128 + 128
    assert receipt.weights.bytes_read == 4 * (config.encoder.linear_weights + text_projector + label)  # type: ignore[attr-defined]
    linear = config.encoder.linear_weights * receipt.prompt_tokens + 2 * text_projector + 3 * label
    assert receipt.flops.linear == 2 * linear  # type: ignore[attr-defined]
    assert receipt.as_text.visits > receipt.visits.total  # type: ignore[attr-defined]
    assert answers.to_dict()["usage"] == {"input_tokens": counts + counts_noul, "output_tokens": 0}


def test_a_bi_encoder_reads_each_label_once() -> None:
    batch = loaded("bi_encoder").classify(["see", "Café", "see it"], ["travel", "sport"])
    ids = json.loads((GOLDEN / "bi_encoder.json").read_text())["cases"][1]["batched"]["class_attention_mask"]
    labels = [sum(row) for row in ids]
    assert batch.receipt.sequences == 3 + 2
    assert batch.receipt.prompt_tokens == sum(batch.token_counts) + sum(labels)
    visits = 2 * 2 * sum(n * n for n in batch.token_counts) + 2 * 4 * sum(n * n for n in labels)
    assert batch.receipt.visits.total == visits


def test_nothing_to_classify() -> None:
    for model in ("deberta_simple", "bi_encoder"):
        batch = loaded(model).classify([], ["a"])
        assert batch.logits == batch.probabilities == ()
        assert batch.receipt.visits.total == batch.receipt.weights.bytes_read == 0


def test_numbers_that_are_none() -> None:
    opened = load_gliclass(str(GOLDEN / "deberta_simple"))
    reader = UniReader(opened.config, opened.tokenizer)
    judge = UniEncoder("broken", opened.config, reader, lambda step: [np.full(2, np.nan, np.float32) for _ in step])
    with pytest.raises(BadLogits, match="broken computes no usable numbers"):
        GLiClass("broken", opened.tokenizer, judge).decide(STATE, [Choice("q", ["a", "b"])])


@pytest.mark.parametrize(
    ("texts", "labels", "more", "said"),
    [
        ("one text", ["a"], {}, "texts: is str, not a list"),
        ([5], ["a"], {}, "texts: text 0 is int"),
        (["a"], [], {}, "labels: there are none"),
        (["a"], "sport", {}, "labels: must be texts"),
        (["a"], ["x", 5], {}, "labels: must be texts"),
        (["a"], {"x": {5: ["a"]}}, {}, "labels: must be texts"),
        (["a"], ["x", "y", "x"], {}, "labels: 'x' is there twice"),
        (["a", "b"], [["x"]], {}, "labels: there are lists for 1 texts, and 2 texts"),
        (["a"], ["x"], {"examples": ["text"]}, "examples: 'text' is no example"),
        (["a"], ["x"], {"examples": [{"text": "b"}]}, "labels: must be texts"),
    ],
)
def test_what_cannot_be_classified(texts: Any, labels: Any, more: dict[str, Any], said: str) -> None:
    with pytest.raises(BadParameter, match=said):
        loaded("deberta_simple").classify(texts, labels, **more)


def test_a_bi_encoder_refuses_examples() -> None:
    with pytest.raises(BadParameter, match="a bi-encoder reads none"):
        loaded("bi_encoder").classify(["a"], ["x"], examples=[{"text": "b", "labels": ["x"]}])
