"""The receipt: the cost record of one request. Its JSON names are public and stable; docs/cost.md explains each.

`visits.dense == visits.total + sum(visits.saved)`, exactly. Seconds are wall time; energy names its source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from heedful.cache.prefix import PrefixReport
from heedful.cost.energy import Energy
from heedful.cost.quality import Quality


@dataclass(frozen=True)
class Saved:
    """Visits that dense attention without reuse would have made and this request did not, by what saved them."""

    window: int = 0
    pages: int = 0
    prefix: int = 0


@dataclass(frozen=True)
class Visits:
    prefill: int
    decode: int
    total: int
    dense: int
    saved: Saved
    rejected: int = 0
    """Of the total: for guessed tokens that turned out wrong."""
    recomputed: int = 0
    """Of the total: for tokens computed before, whose pages were needed elsewhere in between."""


@dataclass(frozen=True)
class Guesses:
    """Tokens guessed ahead, and those of them that the model then said."""

    made: int = 0
    right: int = 0


@dataclass(frozen=True)
class KVTraffic:
    """Bytes are those of rows, of bounds and keys that pages are chosen by, and of recurrent states, which each step
    reads and writes once."""

    format: str
    bytes_read: int
    bytes_written: int
    bytes_held_peak: int
    rows_read: int
    """Keys and values; those of pages that take another number format are read, and written, once more."""
    bounds_read: int = 0
    """Bounds of pages, one a KV head, that were read to list pages; their bytes are in bytes_read."""
    keys_listed: int = 0
    """Keys of listed pages that were read, without their values, to choose pages; likewise."""


@dataclass(frozen=True)
class WeightTraffic:
    bytes_read: int
    """An adapter's among them."""


@dataclass(frozen=True)
class AdapterUse:
    """What an adapter added; both counts are in the receipt's sums too."""

    name: str
    sha256: str
    bytes_read: int
    flops: int


@dataclass(frozen=True)
class Flops:
    linear: int
    attention: int
    selection: int = 0


@dataclass(frozen=True)
class Seconds:
    queue: float
    prefill: float
    decode: float
    first_token: float
    total: float


@dataclass(frozen=True)
class Receipt:
    model: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    policy: dict[str, Any]
    visits: Visits
    kv: KVTraffic
    weights: WeightTraffic
    flops: Flops
    seconds: Seconds
    energy: Energy
    quality: Quality | None = None
    """What was measured of settings that change the output; None where nothing was, or nothing changes."""
    guesses: Guesses = Guesses()
    adapter: AdapterUse | None = None
    """None: the base alone answered."""
    prefix: PrefixReport | None = None
    """How much of the prompt was there already, and why not more; None for a request that was never begun."""

    @property
    def tokens_per_second(self) -> dict[str, float | None]:
        """Prefill: prompt tokens that were computed, once all were; decode: tokens after the first."""
        computed = self.prompt_tokens - self.cached_tokens if self.output_tokens else 0
        return {
            "prefill": _rate(computed, self.seconds.prefill),
            "decode": _rate(self.output_tokens - 1, self.seconds.decode),
        }

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it."""
        fields = asdict(self)
        quality = fields.pop("quality")
        energy = fields.pop("energy")
        prefix = fields.pop("prefix")
        return {
            **fields,
            "tokens_per_second": self.tokens_per_second,
            "energy": energy,
            "quality": quality,
            "prefix": prefix,
        }

    def line(self) -> str:
        """One line for a terminal."""
        decode, e = self.tokens_per_second["decode"], self.energy
        interval = f"{_short(e.low)}–{_short(e.high)}"
        source = f"{e.source} {interval}" if e.source == "estimated" else e.source
        return " · ".join((
            f"{self.prompt_tokens:,} in ({self.cached_tokens:,} cached)",
            f"{self.output_tokens:,} out",
            *([f"adapter {self.adapter.name}"] if self.adapter else []),
            *([f"{decode:.0f} tok/s"] if decode else []),
            *([f"{self.guesses.right:,} of {self.guesses.made:,} guesses right"] if self.guesses.made else []),
            f"{human(self.visits.total).strip()} visits of {human(self.visits.dense).strip()} dense",
            f"KV {human(self.kv.bytes_held_peak)}B {self.kv.format}",
            f"~{_short(e.joules)} J ({source})",
        ))  # fmt: skip


def _short(number: float) -> str:
    """Two significant digits, without an exponent where there need be none."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def summed(receipts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of receipts as JSON: numbers added up, at every depth; of what was held at most, the most; of the rest the first.
    Left out is what adds up to nothing: rates, and why no more of a prompt was there already. Visits that a prefix
    saved do add up.
    """
    total = {
        key: value
        for key, value in receipts[0].items()
        if key != "tokens_per_second" and (key != "prefix" or isinstance(value, int))
    }
    for key, first in total.items():
        values = [receipt[key] for receipt in receipts]
        if isinstance(first, Mapping) and key not in ("policy", "quality"):
            total[key] = summed(values)
        elif isinstance(first, int | float) and not isinstance(first, bool):
            total[key] = max(values) if key.endswith("_peak") else sum(values)
    return total


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if tokens > 0 and seconds > 0 else None


def human(number: float) -> str:
    """1234567 → '1.23 M'. Decimal thousands, three significant digits."""
    for unit in ("", "k", "M", "G", "T", "P", "E", "Z"):
        if number < 999.5:
            return f"{number:.0f} {unit}" if number >= 99.5 or unit == "" else f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.0f} Y"
