"""What a decision cost: the sum over the sequences that were read for it. Names and units are those of cost/receipt.py.

A state that all questions share is computed once and found by every other sequence: prompt_tokens − cached_tokens were
computed. `visits.dense == visits.total + sum(visits.saved)`, exactly, as it holds for every part.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import asdict, dataclass
from math import fsum
from typing import Any

from heedful.cost.energy import ESTIMATED, Energy
from heedful.cost.receipt import Flops, Receipt, Saved, Visits, WeightTraffic, human


@dataclass(frozen=True)
class DecisionKV:
    format: str
    """"" where nothing was read."""
    bytes_read: int
    bytes_written: int
    rows_read: int


@dataclass(frozen=True)
class DecisionSeconds:
    total: float
    """Wall time of the whole decision, in which sequences run side by side."""


@dataclass(frozen=True)
class DecisionReceipt:
    model: str
    questions: int
    sequences: int
    prompt_tokens: int
    """Of all sequences, those of the state once for each."""
    cached_tokens: int
    """Of those, found already computed."""
    output_tokens: int
    visits: Visits
    kv: DecisionKV
    weights: WeightTraffic
    flops: Flops
    seconds: DecisionSeconds
    energy: Energy

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it."""
        return asdict(self)

    def line(self) -> str:
        """One line for a terminal."""
        return " · ".join((
            f"{self.questions} question{'' if self.questions == 1 else 's'} in {self.sequences:,} sequences",
            f"{self.prompt_tokens:,} in ({self.cached_tokens:,} cached)",
            f"{human(self.visits.total).strip()} visits of {human(self.visits.dense).strip()} dense",
            f"~{self.energy.joules:.2g} J ({self.energy.source})",
        ))  # fmt: skip


def decision_receipt(model: str, questions: int, parts: ListLike[Receipt], *, seconds: float) -> DecisionReceipt:
    """The sum of `parts`, the receipts of the sequences. `seconds`: from the question to the answer."""
    visits = [part.visits for part in parts]
    return DecisionReceipt(
        model=model,
        questions=questions,
        sequences=len(parts),
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        cached_tokens=sum(part.cached_tokens for part in parts),
        output_tokens=sum(part.output_tokens for part in parts),
        visits=Visits(
            prefill=sum(v.prefill for v in visits),
            decode=sum(v.decode for v in visits),
            total=sum(v.total for v in visits),
            dense=sum(v.dense for v in visits),
            saved=Saved(
                sum(v.saved.window for v in visits),
                sum(v.saved.pages for v in visits),
                sum(v.saved.prefix for v in visits),
            ),
            rejected=sum(v.rejected for v in visits),
            recomputed=sum(v.recomputed for v in visits),
        ),
        kv=DecisionKV(
            format=parts[0].kv.format if parts else "",
            bytes_read=sum(part.kv.bytes_read for part in parts),
            bytes_written=sum(part.kv.bytes_written for part in parts),
            rows_read=sum(part.kv.rows_read for part in parts),
        ),
        weights=WeightTraffic(sum(part.weights.bytes_read for part in parts)),
        flops=Flops(
            sum(part.flops.linear for part in parts),
            sum(part.flops.attention for part in parts),
            sum(part.flops.selection for part in parts),
        ),
        seconds=DecisionSeconds(seconds),
        energy=Energy(
            fsum(part.energy.joules for part in parts),
            fsum(part.energy.low for part in parts),
            fsum(part.energy.high for part in parts),
            parts[0].energy.source if parts else ESTIMATED,
        ),
    )
