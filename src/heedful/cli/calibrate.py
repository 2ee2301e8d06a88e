"""`heedful calibrate`: temperatures for a decider from labelled rows, and what they are worth on rows held out."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.cli.json_rows import json_lines, json_value, print_json
from heedful.errors import BadParameter, UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from heedful.decide.calibrate import Reliability
    from heedful.decide.calibration_report import CalibrationReport, Threshold
    from heedful.decide.labelled_rows import LabelledState

HELD_OUT = 0.3


def calibrate(
    data: Annotated[
        Path, typer.Option("--data", help='JSONL of {"state": …, "questions": {…}, "expected": {…}}; - is stdin.')
    ],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A decider that runs here; default: as `heedful decide`.")
    ] = None,
    validate: Annotated[
        str, typer.Option(help="Measure on this share of the rows, or on the rows of this file.")
    ] = str(HELD_OUT),
    error: Annotated[float, typer.Option(help="Find thresholds above which at most so many answers are wrong.")] = 0.05,
    out: Annotated[Path | None, typer.Option("--out", help="Write the calibration here, and not for later.")] = None,
    save: Annotated[
        bool | None,
        typer.Option("--save/--no-save", help="Keep it for `heedful decide`; default: unless it is worse."),
    ] = None,
    orders: Annotated[int | None, typer.Option("--orders", help="As `heedful decide --orders`.")] = None,
    threads: Annotated[int | None, typer.Option(help="Processors to use; default: all.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Fit temperatures so that probabilities come true: of the answers given .8, eight in ten are right."""
    from heedful.decide.load import default_decider, find_decider

    if str(out) == "-":
        raise BadParameter("--out", "must be a file", "--json prints the calibration.")
    if not 0 < error < 1:
        raise BadParameter("--error", "must be more than 0 and less than 1")
    fitting, held_out = _split(_labelled(data, "--data"), validate)
    source = find_decider(default_decider() if model is None else model)
    if source.kind == "jev":
        raise UsageError(
            f"{source.name} sends probabilities, and no logits that a temperature could be fitted to",
            "Calibrate a decider that runs here.",
        )
    sha256 = source.sha256(orders or 1)
    report = _measure(source.name, sha256, fitting, held_out, error, orders, threads)
    if not json_output:
        _print_report(source.name, report)
    kept = _keep(source.name, sha256, report, out, save)
    if json_output:
        print_json({"model": source.name, **report.to_dict(), "saved": kept and str(kept)})
    _tell(report, kept, save)


def _measure(
    name: str,
    sha256: str,
    fitting: list[LabelledState],
    held_out: list[LabelledState],
    error: float,
    orders: int | None,
    threads: int | None,
) -> CalibrationReport:
    from heedful.cli.progress_bar import progress_bar
    from heedful.decide.calibration_report import measure_calibration
    from heedful.decide.decider import HasLogits
    from heedful.decide.load import NONE, load_decider

    decider = load_decider(name, orders=orders, threads=threads, calibration=NONE)
    assert isinstance(decider, HasLogits), decider
    with progress_bar("asking", len(fitting) + len(held_out)) as progress:
        return measure_calibration(decider, fitting, held_out, error=error, model_sha256=sha256, progress=progress)


def _labelled(path: Path, option: str) -> list[LabelledState]:
    from heedful.decide.labelled_rows import labelled_from_json

    found = []
    for number, line in json_lines(path, option):
        try:
            found.append(labelled_from_json(json_value(line)))
        except BadParameter as problem:
            raise BadParameter(option, f"line {number:,}: {problem.message}", problem.remedy) from None
    if not found:
        raise BadParameter(option, f"{path} has no rows")
    return found


def _split(rows: list[LabelledState], validate: str) -> tuple[list[LabelledState], list[LabelledState]]:
    """(for fitting, held out)"""
    from heedful.decide.labelled_rows import is_held_out

    try:
        fraction = float(validate)
    except ValueError:
        return rows, _labelled(Path(validate), "--validate")
    if not 0 < fraction < 1:
        raise BadParameter("--validate", "must be a share of the rows, more than 0 and less than 1, or a file")
    held_out = [row for row in rows if is_held_out(row.state, fraction)]
    return [row for row in rows if not is_held_out(row.state, fraction)], held_out


