"""The receipt of a pass that generates nothing: texts in, vectors out. Names and units are those of cost/receipt.py.

There is no KV cache in it, and prefill is all there is. `visits.dense == visits.total + sum(visits.saved)`, exactly.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from heedful.cost.energy import ESTIMATED, Energy
from heedful.cost.receipt import Flops, Saved, WeightTraffic, human
from heedful.cost.visits import attended


@dataclass(frozen=True)
class EncoderVisits:
    total: int
    dense: int
    saved: Saved


@dataclass(frozen=True)
class EncoderSeconds:
    prefill: float
    """The model itself."""
    total: float
    """With reading the texts."""


@dataclass(frozen=True)
class EncoderReceipt:
    model: str
    texts: int
    prompt_tokens: int
    """Computed, the marks at a text's ends among them."""
    dropped_tokens: int
    """Cut off because `truncate` was asked for."""
    steps: int
    """Passes through the layers, each of which reads all weights."""
    visits: EncoderVisits
    weights: WeightTraffic
    flops: Flops
    seconds: EncoderSeconds
    energy: Energy

    @property
    def tokens_per_second(self) -> dict[str, float | None]:
        seconds = self.seconds.prefill
        return {"prefill": self.prompt_tokens / seconds if self.prompt_tokens and seconds > 0 else None}

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it."""
        fields = asdict(self)
        energy = fields.pop("energy")
        return {**fields, "tokens_per_second": self.tokens_per_second, "energy": energy}

    def line(self) -> str:
        """One line for a terminal."""
        rate, e = self.tokens_per_second["prefill"], self.energy
        source = f"{e.source} {_short(e.low)}–{_short(e.high)}" if e.source == ESTIMATED else e.source
        return " · ".join((
            f"{self.texts:,} text{'' if self.texts == 1 else 's'}, {self.prompt_tokens:,} in",
            *([f"{rate:,.0f} tok/s"] if rate else []),
            f"{human(self.visits.total).strip()} visits of {human(self.visits.dense).strip()} dense",
            f"weights {human(self.weights.bytes_read)}B",
            f"~{_short(e.joules)} J ({source})",
        ))  # fmt: skip


def _short(number: float) -> str:
    """Two significant digits, without an exponent where there need be none."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def bidirectional_visits(lengths: list[int], windows: tuple[int | None, ...], heads: int) -> EncoderVisits:
    """Every token of a text visits all of its tokens; with a window those less than so many places away, on both sides.

    `windows`: by layer.
    """
    total = heads * sum(_near(length, window) for length in lengths for window in windows)
    dense = heads * len(windows) * sum(length * length for length in lengths)
    return EncoderVisits(total, dense, Saved(window=dense - total))


def _near(length: int, window: int | None) -> int:
    """Pairs of tokens that see each other: those at or before a token, those at or after it, and itself once."""
    return length * length if window is None else 2 * attended(0, length, window) - length


def causal_visits(lengths: list[int], windows: tuple[int | None, ...], heads: int) -> EncoderVisits:
    """Every token visits itself and those before it, within its layer's window. `windows`: by layer."""
    total = heads * sum(attended(0, length, window) for length in lengths for window in windows)
    dense = heads * len(windows) * sum(attended(0, length, None) for length in lengths)
    return EncoderVisits(total, dense, Saved(window=dense - total))
