"""Receipts of decisions: sums of passes of encoders, and what the same questions would have cost as text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from heedful.cost.encoder_receipt import EncoderReceipt, EncoderSeconds, EncoderVisits
from heedful.cost.energy import Energy
from heedful.cost.receipt import Flops, Saved, WeightTraffic
from heedful.decide import Choice, Noul, Question, Score
from heedful.decide.answer import answer_to
from heedful.decide.as_text import Reader, default_reader, with_text_cost
from heedful.decide.chat_prompt import prompt_text
from heedful.decide.receipt import encoder_decision_receipt
from heedful.weights.load import load_config
from heedful.weights.source_names import default_model

PASS = EncoderReceipt(
    model="m",
    texts=2,
    prompt_tokens=30,
    dropped_tokens=3,
    steps=1,
    visits=EncoderVisits(total=70, dense=100, saved=Saved(window=30)),
    weights=WeightTraffic(400),
    flops=Flops(11, 13),
    seconds=EncoderSeconds(0.1, 0.2),
    energy=Energy(1.0, 0.5, 1.5, "estimated"),
)


def test_passes_of_encoders_sum_up() -> None:
    receipt = encoder_decision_receipt("m", 3, [PASS, replace(PASS, texts=1, prompt_tokens=12)], seconds=0.5)
    assert (receipt.questions, receipt.sequences, receipt.prompt_tokens, receipt.dropped_tokens) == (3, 3, 42, 6)
    assert receipt.visits.total == receipt.visits.prefill == 140
    assert receipt.visits.dense == 200 == receipt.visits.total + receipt.visits.saved.window
    assert (receipt.weights.bytes_read, receipt.flops.linear, receipt.flops.attention) == (800, 22, 26)
    assert (receipt.energy.joules, receipt.seconds.total, receipt.kv.bytes_read) == (2.0, 0.5, 0)
    assert "as text" not in receipt.line()


def test_the_cost_as_text_counts_every_visit_of_a_chat_model() -> None:
    """Against counting position by position: 1 word is 1 token, 3 layers of 2 heads."""
    questions: list[Question] = [
        Choice("c", ["red car", "blue"], "Which?"),
        Noul("n", "Is it?"),
        Score("s", ["low", "high"]),
    ]
    answers = {q.name: answer_to(q, [0.9, 0.1]) for q in questions}
    reader = Reader("three by two", 6, lambda text: len(text.split()))
    found = with_text_cost(
        encoder_decision_receipt("m", 3, [PASS], seconds=0.1), "a state", questions, answers, reader
    ).as_text
    assert found is not None
    said = {"c": 2, "n": 1, "s": 1}  # "red car", "no", "0"
    visits = prompts = 0
    for question in questions:
        prompt = len(prompt_text("a state", question, [0, 1]).split())
        read = prompt + said[question.name]  # the token that ends the turn is written, and then not read
        visits += sum(6 * (position + 1) for position in range(read))
        prompts += prompt
    assert (found.prompt_tokens, found.output_tokens, found.visits) == (prompts, 4 + 3, visits)


def test_the_line_of_the_receipt_shows_both() -> None:
    question = Noul("n", "Is it?")
    receipt = with_text_cost(
        encoder_decision_receipt("m", 1, [PASS], seconds=0.1), "s", [question], {"n": answer_to(question, [0, 1])},
        Reader("r", 1, lambda text: 1000),
    )  # fmt: skip
    assert "dense · 2 M as text" in receipt.line()
    assert receipt.to_dict()["as_text"]["model"] == "r"


def test_the_default_reader_is_the_default_model(smollm2_path: Path) -> None:
    config = load_config(smollm2_path)
    assert default_reader(len).name == default_model
    assert default_reader(len).layer_heads == config.num_layers * config.num_heads
