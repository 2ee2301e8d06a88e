"""Temperatures: what a decider's logits are divided by so that its probabilities come true. Pure numpy.

    calibration = fit(rows)                          # Row(question type, logits, right label)
    softmax(logits / calibration.temperature("choice", len(logits)))
    reliability(probabilities, labels)               # accuracy, NLL, Brier, ECE, bins
    threshold_for(confidences, correct, error=0.05)  # answer only above it

One temperature per question type and bucket of option counts, as Laya's checkpoints have them, looked up and clamped
as Laya does it (Guo et al., arXiv:1706.04599, is the method). ECE has bins of equal width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import asdict, dataclass, field
from math import exp, fsum, isfinite, lgamma, log, log1p
from typing import Any

import numpy as np
import numpy.typing as npt

from heedful.errors import BadParameter

TYPES = ("choice", "score", "noul")
BUCKETS = ("2", "3-5", "6-10", "11+")
LOWEST, HIGHEST = 0.5, 5.0
"""Bounds of a temperature: a fit on few rows would sharpen or flatten without end."""
FEWEST_ROWS = 20
"""With fewer nothing is fitted: a bucket takes the temperature of its type, a type stays as it was."""
_HALVINGS = 100

Floats = npt.NDArray[np.float64]
Label = int | tuple[float, ...]
"""Index of the right option; or a share for each option, which sum to 1, where people disagree on it."""


@dataclass(frozen=True)
class Row:
    """One labelled question."""

    type: str
    logits: tuple[float, ...]
    """One an option; only their differences count."""
    label: Label


@dataclass(frozen=True)
class Calibration:
    """Temperatures, and of which model: those of another one mean nothing."""

    by_type: Mapping[str, float] = field(default_factory=dict)
    by_options: Mapping[str, float] = field(default_factory=dict)
    """ "choice:3-5" → temperature."""
    model_sha256: str = ""

    def temperature(self, kind: str, options: int) -> float:
        """Of the bucket, else of the type, else 1; within [0.5, 5]."""
        found = self.by_options.get(f"{kind}:{bucket_of(options)}", self.by_type.get(kind, 1.0))
        return clamped(found)

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {
            "temperature": dict(self.by_type),
            "temperature_by_options": dict(self.by_options),
            "model_sha256": self.model_sha256,
        }

    @staticmethod
    def from_dict(data: Any) -> Calibration:
        """Raises BadParameter. Laya's list of three temperatures, for choice, score and noul, is read too."""
        if not isinstance(data, Mapping):
            raise BadParameter("calibration", "must be a JSON object")
        by_type, by_options = data.get("temperature", {}), data.get("temperature_by_options", {})
        if isinstance(by_type, list) and len(by_type) == len(TYPES):
            by_type = dict(zip(TYPES, by_type, strict=True))
        sha256 = data.get("model_sha256", "")
        if not (isinstance(by_type, Mapping) and isinstance(by_options, Mapping) and isinstance(sha256, str)):
            raise BadParameter("calibration", "must hold temperature, temperature_by_options and model_sha256")
        return Calibration(dict(by_type), dict(by_options), sha256)


def bucket_of(options: int) -> str:
    return BUCKETS[0] if options <= 2 else BUCKETS[1] if options <= 5 else BUCKETS[2] if options <= 10 else BUCKETS[3]


def clamped(temperature: Any) -> float:
    """Within bounds; 1 where it is no number."""
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or temperature != temperature:
        return 1.0
    return float(min(HIGHEST, max(LOWEST, temperature)))


def softmax(logits: ListLike[float] | Floats, temperature: float = 1.0) -> Floats:
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    shares = np.exp(scaled - scaled.max())
    return np.asarray(shares / shares.sum(), dtype=np.float64)


