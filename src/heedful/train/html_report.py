"""A run, or several over each other, as one HTML page that needs nothing else: no script, no font, no other file.

    write_report([Path("runs/first")])            # runs/first/report.html

Made from the files of the runs alone (run.json, metrics.jsonl, data/*/store.json). All text in it is escaped.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

from heedful.errors import FileFormatError
from heedful.train.line_chart import Line, line_chart
from heedful.train.report import short
from heedful.train.run_files import DATA, read_facts, read_metrics, read_settings
from heedful.train.settings import TrainSettings, by_name
from heedful.weights.run_folder import checkpoints
from heedful.weights.written_aside import file_aside

NAME = "report.html"
SMOOTHING = 0.95
_COLOURS = 6
"""Of the page's style sheet; more runs begin again, with other dashes."""
_NOT_FIGURES = ("step", "judged_by", "higher_is_better")


@dataclass(frozen=True)
class RunRecord:
    """What the files of a run say."""

    folder: Path
    settings: TrainSettings
    facts: dict[str, Any]
    """run.json."""
    steps: list[dict[str, Any]]
    speeds: list[dict[str, Any]]
    figures: dict[str, list[tuple[float, float]]]
    """Of the validation: name → (step, value)."""
    judged_by: str | None
    samples: list[tuple[int, str]]
    data: dict[str, dict[str, Any]]
    """"train" and "validation" → store.json."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def column(self, key: str) -> list[tuple[float, float]]:
        return [(row["step"], row[key]) for row in self.steps if isinstance(row.get(key), int | float)]

    @property
    def best(self) -> tuple[float, float] | None:
        """(step, value) of the validation's leading figure."""
        points = self.figures.get(self.judged_by or "", [])
        higher = bool(self.facts.get("higher_is_better"))
        return (max if higher else min)(points, key=lambda point: point[1], default=None)


def read_run(folder: Path) -> RunRecord:
    """Raises UsageError where no run is, FileFormatError for damaged files."""
    rows = list(read_metrics(folder))
    judged = [row for row in rows if "judged_by" in row]
    figures: dict[str, list[tuple[float, float]]] = {}
    for row in judged:
        for name, value in row.items():
            if name not in _NOT_FIGURES and isinstance(value, int | float):
                figures.setdefault(name, []).append((row["step"], value))
    higher = {"higher_is_better": True} if any(row.get("higher_is_better") for row in judged) else {}
    return RunRecord(
        folder=folder,
        settings=read_settings(folder),
        facts=read_facts(folder) | higher,
        steps=[row for row in rows if "loss" in row],
        speeds=[row for row in rows if "tokens_per_second" in row],
        figures=figures,
        judged_by=judged[-1]["judged_by"] if judged else None,
        samples=[(row["step"], str(row["sample"])) for row in rows if "sample" in row],
        data={name: found for name in ("train", "validation") if (found := _store(folder / DATA / name))},
    )


def _store(folder: Path) -> dict[str, Any]:
    path = folder / "store.json"
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{path} cannot be read: {error}", "") from error
    return found if isinstance(found, dict) else {}


def write_report(folders: Sequence[Path], path: Path | None = None) -> Path:
    """Returns where it is; by default in the folder of the run, or in the one that all runs are in.

    Raises UsageError, FileFormatError as read_run, OSError.
    """
    page = report_page([read_run(folder) for folder in folders])
    parents = {folder.resolve().parent for folder in folders}
    if path is None:
        home = folders[0] if len(folders) == 1 else parents.pop() if len(parents) == 1 else Path()
        path = home / NAME
    with file_aside(path) as aside:
        aside.write_text(page, encoding="utf-8")
    return path


