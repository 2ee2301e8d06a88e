"""A decider before and after calibration, on rows that neither its temperatures nor its thresholds were chosen on.

report = measure_calibration(decider, fitting_rows, held_out_rows, error=0.05)
report.calibration, report.measured["all"].after.ece, report.thresholds["choice"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import asdict, dataclass
from typing import Any

from heedful.decide.calibrate import (
    FEWEST_ROWS,
    TYPES,
    Calibration,
    Reliability,
    Row,
    error_bound,
    fit,
    reliability,
    shares_of,
    softmax,
    threshold_for,
)
from heedful.decide.decider import HasLogits
from heedful.decide.labelled_rows import LabelledState
from heedful.errors import BadParameter, UsageError

CERTAINTY = 0.95
EVERY_TYPE = "all"


@dataclass(frozen=True)
class Measured:
    """The same held-out questions at the temperatures that the decider came with, and at the fitted ones."""

    before: Reliability
    after: Reliability


@dataclass(frozen=True)
class Threshold:
    """Take an answer whose likeliest option has this probability or more, and leave the rest to somebody else."""

    probability: float
    """The lowest at which the fitting rows promise the wanted error."""
    answered: int
    """Of `rows` held-out questions, those at or above it."""
    rows: int
    errors: int
    """Of those answered."""
    error_bound: float
    """By the held-out rows the true rate of errors is at most that, with certainty .95 (Clopper–Pearson)."""


@dataclass(frozen=True)
class CalibrationReport:
    calibration: Calibration
    fitted: Mapping[str, int]
    """Type → questions that the temperatures were fitted on."""
    measured: Mapping[str, Measured]
    """Type, or "all", → held-out questions."""
    wanted_error: float
    thresholds: Mapping[str, Threshold | None]
    """Type → None where no threshold promises the wanted error: too many errors, or too few rows."""
    left_out: tuple[str, ...]
    """Why rows were passed over that the decider refuses, for instance as too long."""

    @property
    def objection(self) -> str:
        """Why nobody should take it; "" where held-out NLL did not rise, and there are rows enough to say so."""
        before, after = self.measured[EVERY_TYPE].before, self.measured[EVERY_TYPE].after
        fewest = min(sum(self.fitted.values()), after.rows)
        if fewest < FEWEST_ROWS:
            return f"{fewest} questions tell too little, {FEWEST_ROWS} are needed"
        return "it is worse on the rows held out" if after.nll > before.nll else ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it."""
        shown = asdict(self)
        return {**shown, "calibration": self.calibration.to_dict(), "left_out": list(self.left_out)}


def measure_calibration(
    decider: HasLogits,
    fitting: ListLike[LabelledState],
    held_out: ListLike[LabelledState],
    *,
    error: float,
    model_sha256: str = "",
    progress: Callable[[int], object] = lambda rows: None,
) -> CalibrationReport:
    """Fits on the one set of rows and measures on the other. error: the rate of errors that thresholds are to keep.

    Rows that the decider refuses (UsageError) are left out and said. Raises BadParameter where a set has no question
    left with two options or more, and what the decider raises.
    """
    left_out: list[str] = []
    fit_rows = list(_rows(decider, fitting, left_out, progress))
    held_rows = list(_rows(decider, held_out, left_out, progress))
    for what, rows in (("to fit", fit_rows), ("held out", held_rows)):
        if not rows:
            why = f"; {left_out[0]}" if left_out else ""
            raise BadParameter("data", f"there is no question {what}{why}", "Give more rows, or hold out another part.")
    calibration = fit(fit_rows, base=decider.calibration, model_sha256=model_sha256)
    of_type = {kind: [row for row in held_rows if row.type == kind] for kind in TYPES}
    sets = {EVERY_TYPE: held_rows, **{kind: rows for kind, rows in of_type.items() if rows}}
    return CalibrationReport(
        calibration=calibration,
        fitted={kind: sum(row.type == kind for row in fit_rows) for kind in TYPES},
        measured={
            name: Measured(_reliability(rows, decider.calibration), _reliability(rows, calibration))
            for name, rows in sets.items()
        },
        wanted_error=error,
        thresholds={
            kind: _threshold([row for row in fit_rows if row.type == kind], rows, calibration, error)
            for kind, rows in of_type.items()
            if rows
        },
        left_out=tuple(left_out),
    )


def _rows(
    decider: HasLogits, states: Iterable[LabelledState], left_out: list[str], progress: Callable[[int], object]
) -> Iterable[Row]:
    """A question with one option says nothing about a decider."""
    for labelled in states:
        try:
            logits = decider.logits(labelled.state, labelled.questions)
        except UsageError as refusal:
            left_out.append(refusal.message)
        else:
            for question, label, of_one in zip(labelled.questions, labelled.labels, logits, strict=True):
                if len(of_one) > 1:
                    yield Row(question.type, of_one, label)
        progress(1)


def _reliability(rows: ListLike[Row], calibration: Calibration) -> Reliability:
    return reliability([_probabilities(row, calibration) for row in rows], [row.label for row in rows])


def _probabilities(row: Row, calibration: Calibration) -> list[float]:
    found: list[float] = softmax(row.logits, calibration.temperature(row.type, len(row.logits))).tolist()
    return found


def _threshold(
    fitting: ListLike[Row], held_out: ListLike[Row], calibration: Calibration, error: float
) -> Threshold | None:
    found = threshold_for(*_tops(fitting, calibration), error=error, certainty=CERTAINTY)
    if found is None:
        return None
    taken = [right for top, right in zip(*_tops(held_out, calibration), strict=True) if top >= found]
    errors = taken.count(False)
    bound = error_bound(errors, len(taken), certainty=CERTAINTY)
    return Threshold(found, len(taken), len(held_out), errors, bound)


def _tops(rows: ListLike[Row], calibration: Calibration) -> tuple[list[float], list[bool]]:
    """Of each row the probability of its likeliest option, and whether that is the label's likeliest."""
    tops, right = [], []
    for row in rows:
        probabilities = _probabilities(row, calibration)
        tops.append(max(probabilities))
        shares = shares_of(row.label, len(probabilities))
        right.append(bool(shares[probabilities.index(max(probabilities))] == shares.max()))
    return tops, right