def _keep(name: str, sha256: str, report: CalibrationReport, out: Path | None, save: bool | None) -> Path | None:
    """Where it was written, if it was."""
    from heedful.decide.calibration_file import kept_path, write_calibration

    wanted = not report.objection and out is None if save is None else save
    paths = [*([] if out is None else [out]), *([kept_path(sha256)] if wanted else [])]
    shown = report.to_dict()
    del shown["calibration"]
    about = {"model": name, "made": datetime.now(UTC).isoformat(timespec="seconds"), "report": shown}
    for path in paths:
        try:
            write_calibration(path, report.calibration, about)
        except OSError as problem:
            raise BadParameter("--out", f"{path} cannot be written: {problem.strerror}") from problem
    return paths[0] if paths else None


def _tell(report: CalibrationReport, kept: Path | None, save: bool | None) -> None:
    if report.left_out:
        rows = f"{len(report.left_out):,} row{'' if len(report.left_out) == 1 else 's'}"
        print(f"heedful: {rows} left out, the first because {report.left_out[0]}", file=sys.stderr)
    if kept is not None:
        print(f"kept in {kept}", file=sys.stderr)
    elif save is None:
        print(f"heedful: not kept, for {report.objection}; --save keeps it", file=sys.stderr)


def _print_report(name: str, report: CalibrationReport) -> None:
    from rich.console import Console

    from heedful.decide.calibration_report import EVERY_TYPE

    console = Console(highlight=False, markup=False, emoji=False)
    if not sys.stdout.isatty():
        console = Console(highlight=False, markup=False, emoji=False, width=10_000)  # every row stays on its line
    fitted = sum(report.fitted.values())
    held_out = report.measured[EVERY_TYPE].after.rows
    console.print(f"{name}: fitted on {fitted:,} questions, measured on {held_out:,} others", soft_wrap=True)
    console.print()
    console.print(_measured_table(report))
    console.print()
    console.print(_temperatures(report), soft_wrap=True)
    for kind, found in report.thresholds.items():
        console.print(_threshold_line(kind, found, report.wanted_error), soft_wrap=True)
    console.print()
    console.print("Reliability of all, by the probability of the likeliest answer:", soft_wrap=True)
    console.print(_bins_table(report.measured[EVERY_TYPE].before, report.measured[EVERY_TYPE].after))


def _measured_table(report: CalibrationReport) -> Table:
    table = _plain_table("questions", "", "number", "accuracy", "NLL", "Brier", "ECE")
    for kind, measured in report.measured.items():
        for when, found in (("before", measured.before), ("after", measured.after)):
            numbers = (f"{found.accuracy:.3f}", f"{found.nll:.4f}", f"{found.brier:.4f}", f"{found.ece:.4f}")
            table.add_row(kind, when, f"{found.rows:,}", *numbers)
    return table


def _temperatures(report: CalibrationReport) -> str:
    found = {**report.calibration.by_type, **report.calibration.by_options}
    return "Temperatures: " + ", ".join(f"{name} {temperature:.3f}" for name, temperature in sorted(found.items()))


def _threshold_line(kind: str, found: Threshold | None, error: float) -> str:
    if found is None:
        return f"{kind}: no threshold promises at most {error:.1%} errors; more rows may."
    return (
        f"{kind}: take answers of probability {found.probability:.3f} and more for at most {error:.1%} errors. "
        f"Held out: {found.answered:,} of {found.rows:,} answered, {found.errors:,} wrong, "
        f"so at most {found.error_bound:.1%} (95 %)."
    )


def _bins_table(before: Reliability, after: Reliability) -> Table:
    table = _plain_table("probability", "before: number", "said", "right", "after: number", "said", "right")
    found: dict[tuple[float, float], list[str]] = {}
    for column, reliability in enumerate((before, after)):
        for one in reliability.bins:
            cells = found.setdefault((one.low, one.high), [""] * 6)
            cells[3 * column : 3 * column + 3] = [
                f"{one.count:,}", f"{one.mean_probability:.3f}", f"{one.accuracy:.3f}"
            ]  # fmt: skip
    for (low, high), cells in sorted(found.items()):
        table.add_row(f"{low:.3f}–{high:.3f}", *cells)
    return table


def _plain_table(*headings: Any) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for at, heading in enumerate(headings):
        table.add_column(heading, justify="left" if at == 0 or not heading else "right")
    return table
