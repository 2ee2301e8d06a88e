"""The recipe of heedful-decider: its rows, splits, order and settings. No packages are fetched."""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from recipes.decider import packaged, rows
from recipes.decider.checkpoint import facts_of, write_halves
from recipes.decider.drawn import AGAIN_STEPS, BATCH, COOLING_STEPS, STEPS, labelled
from recipes.decider.evaluate import interval, keep_temperatures, most_frequent
from recipes.decider.generated import FEELINGS, INTENTS, TOPICS, generated_domains
from recipes.decider.rows import HELD_OUT_WHOLE, Row, choice, noul, one_hot, split_of, take

from heedful.decide.calibrate import Calibration
from heedful.decide.laya import Laya
from heedful.train.decision_store import decision_rows
from heedful.train.loop import begin, complete
from heedful.train.schedule import rate_share
from heedful.train.settings import TrainSettings, changed, from_file
from heedful.weights.run_folder import model_in

GENERATED = generated_domains(150)


def test_a_split_does_not_depend_on_numbers_case_or_spacing() -> None:
    assert split_of("Order 17 is late") == split_of("order  93418 IS late")
    assert split_of({"b": 1, "a": "x"}) == split_of({"a": "x", "b": 22})


def test_splits_have_the_shares_they_should_and_differ_by_state() -> None:
    letters = random.Random(0)
    states = {"".join(letters.choices("abcdefgh", k=12)) for _ in range(4000)}
    counts = Counter(map(split_of, states))
    assert counts[rows.TEST] / len(states) == pytest.approx(0.15, abs=0.02)
    assert counts[rows.VALIDATION] / len(states) == pytest.approx(0.10, abs=0.02)


def test_a_whole_held_out_domain_is_never_taught() -> None:
    state = next(
        text for at in range(100) if split_of(text := f"state {chr(97 + at % 26)}{at // 26 * 'z'}") == rows.TRAIN
    )
    assert rows.is_taught("tweets", state)
    assert not any(rows.is_taught(domain, state) for domain in HELD_OUT_WHOLE)


def test_rows_are_the_same_in_every_run_and_survive_a_file(tmp_path: Path) -> None:
    assert generated_domains(150) == GENERATED
    kept = take(GENERATED["records"], 20)
    assert take(reversed(GENERATED["records"]), 20) == kept
    rows.write_rows(tmp_path / "rows.jsonl", kept)
    assert rows.read_rows(tmp_path / "rows.jsonl") == kept


@pytest.mark.parametrize(("domain", "meanings"), [("topics", TOPICS), ("intents", INTENTS), ("feelings", FEELINGS)])
def test_generated_choices_name_what_the_state_was_made_of(
    domain: str, meanings: dict[str, dict[str, list[str]]]
) -> None:
    checked = 0
    for row in GENERATED[domain]:
        options = list(row.question["criteria"] or ())
        said = [name for name, of in meanings.items() if any(text.lower() in row.state.lower() for text in of["texts"])]
        if row.question["type"] != "choice" or not set(options) <= {*meanings, "other"}:
            continue
        right = options[row.label]
        assert right in said if right != "other" else not set(said) & set(options), row
        checked += 1
    assert checked > 50


def test_generated_records_and_facts_are_answered_by_their_states() -> None:
    checked = 0
    for row in GENERATED["records"] + GENERATED["facts"]:
        asked = row.question["instructions"]
        if row.question["type"] != "choice" or not isinstance(row.state, dict) or not asked.startswith("What is "):
            continue
        words = asked.removeprefix("What is ").removesuffix("?").removeprefix("the ").split("'s ")
        known = row.state
        for word in words:
            known = known[word]
        assert list(row.question["criteria"])[row.label] == known, row
        checked += 1
    assert checked > 15


def test_sentiment_leaves_out_what_people_disagree_about() -> None:
    lines = "1\t3.1\tlovely\n2\t-2.0\tawful\n3\t0.7\thm\n4\t0.1\tit is a phone\n"
    made = list(packaged._sentiment("tweets", "message", {"x": lines.encode()}))
    assert list(dict.fromkeys(row.state for row in made)) == ["lovely", "awful", "it is a phone"]
    asked = Counter(row.state for row in made)
    assert all(asked[state] == (2 if split_of(state) == rows.TRAIN else 1) for state in asked)


def test_conversations_are_read_with_continued_lines() -> None:
    text = "categories:\n- food\nconversations:\n- - do you\n    eat?\n  - 'no, never'\n- - Hi\n  - Hello\n"
    assert packaged._conversations(text) == [["do you eat?", "no, never"], ["Hi", "Hello"]]


RECIPE = Path(__file__).parents[2] / "recipes" / "decider"


