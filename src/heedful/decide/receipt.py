"""What a decision cost: the sum over the sequences that were read for it. Names and units are those of cost/receipt.py.

A state that all questions share is computed once and found by every other sequence: prompt_tokens − cached_tokens were
computed. `visits.dense == visits.total + sum(visits.saved)`, exactly, as it holds for every part. `as_text` stands
beside them: what the same questions would have visited at least, answered by generated text (decide/as_text.py).
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import asdict, dataclass
from math import fsum
from typing import Any

from heedful.cost.encoder_receipt import EncoderReceipt
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
class AsText:
    """The same questions, each asked of a chat model that reads it anew and says nothing but the answer."""

    model: str
    """Whose layers and heads were counted."""
    prompt_tokens: int
    output_tokens: int
    visits: int


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
    dropped_tokens: int
    """Cut off because that was asked for."""
    visits: Visits
    kv: DecisionKV
    weights: WeightTraffic
    flops: Flops
    seconds: DecisionSeconds
    energy: Energy
    as_text: AsText | None = None

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it."""
        return asdict(self)

    def line(self) -> str:
        """One line for a terminal."""
        return " · ".join((
            f"{_counted(self.questions, 'question')} in {_counted(self.sequences, 'sequence')}",
            f"{self.prompt_tokens:,} in ({self.cached_tokens:,} cached)",
            f"{human(self.visits.total).strip()} visits of {human(self.visits.dense).strip()} dense",
            *([f"{human(self.as_text.visits).strip()} as text"] if self.as_text else []),
            f"~{self.energy.joules:.2g} J ({self.energy.source})",
        ))  # fmt: skip


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def encoder_decision_receipt(
    model: str, questions: int, parts: ListLike[EncoderReceipt], *, seconds: float
) -> DecisionReceipt:
    """The sum of `parts`, passes of encoders, which have no cache and write nothing. `seconds`: as below."""
    visits = [part.visits for part in parts]
    total, saved = sum(v.total for v in visits), _saved([v.saved for v in visits])
    return DecisionReceipt(
        model=model,
        questions=questions,
        sequences=sum(part.texts for part in parts),
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        cached_tokens=0,
        output_tokens=0,
        dropped_tokens=sum(part.dropped_tokens for part in parts),
        visits=Visits(prefill=total, decode=0, total=total, dense=sum(v.dense for v in visits), saved=saved),
        kv=DecisionKV("", 0, 0, 0),
        weights=WeightTraffic(sum(part.weights.bytes_read for part in parts)),
        flops=_flops([part.flops for part in parts]),
        seconds=DecisionSeconds(seconds),
        energy=_energy([part.energy for part in parts]),
    )


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
        dropped_tokens=0,
        visits=Visits(
            prefill=sum(v.prefill for v in visits),
            decode=sum(v.decode for v in visits),
            total=sum(v.total for v in visits),
            dense=sum(v.dense for v in visits),
            saved=_saved([v.saved for v in visits]),
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
        flops=_flops([part.flops for part in parts]),
        seconds=DecisionSeconds(seconds),
        energy=_energy([part.energy for part in parts]),
    )


def _saved(parts: ListLike[Saved]) -> Saved:
    return Saved(sum(p.window for p in parts), sum(p.pages for p in parts), sum(p.prefix for p in parts))


def _flops(parts: ListLike[Flops]) -> Flops:
    return Flops(sum(p.linear for p in parts), sum(p.attention for p in parts), sum(p.selection for p in parts))


def _energy(parts: ListLike[Energy]) -> Energy:
    return Energy(
        fsum(part.joules for part in parts),
        fsum(part.low for part in parts),
        fsum(part.high for part in parts),
        parts[0].source if parts else ESTIMATED,
    )
