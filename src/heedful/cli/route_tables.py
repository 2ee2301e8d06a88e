"""What `heedful route` prints: facts, the report of a calibration, the sums of a ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from heedful.cost.receipt import human

if TYPE_CHECKING:
    from heedful.router.calibrate import RouteReport
    from heedful.router.curve import Comparison, Interval, Point
    from heedful.router.ledger_sums import Beside, LedgerSums
    from heedful.router.outcomes import Labelled

_COST_COLUMNS = ("visits", "joules", "seconds")


def print_facts(facts: Mapping[str, str]) -> None:
    width = max(map(len, facts))
    for name, text in facts.items():
        print(f"{name.ljust(width)}  {_line(text)}")


def print_report(report: RouteReport, labelled: Sequence[Labelled]) -> None:
    print(f"{report.rows_fitted:,} rows fitted on, {report.rows_held_out:,} measured on")
    if report.rows_left_out:
        print(f"{report.rows_left_out:,} held-out rows are forbidden to a target, and stand in no comparison")
    failures = [one.failure for row in labelled for one in row.outcomes.values() if one.failure]
    if failures:
        print(f"{len(failures):,} answers failed and count as wrong; the first: {_line(failures[0])[:150]}")
    print(f"\nthresholds, at most {report.error:.1%} wrong with certainty .95")
    _table(
        ("route", "at least", "fitted on", "wrong", "held out", "wrong", "true rate at most"),
        [
            (
                _line(name),
                "never" if one.threshold is None else f"{one.threshold:.3f}",
                f"{one.taken:,} of {one.rows:,}",
                f"{one.errors:,}",
                f"{one.held_out_taken:,}",
                f"{one.held_out_errors:,}",
                f"{one.held_out_bound:.3f}",
            )
            for name, one in report.routes.items()
        ],
    )
    print("\non the rows held out: right answers, and cost a request (95 % bootstrap intervals)")
    points = {"routed": report.routed, **report.baselines}
    points |= {f"routed at {level:g} wrong": point for level, point in report.curve}
    _table(("", "right", *_COST_COLUMNS, "share by target"), [_point_cells(name, one) for name, one in points.items()])
    print(f"\nsaved against each, where quality is not lower by more than {report.margin:.1%}")
    for name, comparison in report.comparisons.items():
        print(f"  {name}: {_comparison_text(comparison)}")


def baseline_text(point: Point, comparison: Comparison) -> str:
    """What a baseline makes of the rows, and what the routed ones save against it."""
    _, quality, *costs, _ = _point_cells("", point)
    named = ", ".join(f"{cost} {column}" for cost, column in zip(costs, _COST_COLUMNS, strict=True))
    return f"{quality} right, {named}; {_comparison_text(comparison)}"


def print_ledger(sums: LedgerSums) -> None:
    ends = ", ".join(f"{name} {count:,}" for name, count in sums.finishes.items())
    print(f"{sums.requests:,} requests: {_line(ends)}")
    print(f"half of them within {sums.seconds_p50:.2f} s, 95 % within {sums.seconds_p95:.2f} s")
    shares = ", ".join(f"{name} {count:,}" for name, count in sums.by_target.items())
    print(f"answered by {shares}; {sums.hops:,} after a fallback or an escalation")
    rows = []
    for target, phases in sums.spent.items():
        for phase, one in phases.items():
            unknown = f"{one.unknown:,}" if one.unknown else ""
            counts = one.counts
            cells = (human(one.visits), human(one.dense_visits), human(counts["positions"]), human(counts["flops"]))
            rows.append((
                target, phase, f"{one.parts:,}", *(cell.strip() for cell in cells), f"{human(counts['bytes_read'])}B",
                f"{counts['joules']:.2f}", f"{one.seconds:.2f}", f"{one.tool_ms:.0f}", unknown,
            ))  # fmt: skip
    heads = ("target", "phase", "parts", "visits", "dense", "positions", "flops", "read", "joules", "seconds")
    _table((*heads, "tool ms", "unknown"), rows)
    for name, beside in sums.beside.items():
        print(f"{name} instead, on {beside.pairs:,} requests drawn at random: {_beside_text(beside)}")
    if sums.beside:
        print("no answer of these was checked: differences of cost, not savings; heedful route calibrate checks")


def _beside_text(one: Beside) -> str:
    parts = [f"{_signed(one.seconds)} s"]
    parts += [] if one.visits is None else [f"{_signed(one.visits)} visits"]
    parts += [] if one.joules is None else [f"{_signed(one.joules)} J"]
    return ", ".join(parts)


def _point_cells(name: str, point: Point) -> tuple[str, ...]:
    costs = tuple(_cost(point.cost[column], is_count=column == "visits") for column in _COST_COLUMNS)
    shares = ", ".join(f"{target} {share:.0%}" for target, share in point.shares.items() if share)
    q = point.quality
    return (name, f"{q.mean:.3f} ({q.low:.3f}–{q.high:.3f})", *costs, shares)


def _cost(value: Interval | None, *, is_count: bool) -> str:
    if value is None:
        return "unknown"
    if is_count:
        return f"{human(value.mean).strip()} ({human(value.low).strip()}–{human(value.high).strip()})"
    return f"{value.mean:.2f} ({value.low:.2f}–{value.high:.2f})"


def _comparison_text(one: Comparison) -> str:
    quality = f"quality {_signed(one.quality)}"
    if not one.is_non_inferior:
        return f"{quality}: no saving is claimed"
    saved = [
        f"{_signed(value)} {unit}"
        for name, unit in (("visits", "visits"), ("joules", "J"), ("seconds", "s"))
        if (value := one.saved[name]) is not None
    ]
    return f"{quality}; saved a request: {', '.join(saved) or 'unknown'}"


def _signed(value: Interval) -> str:
    def text(number: float) -> str:
        return f"{number:+.3f}" if abs(number) < 1000 else f"{'-' if number < 0 else '+'}{human(abs(number)).strip()}"

    return f"{text(value.mean)} ({text(value.low)} to {text(value.high)})"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    cells = [tuple(heads), *map(tuple, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    for row in cells:
        first, *rest = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        print("  ".join((first, *rest)).rstrip())


def _line(text: str) -> str:
    """Without what would move a cursor."""
    return "".join(c if c.isprintable() else " " for c in text)
