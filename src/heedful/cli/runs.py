"""`heedful runs`: the training runs of a folder in a table, and how some differ."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.errors import BadParameter, SourceError

if TYPE_CHECKING:
    from collections.abc import Sequence

_LOSS_ROWS = 10
_DEFAULT = Path("runs")


@dataclass(frozen=True)
class RunRow:
    name: str
    steps: int
    last_step: int
    """Where it ends."""
    tokens: int
    visits: int
    loss: float | None
    """Mean of the last twentieth of the steps; nats a token."""
    best: float | None
    """Of the validation, the figure that `judged_by` names."""
    judged_by: str | None
    tokens_per_second: float | None
    checkpoint: str | None
    """The newest that is whole."""


def runs(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Runs to compare, or folders of runs to list; default: runs")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    html: Annotated[bool, typer.Option("--html", help="Write a page with curves, samples and settings.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="With --html: the file; default: report.html with them.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--open", help="With --html: show it in a browser, if there is a screen.")
    ] = False,
) -> None:
    """List training runs; of several that are named, show which settings differ and how the losses went."""
    found = _find(folders or [_DEFAULT])
    if html:
        _write_report(found, out, show)
        return
    if out is not None or show:
        raise BadParameter("--out" if out else "--open", "belongs to --html")
    rows = [_row(folder) for folder in found]
    compared = len(found) > 1 and folders is not None and all(_is_run(folder) for folder in folders)
    if json_output:
        more = {"differences": _differences(found), "losses": _losses(found)} if compared else {}
        print(json.dumps({"runs": [asdict(row) for row in rows]} | more))
        return
    _print_rows(rows)
    if compared:
        _print_comparison(found)


def _write_report(folders: Sequence[Path], out: Path | None, show: bool) -> None:
    from heedful.train.html_report import write_report

    if out is not None and not out.parent.is_dir():
        raise BadParameter("--out", f"{out.parent} is no folder")
    try:
        address = write_report(folders, out).resolve().as_uri()
    except OSError as error:
        raise BadParameter("--out", f"the report cannot be written: {error.strerror}") from error
    print(address)
    if show and _has_screen():
        import webbrowser

        webbrowser.open(address)


def _has_screen() -> bool:
    """Where there is none, a browser of the terminal would take it over."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _is_run(folder: Path) -> bool:
    return (folder / "run.json").is_file()


def _find(folders: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for folder in folders:
        if _is_run(folder):
            found.append(folder)
        elif folder.is_dir():
            found += sorted(each for each in folder.iterdir() if _is_run(each))
        else:
            raise SourceError(f"{folder} is no folder", "Begin a run: heedful train --data FILE --out runs/NAME")
    if not found:
        raise SourceError(
            f"no training run is in {', '.join(map(str, folders))}",
            "Begin one: heedful train --data FILE --out runs/NAME",
        )
    return found


def _row(folder: Path) -> RunRow:
    from heedful.train.run_files import read_metrics, read_settings
    from heedful.weights.run_folder import newest_checkpoint

    metrics = list(read_metrics(folder))
    steps = [row for row in metrics if "loss" in row]
    last = [row["loss"] for row in steps[-max(1, len(steps) // 20) :]]
    speeds = [row["tokens_per_second"] for row in metrics if "tokens_per_second" in row]
    newest = newest_checkpoint(folder)
    best, judged_by = _best(metrics)
    return RunRow(
        name=str(folder),
        steps=len(steps),
        last_step=read_settings(folder).run.steps,
        tokens=sum(row["tokens"] for row in steps),
        visits=sum(row["visits"] for row in steps),
        loss=sum(last) / len(last) if last else None,
        best=best,
        judged_by=judged_by,
        tokens_per_second=sorted(speeds)[len(speeds) // 2] if speeds else None,
        checkpoint=newest.name if newest else None,
    )


def _best(metrics: list[dict[str, Any]]) -> tuple[float | None, str | None]:
    """The best of the figure that the newest judgement was by, and its name."""
    judged = [row for row in metrics if "judged_by" in row]
    if not judged:
        return None, None
    name = judged[-1]["judged_by"]
    better = max if judged[-1].get("higher_is_better") else min
    return better(row[name] for row in judged if name in row), name


def _print_rows(rows: list[RunRow]) -> None:
    from heedful.train.report import short

    _print_table(
        ("run", "steps", "tokens", "visits", "loss", "best validation", "tok/s", "newest checkpoint"),
        [
            (
                row.name,
                f"{row.steps:,}/{row.last_step:,}",
                short(row.tokens),
                short(row.visits),
                _number(row.loss),
                "-" if row.best is None else f"{row.best:.4f} {row.judged_by}",
                _number(row.tokens_per_second, ",.0f"),
                row.checkpoint or "none",
            )
            for row in rows
        ],
    )


def _print_comparison(folders: list[Path]) -> None:
    names = [folder.name for folder in folders]
    if differences := _differences(folders):
        print()
        cells = [(key, *(json.dumps(value) for value in values)) for key, values in differences.items()]
        _print_table(("setting", *names), cells)
    if losses := _losses(folders):
        print()
        _print_table(
            ("loss of steps", *names),
            [(row["steps"], *(_number(loss) for loss in row["losses"])) for row in losses],
        )


def _differences(folders: list[Path]) -> dict[str, list[Any]]:
    """Setting → its value in each run."""
    from heedful.train.run_files import read_settings
    from heedful.train.settings import by_name

    settings = [by_name(read_settings(folder).as_dict()) for folder in folders]
    values = {key: [each[key] for each in settings] for key in settings[0]}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def _losses(folders: list[Path]) -> list[dict[str, Any]]:
    """Means over the same steps of all runs, as far as the shortest has gone."""
    from heedful.train.run_files import read_metrics

    by_run = [[row["loss"] for row in read_metrics(folder) if "loss" in row] for folder in folders]
    common = min(map(len, by_run))
    parts = min(_LOSS_ROWS, common)
    edges = [common * i // parts for i in range(parts + 1)] if parts else []
    return [
        {"steps": f"{begin + 1:,}-{end:,}", "losses": [sum(losses[begin:end]) / (end - begin) for losses in by_run]}
        for begin, end in pairwise(edges)
    ]


def _number(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)


def _print_table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    lines = [headings, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headings))]
    for first, *cells in lines:
        padded = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        print(f"{first:<{widths[0]}}", *padded, sep="  ")