def test_the_rate_goes_on_where_the_first_part_stopped_and_cools_to_nothing() -> None:
    names = ("first", "cool", "again")
    first, cool, again = (changed(TrainSettings(), from_file(RECIPE / f"{name}.toml")) for name in names)
    assert (first.run.steps, cool.run.steps, first.decide.batch) == (STEPS, COOLING_STEPS, BATCH) == (5000, 800, 8)
    rates = [5e-4 * rate_share(step, 5000, first.optim) for step in range(5000)]
    warm = 240
    assert rates[:warm] == pytest.approx([5e-4 * (at + 1) / warm for at in range(warm)])
    assert rates[warm:] == sorted(rates[warm:], reverse=True)
    by_hand = 0.5 * (1 + math.cos(math.pi * (4999 - warm) / (8000 - warm)))
    assert rates[-1] == pytest.approx(5e-4 * by_hand)
    cooled = [1.5e-4 * rate_share(step, 800, cool.optim) for step in range(800)]
    assert cooled[0] == pytest.approx(rates[-1], rel=0.1)
    assert cooled == pytest.approx([1.5e-4 * (1 - step / 800) for step in range(800)], abs=3e-7)
    assert (cool.model.base, again.model.base) == ("build/decider/runs/first", "build/decider/runs/cool")
    assert again.run.steps == AGAIN_STEPS
    warmed = [rate_share(step, AGAIN_STEPS, again.optim) for step in (49, 50, AGAIN_STEPS - 1)]
    assert warmed[:2] == pytest.approx([1, 1])
    assert warmed[2] == pytest.approx(0, abs=1e-6)
    for settings in (first, cool, again):
        assert (settings.lora.rank, settings.lora.told_alpha, settings.data.shuffle) == (16, 32, False)
        complete(settings)


def test_rows_are_laid_down_as_they_are_drawn(some_rows: list[Row], tmp_path: Path) -> None:
    """The file that is trained on gives each row with its shares."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(labelled(row))}\n" for row in some_rows))
    for read, row in zip(decision_rows([path]), some_rows, strict=True):
        assert (read.state, read.target) == (row.state, row.target)
        assert read.question.to_dict() == row.typed().to_dict()


@pytest.fixture(scope="module")
def some_rows() -> list[Row]:
    return [row for rows in GENERATED.values() for row in rows[:8]]


def test_a_short_training_becomes_the_folder_that_is_shipped(
    minilm_dir: Path, some_rows: list[Row], tmp_path: Path
) -> None:
    """Two runs, the second from the first, as the recipe has it; halves answer as the run does."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(labelled(row))}\n" for row in some_rows))
    given = {"data.decisions": [str(path)], "data.validation": [], "data.validation_share": 0, "decide.batch": 2}
    given |= {"run.steps": 2, "run.threads": 1, "run.sample_every": 0}
    runs = [tmp_path / "first", tmp_path / "cool"]
    for run, more in zip(runs, ({}, {"model.base": str(runs[0])}), strict=True):
        settings = changed(TrainSettings(), {**from_file(RECIPE / f"{run.name}.toml"), **given, **more})
        begin(run, settings, say=lambda line: None)
    write_halves(model_in(runs[1]), tmp_path / "model")
    facts = facts_of(runs)
    assert (facts["loss"], facts["batch"], facts["steps"]) == ("ce", 2, 4)
    keep_temperatures(tmp_path / "model", Calibration({"score": 2.0}))
    trained, shipped = (Laya.load(str(folder), threads=1) for folder in (runs[1], tmp_path / "model"))
    assert shipped.calibration.temperature("score", 3) == 2
    assert sum(file.stat().st_size for file in (tmp_path / "model").iterdir()) < 12_000_000
    for row in some_rows[:6]:
        ours, theirs = (decider.logits(row.state, [row.typed()])[0] for decider in (trained, shipped))
        np.testing.assert_allclose(ours, theirs, atol=5e-3)


def test_the_bootstrap_draws_groups() -> None:
    """Ten groups of ten equal rows vary as ten rows do, not as a hundred."""
    question = noul("?")
    alike = [Row("d", f"{g}", question, one_hot(1, 2), group=str(g)) for g in range(10) for _ in range(10)]
    apart = [Row("d", f"{g}", question, one_hot(1, 2)) for g in range(10) for _ in range(10)]
    values = np.array([float(g < 5) for g in range(10) for _ in range(10)])
    wide, narrow = interval(alike, values), interval(apart, values)
    assert wide[0] < 0.25 < 0.35 < narrow[0] < 0.5 < narrow[1] < 0.65 < 0.75 < wide[1]


def test_the_most_frequent_answer_is_one_of_the_options() -> None:
    first, second = choice("?", {"a": None, "b": None}), choice("?", {"b": None, "c": None})
    some = [
        Row("d", "1", first, one_hot(0, 2)),
        Row("d", "2", first, one_hot(0, 2)),
        Row("d", "3", second, one_hot(1, 2)),
    ]
    assert most_frequent(some) == [0, 0, 1]
