"""The recipe of heedful-decider: its rows, splits, losses and updates. No packages are fetched, nothing is trained."""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from recipes.decider import packaged, rows
from recipes.decider.checkpoint import head_tensors, write, write_fresh
from recipes.decider.evaluate import interval, most_frequent
from recipes.decider.generated import FEELINGS, INTENTS, TOPICS, generated_domains
from recipes.decider.lora import ALPHA, RANK, LowRankLinear, add_updates, set_updates, update_tensors
from recipes.decider.losses import SAMPLES, SPHERICAL_WEIGHT, cross_entropy, policy_loss, rewards
from recipes.decider.rows import HELD_OUT_WHOLE, Row, choice, noul, one_hot, split_of, take
from recipes.decider.train import COOLING, COOLING_RATE, SCHEDULED, STEPS, WARM_UP, Plan, rate_share

from heedful.decide.calibrate import Calibration
from heedful.decide.laya_input import LayaPacker
from heedful.engine.torch_laya import make_laya, question_logits
from heedful.weights.load_laya import load_laya

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


def padded(of: list[list[float]]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(one) for one in of], batch_first=True)


LOGITS, TARGETS = [[0.3, -1.0, 2.0], [0.5, 0.1]], [[0.0, 0.25, 0.75], [1.0, 0.0]]
MASK = torch.tensor([[True, True, True], [True, True, False]])


def test_cross_entropy_by_hand() -> None:
    def of(z: list[float], t: list[float]) -> float:
        total = sum(map(math.exp, z))
        return -sum(share * math.log(math.exp(x) / total) for x, share in zip(z, t, strict=True))

    by_hand = sum(map(of, LOGITS, TARGETS)) / 2
    assert cross_entropy(padded(LOGITS), padded(TARGETS), MASK).item() == pytest.approx(by_hand, abs=1e-6)


def test_rewards_by_hand() -> None:
    shares = [[0.2, 0.3, 0.5], [0.9, 0.1]]
    is_score = torch.tensor([True, False])
    found = rewards(padded(shares)[None], padded(TARGETS), MASK, is_score)[0].tolist()
    for p, t, scale, got in zip(shares, TARGETS, is_score.tolist(), found, strict=True):
        log_score = sum(a * math.log(b) for a, b in zip(t, p, strict=True))
        spherical = sum(a * b for a, b in zip(t, p, strict=True)) / math.sqrt(sum(b * b for b in p))
        ranked = sum((sum(p[: k + 1]) - sum(t[: k + 1])) ** 2 for k in range(len(p))) / (len(p) - 1)
        assert got == pytest.approx(log_score + SPHERICAL_WEIGHT * spherical - ranked * scale, abs=1e-5)


def test_the_policy_loss_pulls_towards_the_copies_that_earn_more() -> None:
    """Its gradient is −mean of A · noise / σ² over copies and questions: by loops, from the same noise."""
    sigma, is_score = 0.4, torch.tensor([False, True])
    logits = padded(LOGITS).requires_grad_()
    policy_loss(logits, padded(TARGETS), MASK, is_score, sigma, torch.Generator().manual_seed(3)).backward()
    noise = (sigma * torch.randn((SAMPLES, 2, 3), generator=torch.Generator().manual_seed(3))).numpy()
    noise[:, 1, 2] = 0
    noise[:, 0] -= noise[:, 0].mean(-1, keepdims=True)
    noise[:, 1, :2] -= noise[:, 1, :2].mean(-1, keepdims=True)
    copies = torch.tensor(padded(LOGITS).numpy() + noise).masked_fill(~MASK, -1e4).softmax(-1)
    reward = rewards(copies, padded(TARGETS), MASK, is_score).numpy()
    advantage = (reward - reward.mean(0)) / (reward.std(ddof=1) + 1e-6)
    by_hand = -(advantage[:, :, None] * noise / sigma**2).sum(0) / (SAMPLES * 2)
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad.numpy(), by_hand, atol=1e-5)


def test_the_rate_rises_then_falls_to_nothing() -> None:
    steps, warm = 1000, round(1000 * WARM_UP)
    rates = [rate_share(step, steps) for step in range(steps)]
    assert rates[: warm + 1] == pytest.approx([*((at + 1) / warm for at in range(warm)), 1.0])
    assert rates[warm:] == sorted(rates[warm:], reverse=True)
    assert rates[(steps + warm) // 2] == pytest.approx(0.5, abs=0.01)
    assert rates[-1] < 0.001


def test_the_rate_goes_on_where_the_first_part_stopped_and_cools_to_nothing() -> None:
    first, second = (Plan("ce", steps, (), Path(), cools) for steps, cools in ((STEPS, False), (COOLING, True)))
    assert first.rate(STEPS - 1) == rate_share(STEPS - 1, SCHEDULED)
    assert second.rate(0) == pytest.approx(first.rate(STEPS), abs=0.03) == COOLING_RATE
    assert second.rate(COOLING // 2) == pytest.approx(COOLING_RATE / 2)
    assert second.rate(COOLING) == 0
    assert Plan("ce", 100, (), Path(), cools=False).rate(99) == rate_share(99, 100)


def test_a_low_rank_update_is_the_sum_that_its_pairs_make() -> None:
    torch.manual_seed(1)
    linear = LowRankLinear(nn.Linear(8, 12), parts=3)
    nn.init.normal_(linear.b)
    merged = linear.base.weight + ALPHA / RANK * torch.cat([b @ a for a, b in linear.pairs()])
    x = torch.randn(5, 8)
    assert all(a.shape == (RANK, 8) and b.shape == (4, RANK) for a, b in linear.pairs())
    torch.testing.assert_close(linear(x), nn.functional.linear(x, merged, linear.base.bias))


def test_what_was_trained_is_what_the_engine_loads(tmp_path: Path, minilm_dir: Path) -> None:
    """The network as trained, updates beside their matrices, against the written folder as the engine merges it."""
    write_fresh(tmp_path)
    loaded = load_laya(tmp_path)
    trained = make_laya(loaded.config, loaded.trunk, loaded.head, threads=1)
    torch.manual_seed(2)
    add_updates(trained.trunk)
    for parameter in [*trained.head.parameters(), *(p for p in trained.trunk.parameters() if p.requires_grad)]:
        parameter.data = (parameter + 0.02 * torch.randn(parameter.shape)).half().float()
    write(
        tmp_path, {**head_tensors(trained.head, loaded), **update_tensors(trained.trunk)}, Calibration({"score": 2.0})
    )
    again = load_laya(tmp_path)
    shipped = make_laya(again.config, again.trunk, again.head, updates=again.updates, threads=1)
    packer = LayaPacker(again.tokenizer, again.marks, again.layout)
    asked = [row.typed() for row in GENERATED["facts"][:3]]
    sequences = [packer.pack(one, packer.state("Ivan's pet is dog.")).sequence for one in asked]
    with torch.no_grad():
        before, after = (torch.cat(question_logits(network, sequences)) for network in (trained, shipped))
        going_on = make_laya(again.config, again.trunk, again.head, threads=1)
        add_updates(going_on.trunk)
        set_updates(going_on.trunk, load_file(tmp_path / "model.safetensors"))
        resumed = torch.cat(question_logits(going_on, sequences))
    torch.testing.assert_close(before, after, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(before, resumed, atol=2e-4, rtol=1e-4)
    assert again.settings["temperature"] == [1.0, 2.0, 1.0]


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