def fit(rows: Iterable[Row], *, base: Calibration | None = None, model_sha256: str = "") -> Calibration:
    """Temperatures of least NLL: one a type, one a bucket, of each with at least 20 rows; a type with fewer keeps those
    of `base`. Raises BadParameter for bad rows."""
    by_type: dict[str, list[Row]] = {}
    by_bucket: dict[str, list[Row]] = {}
    for row in rows:
        _check_row(row)
        if len(row.logits) > 1:  # one option is certain at any temperature
            by_type.setdefault(row.type, []).append(row)
            by_bucket.setdefault(f"{row.type}:{bucket_of(len(row.logits))}", []).append(row)
    types = {kind: fit_temperature(some) for kind, some in by_type.items() if len(some) >= FEWEST_ROWS}
    buckets = {name: fit_temperature(some) for name, some in by_bucket.items() if len(some) >= FEWEST_ROWS}
    before = base or Calibration()
    kept = {name: t for name, t in before.by_options.items() if name.partition(":")[0] not in types}
    return Calibration({**before.by_type, **types}, {**kept, **buckets}, model_sha256)


def fit_temperature(rows: ListLike[Row]) -> float:
    """The one of least NLL within [0.5, 5].

    NLL is convex in 1/T, and its slope there is the mean of E_p[logit] minus the right option's logit: the root is
    found by bisection.
    """
    logits = _padded([row.logits for row in rows])
    is_option = _padded([[1.0] * len(row.logits) for row in rows])
    shares = _padded([shares_of(row.label, len(row.logits)) for row in rows])
    logits = (logits - np.where(is_option > 0, logits, -np.inf).max(axis=1, keepdims=True)) * is_option
    wanted = float((shares * logits).sum(axis=1).mean())

    def slope(inverse: float) -> float:
        powers = np.exp(inverse * logits) * is_option
        means = (powers * logits).sum(axis=1) / powers.sum(axis=1)
        return float(means.mean()) - wanted

    return 1 / _root(slope, 1 / HIGHEST, 1 / LOWEST)


def shares_of(label: Label, options: int) -> Floats:
    """(options,): the share of each in the label."""
    if isinstance(label, tuple):
        return np.asarray(label, dtype=np.float64)
    shares = np.zeros(options)
    shares[label] = 1
    return shares


@dataclass(frozen=True)
class Bin:
    """Answers whose likeliest option had a probability in (low, high]."""

    low: float
    high: float
    count: int
    mean_probability: float
    accuracy: float