def smoothed(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """As the progress line smooths: each step's value is worth 0.95 of the next one's."""
    total, weight, found = 0.0, 0.0, []
    for step, value in points:
        if isfinite(value):
            total, weight = SMOOTHING * total + value, SMOOTHING * weight + 1
        found.append((step, total / weight if weight else value))
    return found


# ---- the page


def report_page(runs: Sequence[RunRecord]) -> str:
    title = " · ".join(run.name for run in runs)
    body = [
        f"<header><h1>{escape(title)}</h1><p>{escape(_about(runs))}</p></header>",
        _legend(runs),
        _tiles(runs) if len(runs) == 1 else _summary_table(runs),
        f'<section class="charts">{"".join(_charts(runs))}</section>',
        *(_samples(run, named=len(runs) > 1) for run in runs if run.samples),
        _commands(runs),
        _settings_table(runs),
        *(_facts_table(run, named=len(runs) > 1) for run in runs),
    ]
    style = files("heedful.train").joinpath("report.css").read_text(encoding="utf-8")
    content = "\n".join(filter(None, body))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}: training</title><style>\n{style}</style></head>\n"
        f"<body><main>\n{content}\n</main></body></html>\n"
    )


def _about(runs: Sequence[RunRecord]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} training runs"
    run = runs[0]
    begun = str(run.facts.get("begun", "")).replace("T", " ").replace("+00:00", " UTC")
    version = run.facts.get("heedful")
    parts = [f"begun {begun}" if begun else "", f"heedful {version}" if version else ""]
    return " · ".join(part for part in ("A training run", *parts) if part)


def _legend(runs: Sequence[RunRecord]) -> str:
    if len(runs) == 1:
        return ""
    items = "".join(f"<li>{_swatch(i)}{escape(run.name)}</li>" for i, run in enumerate(runs))
    return f'<ul class="legend">{items}</ul>'


def _swatch(index: int) -> str:
    return (
        f'<svg class="swatch" viewBox="0 0 24 8" aria-hidden="true"><path class="{_colour(index)}" d="M0 4H24"/></svg>'
    )


def _colour(index: int) -> str:
    dashes = index // _COLOURS
    return f"run r{index % _COLOURS}" + (f" dash{min(dashes, 2)}" if dashes else "")


def _figures(run: RunRecord) -> list[tuple[str, str]]:
    """What a run comes to, in words and numbers."""
    losses = smoothed(run.column("loss"))
    visits = sum(value for _, value in run.column("visits"))
    tokens = sum(value for _, value in run.column("tokens"))
    speeds = sorted(row["tokens_per_second"] for row in run.speeds)
    best = run.best
    return [
        ("steps", f"{len(run.steps):,} of {run.settings.run.steps:,}"),
        ("loss, smoothed", f"{losses[-1][1]:.4f}" if losses else "-"),
        (f"best {_in_words(run.judged_by or 'validation')}", f"{best[1]:.4f} at {best[0]:,.0f}" if best else "-"),
        ("tokens", short(tokens)),
        ("visits", short(visits)),
        ("tokens a second", f"{speeds[len(speeds) // 2]:,.0f}" if speeds else "-"),
    ]


def _in_words(name: str) -> str:
    return name.replace("bits_per_byte", "bits a byte").replace("_", " ")


def _tiles(runs: Sequence[RunRecord]) -> str:
    tiles = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in _figures(runs[0]))
    return f'<dl class="tiles">{tiles}</dl>'


def _summary_table(runs: Sequence[RunRecord]) -> str:
    columns = [_figures(run) for run in runs]
    names = [name for name, _ in columns[0]]
    rows = [(name, *(column[i][1] for column in columns)) for i, name in enumerate(names)]
    return f"<section>{_table(('', *(run.name for run in runs)), rows)}</section>"


