"""`heedful plan` as somebody types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.plan.test_capacity import SPEED, bench_of

from heedful.cli.main import run
from heedful.cost.formulas import generation_cost
from heedful.cost.shapes import KNOWN

SMALL = ("--users", "300", "--context", "2000", "--output", "100", "--requests", "200")


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "smollm2", *SMALL, "--price-per-hour", "0.1"]) == 0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines()]
    assert [row[0] for row in rows[3:8]] == ["q8", "q4", "window", "budget", "sparse"]
    assert float(rows[3][1]) * 2.4 <= float(rows[3][-3])
    assert "Speed: assumed" in said
    assert "routing by prefix affinity: " in said


def test_json_has_the_exact_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, "-m", "smollm2", *SMALL, "--policy", "q8")
    (plan,) = found["plans"]
    assert plan["visits_per_request"] == generation_cost(KNOWN["smollm2"].shape(), 2000, 100).visits
    assert found["simulated"]["replicas"] == plan["replicas"]
    assert asked(capsys, "smollm2", *SMALL, "--policy", "q8") == found, "the same command says the same"
    assert asked(capsys, "smollm2", *SMALL, "--requests", "0")["simulated"] is None


def test_measured_figures_are_used(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({**bench_of(SPEED), "kv_format": "q8"}))
    found = asked(capsys, "smollm2", *SMALL, "--bench", str(file))
    assert {plan["speed"] for plan in found["plans"]} == {"measured: m on 3 threads, q8 keys and values"}


def test_a_model_by_its_numbers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    about = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672}
    about |= {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
    config.write_text(json.dumps({**about, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5}))
    machine = ("--bandwidth", "3000", "--gflops", "900000", "--memory", "640GB", "--weights", "f16")
    found = asked(capsys, str(config), *machine, *SMALL, "--policy", "q8", "--requests", "0")
    assert found["plans"][0]["kv_bytes_per_sequence"] == 2100 * 80 * 2 * 8 * (128 + 4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--users", "0"], "--users: must be 1 to"),
        (["--policy", "q9"], "'q9' is not known"),
        (["--turns", "30"], "--context: of 4,000 leaves 133 for each of 30 turns"),
        (["--shared", "4000"], "--shared: must be 0 to 3,999"),
        (["--bench", "nowhere.json"], "nowhere.json cannot be read"),
        (["--memory", "50MB"], "have no room for the weights"),
        (["--routing", "luck"], "must be affinity or random"),
        (["minilm"], "is an encoder"),
        (["smollm2", "--model", "smollm2"], "stands there twice"),
        (["--weights", "q3"], "is not a number format"),
        (["no-such-model"], "no-such-model"),
    ],
)
def test_wrong_things_are_said(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert run(["plan", *arguments]) in (1, 2)
    assert said in capsys.readouterr().err
