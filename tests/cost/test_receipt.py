"""The receipt's own arithmetic and wording; its counts are judged in tests/engine."""

from __future__ import annotations

import json

import pytest

from heedful.cost.energy import Energy
from heedful.cost.quality import Quality
from heedful.cost.receipt import Flops, KVTraffic, Receipt, Saved, Seconds, Visits, WeightTraffic, human


def receipt(**changed: object) -> Receipt:
    fields = {
        "model": "smollm2",
        "prompt_tokens": 40,
        "cached_tokens": 0,
        "output_tokens": 11,
        "policy": {"kv": "q8"},
        "visits": Visits(900, 100, 1000, 1500, Saved(window=500)),
        "kv": KVTraffic("q8", 10, 20, 1_300_000, 30),
        "weights": WeightTraffic(7),
        "flops": Flops(1, 2),
        "seconds": Seconds(queue=0.0, prefill=0.5, decode=2.0, first_token=0.5, total=2.5),
        "energy": Energy(120.4, 60.0, 300.0, "estimated"),
        "quality": Quality(0.01, 0.1, 0.02, None, "a text"),
        **changed,
    }
    return Receipt(**fields)  # type: ignore[arg-type]


def test_rates_count_computed_prompt_tokens_and_tokens_after_the_first() -> None:
    assert receipt().tokens_per_second == {"prefill": 80.0, "decode": 5.0}
    assert receipt(cached_tokens=30).tokens_per_second["prefill"] == 20.0
    # cancelled before its first token: how much of the prompt was read is not known here
    assert receipt(output_tokens=0).tokens_per_second == {"prefill": None, "decode": None}


def test_the_line() -> None:
    assert receipt().line() == (
        "40 in (0 cached) · 11 out · 5 tok/s · 1 k visits of 1.5 k dense · KV 1.3 MB q8 · ~120 J (estimated 60–300)"
    )
    assert receipt(energy=Energy(0.25, 0.25, 0.25, "measured:rapl")).line().endswith("~0.25 J (measured:rapl)")


def test_json_holds_quality_only_where_it_was_measured() -> None:
    found = json.loads(json.dumps(receipt().to_dict()))
    assert set(found["quality"]) == {"mean_kld", "p99_kld", "mean_delta_nll", "needle_recall", "measured_on"}
    assert receipt(quality=None).to_dict()["quality"] is None


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 "), (999, "999 "), (1000, "1 k"), (56_700, "56.7 k"), (123_456, "123 k"), (2.56e15, "2.56 P")],
)
def test_human_numbers(number: float, text: str) -> None:
    assert human(number) == text
