"""Deciders whose weights are quantized at load: near what they compute in float32, and fewer bytes in the receipt."""

from __future__ import annotations

from pathlib import Path

import pytest

from heedful.decide import Choice, Noul, Question, Score
from heedful.decide.decider import DecisionModel
from heedful.decide.load import NONE, load_decider
from heedful.errors import BadParameter

pytest.importorskip("heedful._native")

GOLDEN = Path(__file__).parent.parent / "golden/decisions"
STATE = "I was charged twice for order 88"
QUESTIONS: list[Question] = [
    Choice("team", ["billing", "returns"], "Who?"),
    Noul("urgent", "Is it urgent?"),
    Score("anger", ["calm", "annoyed", "furious"], "How upset?"),
]


def logits(decider: DecisionModel) -> list[float]:
    return [number for of_one in decider.logits(STATE, QUESTIONS) for number in of_one]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "folder",
    ["laya/sequential", "laya/parallel", "kev/adapter", "gliclass/bi_encoder", "gliclass/modernbert_simple"],
)
def test_packed_deciders_stay_near_float32(folder: str) -> None:
    """Random tiny models enlarge what rounding changes: real ones are held to vectors of sentences elsewhere."""
    exact, packed = (load_decider(str(GOLDEN / folder), weights=w, threads=1, calibration=NONE) for w in (None, "q8"))
    expected, found = logits(exact), logits(packed)
    assert 0 < max(abs(a - b) for a, b in zip(expected, found, strict=True)) < 0.3


def test_the_receipt_reads_the_packed_bytes() -> None:
    """All matrices of this Kev's layers fit blocks of 32; its head stays float32."""
    exact, packed = (
        load_decider(str(GOLDEN / "kev/adapter"), weights=w, threads=1, calibration=NONE) for w in (None, "q8")
    )
    network = exact._network  # type: ignore[attr-defined]
    head_bytes = 2 * 4 * network.head_weights * len(QUESTIONS)
    read = [decider.decide(STATE, QUESTIONS).receipt.to_dict()["weights"]["bytes_read"] for decider in (exact, packed)]
    assert (read[1] - head_bytes) / (read[0] - head_bytes) == 272 / 256 / 4


def test_a_server_has_its_own_weights() -> None:
    with pytest.raises(BadParameter, match="weights: means nothing to jev"):
        load_decider("jev", weights="q8")
