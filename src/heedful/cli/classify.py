"""`heedful classify`: texts to probabilities of classes, a model's own or labels that are given; its cost to stderr."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.cli.json_rows import print_json
from heedful.cli.policy_options import PackedWeights
from heedful.cli.text_input import listed_texts, print_cut, shortened
from heedful.errors import BadParameter

if TYPE_CHECKING:
    from heedful.decide.gliclass import GLiClass
    from heedful.engine.classify import Classifier


@dataclass(frozen=True)
class _Found:
    """What a model of either kind says."""

    rows: list[dict[str, float]]
    """Of each text, label → probability, or a regression's number."""
    are_probabilities: bool
    token_counts: tuple[int, ...]
    dropped_tokens: tuple[int, ...]
    receipt: Any


def classify(
    texts: Annotated[list[str] | None, typer.Argument(help="Texts; none, or -, reads lines from stdin.")] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="A classifier or a GLiClass: alias, path, hf:org/name or wheel:…")
    ] = "",
    label: Annotated[list[str] | None, typer.Option("--label", "-l", help="GLiClass: one of its classes.")] = None,
    multi: Annotated[bool, typer.Option("--multi", help="GLiClass: several labels may be right, or none.")] = False,
    prompt: Annotated[str, typer.Option("--prompt", help="GLiClass: what to judge by.")] = "",
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Texts, one a line, after those given; - is stdin.")
    ] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut a text that does not fit; say how much.")] = False,
    weights: PackedWeights = None,
    threads: Annotated[int | None, typer.Option(help="Processors to use; default: all.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object with the receipt.")] = False,
    receipt: Annotated[
        bool | None, typer.Option("--receipt/--no-receipt", help="Receipt line on stderr; default: when not piped.")
    ] = None,
) -> None:
    """Sort TEXTS into classes: those that the model was trained for, or with GLiClass any that are named."""
    if not model:
        raise BadParameter("--model", "is missing", "Name a classifier or a GLiClass: -m path/to/folder")
    wanted = listed_texts("classify", texts or [], file)
    from heedful.weights.load_gliclass import names_gliclass
    from heedful.weights.sources import resolve

    if names_gliclass(resolve(model).path):
        if not label:
            raise BadParameter(
                "--label", f"is missing: {model} has no classes of its own", "Name some: -l billing -l other"
            )
        from heedful.decide.gliclass import GLiClass

        judge = GLiClass.load(model, threads=threads, weights=weights)
        found = _with_labels(judge, wanted, label, multi, prompt, truncate)
    elif label or multi or prompt:
        raise BadParameter("--label", f"{model} has classes of its own", "Leave --label, --multi and --prompt out.")
    else:
        from heedful.engine.classify import Classifier

        found = _with_own_classes(Classifier.load(model, threads=threads, weights=weights), wanted, truncate)
    if json_output:
        print_json(_as_json(model, wanted, found))
    else:
        _print(wanted, found)
    print_cut(found.dropped_tokens)
    if receipt if receipt is not None else sys.stdout.isatty() and not json_output:
        print(found.receipt.line(), file=sys.stderr)


def _with_labels(
    judge: GLiClass, texts: list[str], labels: list[str], multi: bool, prompt: str, truncate: bool
) -> _Found:
    batch = judge.classify(texts, labels, multi_label=multi, prompt=prompt, truncate=truncate)
    return _Found(list(batch.probabilities), True, batch.token_counts, batch.dropped_tokens, batch.receipt)


def _with_own_classes(classifier: Classifier, texts: list[str], truncate: bool) -> _Found:
    batch = classifier.classify(texts, truncate=truncate)
    rows = [dict(zip(batch.labels, row.tolist(), strict=True)) for row in batch.probabilities]
    are_probabilities = batch.problem_type != "regression"
    return _Found(rows, are_probabilities, batch.token_counts, batch.dropped_tokens, batch.receipt)


def _as_json(model: str, texts: list[str], found: _Found) -> dict[str, Any]:
    name = "probabilities" if found.are_probabilities else "values"
    lines = []
    for text, row, tokens, dropped in zip(texts, found.rows, found.token_counts, found.dropped_tokens, strict=True):
        line = {"text": text, "tokens": tokens, name: row}
        lines.append({**line, "dropped_tokens": dropped} if dropped else line)
    return {"model": model, "classifications": lines, "receipt": found.receipt.to_dict()}


def _print(texts: list[str], found: _Found) -> None:
    """A line a text, shortened, and one a class below it, the likeliest first."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character still gets the rest
    for text, row in zip(texts, found.rows, strict=True):
        print(shortened(text))
        for name, value in sorted(row.items(), key=lambda item: -item[1]):
            print(f"  {value:.3f}  {''.join(c if c.isprintable() else ' ' for c in name)}")
