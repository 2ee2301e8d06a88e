"""Which policy a view recommends: by what was measured of it, else by the attention mass it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from heedful.cost.formulas import Shape, generation_cost
from heedful.cost.paper import page_policy
from heedful.cost.quality import measured_quality
from heedful.request import CachePolicy
from heedful.view.coverage import Budget, curve, recommend

DENSE = 1000
WINDOW = CachePolicy("q8", window=1024, sinks=4)
PAGES = CachePolicy("q8", budget=512)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path))


def point(policy: CachePolicy, mass: float, visits: int) -> Budget:
    return Budget(policy, policy.budget or (policy.window or 0) + policy.sinks, mass, 0, visits)


def test_a_measurement_says_more_than_mass() -> None:
    """Shipped with the package: the window loses 0.027 nats on SmolLM2, the budget of 512 loses 0.074."""
    quality = measured_quality("smollm2", WINDOW)
    assert quality is not None
    found = recommend("smollm2", [point(WINDOW, 0.8, 500), point(PAGES, 0.99, 400)], DENSE)
    assert found.budget is not None
    assert found.budget.options == "--window 1024 --sinks 4"
    assert found.quality == quality
    assert found.measure == ""


def test_where_nothing_was_measured_mass_decides() -> None:
    wide = CachePolicy("q8", window=2048, sinks=4)
    found = recommend("my model", [point(WINDOW, 0.94, 400), point(wide, 0.96, 600), point(PAGES, 0.97, 700)], DENSE)
    assert found.budget is not None
    assert found.budget.options == "--window 2048 --sinks 4"
    assert found.quality is None
    assert found.measure == "heedful eval policy -m 'my model' --policy kv=q8,window=2048,sinks=4"


@pytest.mark.parametrize(
    "one",
    [
        point(WINDOW, 0.94, 400),
        point(WINDOW, 0.99, DENSE),
        point(CachePolicy("q8", window=64, sinks=4), 0.99, 100),
    ],
    ids=["keeps too little", "saves nothing", "says nothing of long texts"],
)
def test_else_full_attention(one: Budget) -> None:
    assert recommend("unknown", [one], DENSE).budget is None


def test_a_curve_counts_on_paper() -> None:
    shape = Shape(layers=4, heads=2, kv_heads=1, head_dim=8)
    (found,) = curve([WINDOW], [[0.9, 1.0, 0.96, 0.94]], shape, prompt=3000, computed=3010)
    assert found.mass == pytest.approx(0.95)
    assert found.layers_enough == 2
    assert found.tokens == 1028
    assert found.visits == generation_cost(shape, 3000, 11, policy=page_policy(WINDOW)).visits
