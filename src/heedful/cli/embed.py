"""`heedful embed`: texts to vectors, one JSON line a text, or how similar the texts are; what it cost to stderr."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.errors import BadParameter

if TYPE_CHECKING:
    from heedful.engine.embedder import EmbeddingBatch

DEFAULT_MODEL = "minilm"
SHOWN_CHARACTERS = 40  # of a text beside its similarities


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
    threads: Annotated[int | None, typer.Option(help="Processors to use; default: all.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object with the receipt.")] = False,
    receipt: Annotated[
        bool | None, typer.Option("--receipt/--no-receipt", help="Receipt line on stderr; default: when not piped.")
    ] = None,
) -> None:
    """Turn TEXTS into vectors of length 1: of an encoder, or the mean of a decoder's hidden states."""
    wanted = _texts(texts or [], file)
    from heedful.engine.embedder import load_embedder

    batch = load_embedder(model, threads=threads).embed(wanted, truncate=truncate)
    if json_output:
        print(json.dumps(_as_json(wanted, batch, similarity)))
    elif similarity:
        _print_similarities(wanted, batch)
    else:
        for line in _lines(wanted, batch):
            print(json.dumps(line))
    if cut := sum(batch.dropped_tokens):
        texts_cut = sum(map(bool, batch.dropped_tokens))
        print(f"heedful: {cut:,} tokens of {texts_cut:,} texts were cut to fit the model", file=sys.stderr)
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
        print(" ".join(cells) + "  " + _shortened(texts[i]))


def _shortened(text: str) -> str:
    line = "".join(c if c.isprintable() else " " for c in text[: SHOWN_CHARACTERS + 1])
    return line if len(text) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 1] + "…"


def _texts(given: list[str], file: Path | None) -> list[str]:
    """TEXTS, then the file's lines; lines of stdin when neither is given or TEXTS is "-". An empty line is a text."""
    reads_stdin = given == ["-"] or (not given and file is None)
    if reads_stdin and given != ["-"] and sys.stdin.isatty():
        raise BadParameter("TEXT", "is missing", 'Give texts: heedful embed "one text" "another", or pipe lines in.')
    found = [] if given == ["-"] else list(given)
    if file is not None:
        found += _read_lines(file, "--file")
    if reads_stdin:
        found += _read_lines(Path("-"), "TEXT")
    if not found:
        raise BadParameter("TEXT", "is missing: there are no lines", "Give at least one text.")
    return found


def _read_lines(path: Path, option: str) -> list[str]:
    """Lines as editors count them; what ends the last one is not meant."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        text = data.decode("utf-8")
    except OSError as e:
        raise BadParameter(option, f"{path} cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise BadParameter(option, f"{path} is not UTF-8 text (byte {e.start:,})", "Convert it first.") from e
    lines = text.removesuffix("\n").split("\n") if text else []
    return [line.removesuffix("\r") for line in lines]
