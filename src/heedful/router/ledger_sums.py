"""A ledger summed: what was asked of whom, what it cost by target and phase, and what other targets would have cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from heedful.router.curve import Interval, interval
from heedful.router.ledger import COUNTERFACTUAL
from heedful.router.signals import JSON

COUNTED = ("positions", "prompt_tokens", "cached_tokens", "output_tokens", "flops", "bytes_read", "joules")


@dataclass
class Sum:
    """Of all parts that one target did in one phase. Parts that do not say what they cost are counted apart."""

    parts: int = 0
    unknown: int = 0
    visits: int = 0
    dense_visits: int = 0
    seconds: float = 0.0
    tool_ms: float = 0.0
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0.0))

    def add(self, spent: Mapping[str, Any]) -> None:
        self.parts += 1
        visits = spent["visits"]
        self.unknown += visits is None
        if visits is not None:
            self.visits += visits["total"]
            self.dense_visits += visits["dense"]
        self.seconds += spent["seconds"]
        self.tool_ms += spent["tool_ms"]
        for name in COUNTED:
            self.counts[name] += spent[name] or 0


@dataclass(frozen=True)
class Beside:
    """The requests of the random slice that went to another target, asked of this one too: its cost less theirs."""

    pairs: int
    visits: Interval | None
    seconds: Interval
    joules: Interval | None


@dataclass(frozen=True)
class LedgerSums:
    requests: int
    by_target: Mapping[str, int]
    hops: int
    """Requests that a fallback or an escalation answered."""
    finishes: Mapping[str, int]
    seconds_p50: float
    seconds_p95: float
    spent: Mapping[str, Mapping[str, Sum]]
    """Target → phase → sum."""
    beside: Mapping[str, Beside]
    policies: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def ledger_sums(lines: Sequence[JSON]) -> LedgerSums:
    requests = [line for line in lines if line.get("kind") == "request"]
    spent: dict[str, dict[str, Sum]] = {}
    for line in lines:
        for part in line["spent"]:
            spent.setdefault(part["target"], {}).setdefault(part["phase"], Sum()).add(part)
    seconds = [line["seconds"] for line in requests] or [0.0]
    return LedgerSums(
        requests=len(requests),
        by_target=_counts([line["target"] for line in requests]),
        hops=sum(bool(line["hops"]) for line in requests),
        finishes=_counts([line["finish"] for line in requests]),
        seconds_p50=float(np.percentile(seconds, 50)),
        seconds_p95=float(np.percentile(seconds, 95)),
        spent=spent,
        beside=_beside(requests, [line for line in lines if line.get("kind") == COUNTERFACTUAL]),
        policies=tuple(dict.fromkeys(str(line["policy_hash"]) for line in requests)),
    )


def _beside(requests: Sequence[JSON], others: Sequence[JSON]) -> dict[str, Beside]:
    by_id = {line["id"]: line for line in requests}
    pairs: dict[str, list[tuple[JSON, JSON]]] = {}
    for other in others:
        if other["id"] in by_id and not str(other["finish"]).startswith("failed"):
            pairs.setdefault(other["target"], []).append((by_id[other["id"]], other))
    return {name: _compared(some) for name, some in pairs.items()}


def _compared(pairs: Sequence[tuple[JSON, JSON]]) -> Beside:
    def difference(name: str) -> Interval | None:
        found = [(_total(theirs, name), _total(mine, name)) for mine, theirs in pairs]
        known = [(a, b) for a, b in found if a is not None and b is not None]
        return interval(np.array([a - b for a, b in known])) if len(known) == len(found) else None

    seconds = difference("seconds")
    assert seconds is not None
    return Beside(len(pairs), difference("visits"), seconds, difference("joules"))


def _total(line: JSON, name: str) -> float | None:
    parts = [part[name]["total"] if name == "visits" and part[name] else part[name] for part in line["spent"]]
    return None if any(part is None for part in parts) else float(sum(parts))


def _counts(values: Sequence[Any]) -> dict[str, int]:
    return {str(value): values.count(value) for value in dict.fromkeys(values)}