@dataclass(frozen=True)
class Reliability:
    rows: int
    accuracy: float
    """Mean share of the likeliest option in the label: of how many rows it is the right one."""
    nll: float
    """Mean −Σ share · ln p, nats: −ln p of the right option."""
    brier: float
    """Mean Σ (p − share)², over the options: 0 to 2."""
    ece: float
    """Σ over the bins of their share × |accuracy − mean probability|."""
    bins: tuple[Bin, ...]
    """Those with rows in them."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def reliability(probabilities: ListLike[ListLike[float]], labels: ListLike[Label], *, bins: int = 15) -> Reliability:
    """How true distributions came, one a row, against the labels."""
    if not labels or len(probabilities) != len(labels):
        raise BadParameter("labels", f"there are {len(labels):,} for {len(probabilities):,} rows")
    said = _padded(probabilities)
    shares = _padded([shares_of(label, len(p)) for label, p in zip(labels, probabilities, strict=True)])
    right = shares[np.arange(len(said)), said.argmax(axis=1)]
    found = _bins(said.max(axis=1), right, bins)
    return Reliability(
        rows=len(said),
        accuracy=float(right.mean()),
        nll=float(-(shares * np.log(np.maximum(said, np.finfo(np.float64).tiny))).sum(axis=1).mean()),
        brier=float(((said - shares) ** 2).sum(axis=1).mean()),
        ece=sum(one.count / len(said) * abs(one.accuracy - one.mean_probability) for one in found),
        bins=found,
    )


def _padded(rows: ListLike[ListLike[float] | Floats]) -> Floats:
    """(rows, most options), 0 where a row has fewer."""
    found = np.zeros((len(rows), max(map(len, rows))))
    for at, row in enumerate(rows):
        found[at, : len(row)] = row
    return found


def _bins(top: Floats, right: Floats, count: int) -> tuple[Bin, ...]:
    index = np.clip(np.ceil(top * count).astype(int) - 1, 0, count - 1)
    found = []
    for at in range(count):
        inside = index == at
        if inside.any():
            mean, share = float(top[inside].mean()), float(right[inside].mean())
            found.append(Bin(at / count, (at + 1) / count, int(inside.sum()), mean, share))
    return tuple(found)


def error_bound(errors: int, answers: int, *, certainty: float = 0.95) -> float:
    """Clopper–Pearson: with this certainty the true rate of errors is at most that, after `errors` in `answers`.

    The rate at which so few errors would have had a chance of 1 − certainty. One-sided.
    """
    if not 0 <= errors <= answers or not 0 < certainty < 1:
        raise BadParameter("errors", f"{errors} of {answers} with certainty {certainty} is no count")
    if errors == answers:
        return 1.0
    return _root(lambda rate: (1 - certainty) - _chance_of_at_most(errors, answers, rate), 0.0, 1.0)


def threshold_for(
    confidences: ListLike[float], right: ListLike[bool], *, error: float, certainty: float = 0.95
) -> float | None:
    """The lowest confidence above or at which the rate of errors is at most `error`, with this certainty; None if none.

    The bound is that of each candidate alone: check the threshold that comes out on rows it was not chosen on.
    """
    if len(confidences) != len(right) or not all(map(isfinite, confidences)):
        raise BadParameter("confidences", "must be finite numbers, one for each answer")
    if not 0 < error < 1 or not 0 < certainty < 1:
        raise BadParameter("error", f"{error} with certainty {certainty}: both must be between 0 and 1")
    order = sorted(range(len(right)), key=lambda at: -confidences[at])
    errors, found = 0, None
    for answers, at in enumerate(order, start=1):
        errors += not right[at]
        is_last = answers == len(order) or confidences[order[answers]] < confidences[at]  # equal ones stand together
        if is_last and errors < error * answers and _chance_of_at_most(errors, answers, error) <= 1 - certainty:
            found = confidences[at]  # the same as error_bound(…) <= error, without looking for the bound
    return found


def _chance_of_at_most(errors: int, answers: int, rate: float) -> float:
    """Of a binomial count, for a rate strictly between 0 and 1."""
    if rate <= 0:
        return 1.0
    if rate >= 1:
        return 0.0
    whole, hit, miss = lgamma(answers + 1), log(rate), log1p(-rate)
    terms = (
        exp(whole - lgamma(k + 1) - lgamma(answers - k + 1) + k * hit + (answers - k) * miss) for k in range(errors + 1)
    )
    return min(1.0, fsum(terms))


def _root(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that does not fall crosses 0 within [low, high]; an end of it where it does not."""
    if rising(low) >= 0:
        return low
    if rising(high) <= 0:
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2


def _check_row(row: Row) -> None:
    if row.type not in TYPES:
        raise BadParameter("type", f"must be one of {', '.join(TYPES)}, not {row.type!r:.40}")
    if not row.logits or not all(isfinite(logit) for logit in row.logits):
        raise BadParameter("logits", "must be finite numbers, at least one")
    if isinstance(row.label, tuple):
        is_distribution = len(row.label) == len(row.logits) and all(isfinite(s) and s >= 0 for s in row.label)
        if not is_distribution or abs(fsum(row.label) - 1) > 1e-6:
            raise BadParameter("label", f"shares must sum to 1, one for each of {len(row.logits)} options")
    elif not 0 <= row.label < len(row.logits):
        raise BadParameter("label", f"{row.label} is none of {len(row.logits)} options")
