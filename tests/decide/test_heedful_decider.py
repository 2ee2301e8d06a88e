"""The decider that comes with the package: what it weighs, what it knows on rows it was not trained on, and that the
order of options does not matter to it. The rows are some of the recipe's own held-out ones.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import heedful
from heedful.decide import Choice, Noul, Score
from heedful.decide.laya import Laya
from heedful.decide.load import BUILT_IN, BUILT_IN_FOLDER, default_decider
from heedful.decide.question import questions_from_json

ROWS = Path(__file__).parent.parent / "golden" / "decisions" / "heedful_decider" / "rows.jsonl"
MOST_BYTES = 12_000_000
LEAST_RIGHT = 0.79
"""Of 42 rows: two standard errors below what the card states for all held-out rows."""


@pytest.fixture(scope="module")
def decider(minilm_dir: Path) -> Laya:
    return Laya.load(BUILT_IN, threads=1)


def held_out_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]


def test_it_is_small_and_lies_in_the_package() -> None:
    assert BUILT_IN_FOLDER.parent.parent == Path(heedful.__file__).parent
    files = {path.name: path.stat().st_size for path in BUILT_IN_FOLDER.iterdir()}
    assert set(files) == {"MODEL_CARD.md", "model.safetensors", "rl_agent_config.json"}
    assert sum(files.values()) <= MOST_BYTES
    assert default_decider() == BUILT_IN


def test_its_card_states_what_was_measured() -> None:
    card = (BUILT_IN_FOLDER / "MODEL_CARD.md").read_text(encoding="utf-8")
    results = json.loads((Path(__file__).parents[2] / "recipes" / "decider" / "results.json").read_text())
    for part in ("test", "held_out"):
        for domain, found in results[part]["domains"].items():
            (line,) = [line for line in card.splitlines() if line.startswith(f"| {domain} |")]
            cells = line.split(" | ")
            assert all(f"{found[name]:.3f}" in cells for name in ("accuracy", "ece", "majority", "embedding")), line
    config = json.loads((BUILT_IN_FOLDER / "rl_agent_config.json").read_text())
    assert config["temperature"] == [
        pytest.approx(results["temperatures"]["temperature"][kind], abs=1e-4) for kind in ("choice", "score", "noul")
    ]


def test_it_answers_rows_that_it_was_not_trained_on(decider: Laya) -> None:
    right = []
    for row in held_out_rows():
        (question,) = questions_from_json({"q": row["question"]})
        (logits,) = decider.logits(row["state"], [question])
        right.append(max(range(len(logits)), key=logits.__getitem__) == row["label"])
    assert len(right) >= 40
    assert sum(right) / len(right) >= LEAST_RIGHT, right


def test_the_order_of_options_does_not_matter(decider: Laya) -> None:
    choices = [row for row in held_out_rows() if row["question"]["type"] == "choice"][:8]
    for row in choices:
        (question,) = questions_from_json({"q": row["question"]})
        assert isinstance(question, Choice)
        turned = replace(question, options=dict(reversed(question.described().items())))
        straight, reverse = (
            decider.decide(row["state"], [one]).to_dict()["answers"]["q"] for one in (question, turned)
        )
        assert reverse["choice"] == straight["choice"]
        for name, share in straight["probabilities"].items():
            assert reverse["probabilities"][name] == pytest.approx(share, abs=1e-5)


def test_255_options_fit(decider: Laya) -> None:
    options: dict[str, str | None] = {f"option number {at}": None for at in range(254)}
    answers = decider.decide(
        "I want my money back.", [Choice("what", {**options, "refund": None}, "What is asked for?")]
    )
    shares = answers["what"].probabilities  # which is right among so many is more than it learned
    assert list(shares) == [*options, "refund"]
    assert sum(shares.values()) == pytest.approx(1, abs=1e-6)
    assert len(set(shares.values())) > 200


def test_it_answers_all_three_types_at_once(decider: Laya) -> None:
    """What heedful says of itself in its documents: a plain case of each."""
    answers = decider.decide(
        "I was charged twice for my order and nobody answers. Give me my money back today, I am furious!",
        [
            Choice(
                "team", {"billing": "charges, refunds, invoices", "shipping": "parcels and delivery"}, "Who owns this?"
            ),
            Noul("angry", "Is the writer angry?"),
            Score("urgency", ["can wait", "this week", "immediately"], "How urgent is this?"),
        ],
    )
    assert answers["team"].value == "billing"
    assert answers["angry"].value is True
    assert answers["urgency"].value > 1
