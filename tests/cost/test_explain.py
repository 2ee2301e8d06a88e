"""What other policies would have cost, against the receipts of the same request made under them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heedful.cost.explain import Explained, explain
from heedful.cost.meter import RunnerFacts
from heedful.cost.quality import Quality
from heedful.cost.receipt import Receipt
from heedful.models.config import ModelConfig
from heedful.request import CachePolicy
from policy_cases import config_of, counted

CONFIG = config_of([None, None, 100, None], heads=4, kv_heads=2, head_dim=32)
FACTS = RunnerFacts(linear_bytes=10**9, head_bytes=31 * 10**6)
POLICIES = {
    "--kv q8": CachePolicy("q8"),
    "--kv f16": CachePolicy("f16"),
    "--kv q4": CachePolicy("q4"),
    "--window 1024 --sinks 4": CachePolicy("q8", window=1024, sinks=4),
    "--budget 1024": CachePolicy("q8", budget=1024),
    "--prefill sparse": CachePolicy("q8", sparse_prefill=True),
}


def explained(receipt: Receipt, config: ModelConfig = CONFIG, model: str = "toy") -> dict[str, Explained]:
    return {row.policy: row for row in explain(model, config, FACTS, receipt)}


@pytest.mark.parametrize("made_under", [CachePolicy("q8"), CachePolicy("q4", window=300)])
def test_each_policy_is_what_its_receipt_would_have_said(made_under: CachePolicy) -> None:
    rows = explained(counted(CONFIG, made_under, prompt=2500, output=150))
    for name, policy in POLICIES.items():
        receipt = counted(CONFIG, policy, prompt=2500, output=150)
        assert rows[name].visits == receipt.visits.total
        assert rows[name].dense_visits == receipt.visits.dense
        assert rows[name].kv_bytes_read == receipt.kv.bytes_read
        assert rows[name].kv_bytes_held <= receipt.kv.bytes_held_peak
        assert not rows[name].changes_nothing


def test_a_prompt_that_is_there_already_is_computed_from_its_last_page_on() -> None:
    row = explained(counted(CONFIG, CachePolicy("q8"), prompt=130, output=3))["the prompt a second time"]
    queries = [*range(129, 133)]  # two whole pages are there; two prompt tokens and two output tokens are computed
    assert row.visits == 4 * sum(3 * seen + 100 for seen in queries)
    # the layer with the window reads, of the first step, the keys that its older query sees besides its own two
    keys = 3 * (130 + 131 + 132) + 101 + 100 + 100
    assert row.kv_bytes_read == 2 * 2 * keys * 36


def test_a_short_request_says_what_changes_nothing() -> None:
    rows = explained(counted(CONFIG, CachePolicy("q8"), prompt=40, output=20))
    same = {name for name, row in rows.items() if row.changes_nothing}
    assert same == set(rows) - {"--kv q8", "--kv f16"}


def test_time_is_that_of_the_weights_as_they_lie_here() -> None:
    row = explained(counted(CONFIG, CachePolicy("q8"), prompt=10, output=3))["--kv q8"]
    # the prefill and two decode steps read 1,031 MB each, at 31 GB/s; a few kB of keys and values
    assert row.seconds == pytest.approx(3 * 1.031 / 31, rel=1e-4)


def test_an_end_of_text_token_costs_a_step_though_it_is_no_output() -> None:
    receipt = counted(CONFIG, CachePolicy("q8"), prompt=10, output=4)
    as_it_ended = replace(receipt, output_tokens=3)
    assert explained(as_it_ended)["--kv q8"].visits == receipt.visits.total


def test_what_was_measured_stands_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Quality(0.01, 0.1, 0.005, 0.9, "a text")
    known = {("toy", CachePolicy("q4")): found, ("toy", CachePolicy("q8")): replace(found, mean_kld=0.001)}
    monkeypatch.setattr("heedful.cost.explain.measured_quality", lambda *asked: known.get(asked))
    rows = explained(counted(CONFIG, CachePolicy("q8"), prompt=600, output=3))
    assert rows["--kv q4"].quality == found
    assert rows["--budget 1024"].quality is None
    again = rows["the prompt a second time"].quality  # it changes nothing that 8-bit rows do not
    assert again is not None
    assert again.mean_kld == 0.001


def test_nothing_is_said_of_what_was_never_computed() -> None:
    receipt = counted(CONFIG, CachePolicy("q8"), prompt=10, output=3)
    none_made = replace(receipt, visits=replace(receipt.visits, dense=0))
    assert explain("toy", CONFIG, FACTS, none_made) == []
