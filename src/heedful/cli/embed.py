"""`heedful embed`: texts to vectors, one JSON line a text, or how similar the texts are; what it cost to stderr."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.cli.policy_options import PackedWeights
from heedful.cli.text_input import listed_texts, print_cut, shortened

if TYPE_CHECKING:
    from heedful.engine.embedder import EmbeddingBatch

DEFAULT_MODEL = "minilm"


def embed(
    texts: Annotated[list[str] | None, typer.Argument(help="Texts; none, or -, reads lines from stdin.")] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="Alias, path, hf:org/name or wheel:…")] = DEFAULT_MODEL,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Texts, one a line, after those given; - is stdin.")
    ] = None,
    similarity: Annotated[
        bool, typer.Option("--similarity", help="Print the cosine similarity of every two texts.")
    ] = False,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut a text that does not fit; say how much.")] = False,
    weights: PackedWeights = None,
    threads: Annotated[int | None, typer.Option(help="Processors to use; default: all.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object with the receipt.")] = False,
    receipt: Annotated[
        bool | None, typer.Option("--receipt/--no-receipt", help="Receipt line on stderr; default: when not piped.")
    ] = None,
) -> None:
    """Turn TEXTS into vectors of length 1: of an encoder, or the mean of a decoder's hidden states."""
    wanted = listed_texts("embed", texts or [], file)
    from heedful.engine.embedder import load_embedder

    batch = load_embedder(model, threads=threads, weights=weights).embed(wanted, truncate=truncate)
    if json_output:
        print(json.dumps(_as_json(wanted, batch, similarity)))
    elif similarity:
        _print_similarities(wanted, batch)
    else:
        for line in _lines(wanted, batch):
            print(json.dumps(line))
    print_cut(batch.dropped_tokens)
    if receipt if receipt is not None else sys.stdout.isatty() and not json_output:
        print(batch.receipt.line(), file=sys.stderr)


def _as_json(texts: list[str], batch: EmbeddingBatch, similarity: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "model": batch.receipt.model,
        "dimensions": batch.vectors.shape[1],
        "embeddings": _lines(texts, batch),
    }
    if similarity:
        shown["similarity"] = [_floats(row) for row in batch.vectors @ batch.vectors.T]
    return {**shown, "receipt": batch.receipt.to_dict()}


def _lines(texts: list[str], batch: EmbeddingBatch) -> list[dict[str, Any]]:
    found = []
    for i, text in enumerate(texts):
        line = {"text": text, "tokens": batch.token_counts[i], "embedding": _floats(batch.vectors[i])}
        if batch.dropped_tokens[i]:
            line["dropped_tokens"] = batch.dropped_tokens[i]
        found.append(line)
    return found


def _floats(row: Any) -> list[float]:
    """Nine significant digits, from which the same float32 is read again."""
    return [float(f"{number:.9g}") for number in row]


def _print_similarities(texts: list[str], batch: EmbeddingBatch) -> None:
    """A row and a column a text; the text itself, shortened to a line, ends its row."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character still gets the rest
    width = max(6, len(str(len(texts))))
    print(" ".join(["".rjust(width), *(str(i + 1).rjust(width) for i in range(len(texts)))]))
    for i, row in enumerate(batch.vectors @ batch.vectors.T):
        cells = [str(i + 1).rjust(width), *(f"{number:{width}.3f}" for number in row)]
        print(" ".join(cells) + "  " + shortened(texts[i]))
