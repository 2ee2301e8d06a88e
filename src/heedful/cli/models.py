"""`heedful models`: what is in the cache and what could be, `remove` and `path`. The cache itself is not here."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from heedful.weights.model_cache import CachedModel

app = typer.Typer(help="List the models that are here or can be fetched; remove them; print their paths.")


@dataclass(frozen=True)
class ModelRow:
    """One line of the list; its fields are those of `--json`."""

    name: str
    kind: str | None
    """chat, base or encoder; None for models that are not aliases of ours."""
    size_bytes: int
    licence: str | None
    fetched: bool
    damaged: bool
    source: str
    path: str | None

    @property
    def state(self) -> str:
        return "damaged" if self.damaged else "fetched" if self.fetched else "not fetched"


@app.callback(invoke_without_command=True)
def models(
    context: typer.Context, as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False
) -> None:
    """List the models that are here or can be fetched by an alias."""
    if context.invoked_subcommand is not None:
        return
    rows = model_rows()
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        _print_table(rows)


@app.command("remove")
def remove(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="As `heedful models` shows them.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without a question.")] = False,
) -> None:
    """Delete fetched models from the cache."""
    from heedful.errors import UsageError
    from heedful.weights.progress import bytes_text
    from heedful.weights.sources import fetched_model, remove_model

    if not yes and not _somebody_can_answer():
        raise UsageError("nobody is here to confirm the removal", "Add -y to remove without a question.")
    for model in [fetched_model(name) for name in names]:
        what = f"{model.record.name} ({bytes_text(model.record.size_bytes)})"
        if yes or typer.confirm(f"Remove {what}?", err=True):
            remove_model(model.record.name)
            typer.echo(f"removed {what}")


@app.command("path")
def path(name: Annotated[str, typer.Argument(metavar="NAME", help="An alias or any other name of a model.")]) -> None:
    """Print where a fetched model lies, for scripts."""
    from heedful.weights.sources import resolve

    typer.echo(resolve(name, offline=True).path)


def _somebody_can_answer() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def model_rows() -> list[ModelRow]:
    """Our aliases, fetched or not, then what else is in the cache."""
    from heedful.weights.sources import ALIASES, list_models

    cached = {model.record.name: model for model in list_models()}
    missing = [
        ModelRow(alias.name, alias.kind, alias.size_bytes, alias.licence, False, False, str(alias), None)
        for alias in ALIASES.values()
        if alias.name not in cached
    ]
    order = list(ALIASES)
    rows = [*missing, *(_cached_row(model) for model in cached.values())]
    return sorted(rows, key=lambda row: (order.index(row.name) if row.name in ALIASES else len(order), row.name))


def _cached_row(model: CachedModel) -> ModelRow:
    from heedful.weights.sources import ALIASES

    record = model.record
    alias = ALIASES.get(record.name)
    damaged = model.damaged_file is not None
    kind = alias.kind if alias else None
    path = str(model.path)
    return ModelRow(record.name, kind, record.size_bytes, record.licence, True, damaged, record.source, path)


def _print_table(rows: list[ModelRow]) -> None:
    """With the paths where the terminal is wide enough, else with the folder that all are in below."""
    from rich.console import Console

    from heedful.weights.model_cache import models_folder

    endless = Console(width=10_000)
    console = Console() if sys.stdout.isatty() else endless  # a pipe has no width: every row stays on its line
    table = _table(rows, with_paths=True)
    if endless.measure(table).maximum <= console.width:
        console.print(table)
    else:
        console.print(_table(rows, with_paths=False))
        typer.echo(f"\nFetched models lie in {models_folder()}; `heedful models path NAME` prints where one is.")


def _table(rows: list[ModelRow], with_paths: bool) -> Table:
    from rich.table import Table

    from heedful.weights.progress import bytes_text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("name", "kind", "size", "licence", "state", *(["path"] if with_paths else [])):
        table.add_column(heading, justify="right" if heading == "size" else "left", overflow="fold")
    for row in rows:
        path = [row.path or ""] if with_paths else []
        table.add_row(row.name, row.kind, bytes_text(row.size_bytes), row.licence, row.state, *path)
    return table