def _charts(runs: Sequence[RunRecord]) -> Iterable[str]:
    last = max([run.steps[-1]["step"] for run in runs if run.steps], default=1)

    def chart(title: str, lines: Sequence[Line], *, from_zero: bool = False, note: str = "") -> str:
        if not any(line.points for line in lines):
            return ""
        drawn = line_chart(title, lines, first_step=0, last_step=last, from_zero=from_zero)
        small = f" <small>{escape(note)}</small>" if note else ""
        return f"<figure><figcaption>{escape(title)}{small}</figcaption>{drawn}</figure>"

    def of(key: str) -> list[Line]:
        return [Line(run.column(key), _colour(i)) for i, run in enumerate(runs)]

    raw = [Line(run.column("loss"), f"{_colour(i)} raw") for i, run in enumerate(runs)]
    smooth = [Line(smoothed(run.column("loss")), _colour(i)) for i, run in enumerate(runs)]
    unit = "question" if all(run.settings.data.decisions for run in runs) else "token"
    yield chart("Loss", [*raw, *smooth], note=f"nats a {unit}; bold: smoothed")
    for name in dict.fromkeys(name for run in runs for name in run.figures):
        yield chart(
            f"Validation: {_in_words(name)}",
            [Line(run.figures.get(name, []), _colour(i)) for i, run in enumerate(runs)],
        )
    yield chart("Learning rate", of("lr"), from_zero=True)
    yield chart("Norm of the gradients", of("grad_norm"), from_zero=True, note="before clipping")
    yield chart("Visits of a step", of("visits"), from_zero=True, note="query heads × tokens attended, forward")
    speeds = [[(row["step"], row["tokens_per_second"]) for row in run.speeds] for run in runs]
    yield chart("Tokens a second", [Line(points, _colour(i)) for i, points in enumerate(speeds)], from_zero=True)


def _samples(run: RunRecord, *, named: bool) -> str:
    whose = f" of {escape(run.name)}" if named else ""
    items = "".join(
        f"<li><b>step {step:,}</b><pre>{escape(text) or '<i>nothing</i>'}</pre></li>" for step, text in run.samples
    )
    return f'<section><h2>Samples{whose}</h2><ol class="samples">{items}</ol></section>'


def _commands(runs: Sequence[RunRecord]) -> str:
    lines = []
    for run in runs:
        folder = shlex.quote(str(run.folder))
        if len(run.steps) < run.settings.run.steps:
            lines.append(f"heedful train --resume --out {folder}    # go on")
        if checkpoints(run.folder) and run.settings.data.decisions:
            lines.append(f"heedful decide -m {folder} --text '…' --noul '…'    # run it")
            lines.append(f"heedful calibrate -m {folder} --data ROWS.jsonl    # its temperatures")
        elif checkpoints(run.folder):
            lines.append(f"heedful generate -m {folder} 'Once'    # run it")
            lines.append(
                f"heedful export -m {folder} --to gguf --out {shlex.quote(run.name + '.gguf')}    # for llama.cpp"
            )
    if not lines:
        return ""
    return f"<section><h2>Commands</h2><pre>{escape(chr(10).join(lines))}</pre></section>"


def _settings_table(runs: Sequence[RunRecord]) -> str:
    """Of several runs first what differs."""
    values = [by_name(run.settings.as_dict()) for run in runs]
    rows = [(key, *(_shown(each.get(key)) for each in values)) for key in values[0]]
    rows.sort(key=lambda row: len(set(row[1:])) == 1)
    differing = {row[0] for row in rows if len(set(row[1:])) > 1}
    heading = ("setting", *(run.name for run in runs)) if len(runs) > 1 else ("", "")
    return f"<section><h2>Settings</h2>{_table(heading, rows, marked=differing)}</section>"


def _facts_table(run: RunRecord, *, named: bool) -> str:
    machine = run.facts.get("machine")
    rows = [(name, _shown(value)) for name, value in machine.items()] if isinstance(machine, dict) else []
    for name, facts in run.data.items():
        counts = (facts.get(key) for key in ("documents", "text_bytes", "tokens"))
        words = [
            f"{count:,} {what}" for count, what in zip(counts, ("documents", "bytes", "tokens"), strict=True) if count
        ]
        rows.append((f"data: {name}", ", ".join(words)))
        rows.append((f"data: {name}, sha256 of the tokens", str(facts.get("sha256", ""))[:16] + "…"))
    if not rows:
        return ""
    whose = f" of {escape(run.name)}" if named else ""
    return f"<section><h2>Machine and data{whose}</h2>{_table(('', ''), rows)}</section>"


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "-" if value is None or value == "" else str(value)


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]], marked: Iterable[str] = ()) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heading) if any(heading) else ""
    body = ""
    for first, *cells in rows:
        css = ' class="differs"' if first in marked else ""
        body += f"<tr{css}><th>{escape(first)}</th>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    thead = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<div class="wide"><table>{thead}<tbody>{body}</tbody></table></div>'
