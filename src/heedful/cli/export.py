"""`heedful export`: a model as files that transformers or llama.cpp load. What they hold is not decided here."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heedful.cli.progress_bar import progress_bar
from heedful.errors import BadParameter

if TYPE_CHECKING:
    from heedful.weights.export import Exported
    from heedful.weights.load import LoadedModel


def export(
    model: Annotated[str, typer.Option("--model", "-m", help="A run's folder, an alias, path, hf:org/name or wheel:…")],
    to: Annotated[str, typer.Option("--to", help="hf: a folder for transformers; gguf: a file for llama.cpp.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder or file to write.")],
    kind: Annotated[
        str | None,
        typer.Option("--type", help="Of the weights. hf: f32, f16, bf16; gguf: f16 (default), q8_0, bf16, f32."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a model for other programs. It is there when the command ends well, and not before."""
    from heedful.weights.export import GGUF_TYPES, HF_TYPES
    from heedful.weights.load import load

    types = {"hf": HF_TYPES, "gguf": GGUF_TYPES}.get(to)
    if types is None:
        raise BadParameter("--to", f"is {to!r:.40}", "Known: hf, gguf.")
    if kind is not None and kind not in types:
        raise BadParameter("--type", f"is {kind!r:.40}", f"With --to {to}: {', '.join(types)}.")
    written = _write(load(model), to, out, kind, force)
    if json_output:
        facts = {"path": str(written.path), "type": written.type, "weights_bytes": written.num_bytes}
        print(json.dumps({**facts, "tensors": written.tensors}))
    else:
        _print(written, to)


def _write(loaded: LoadedModel, to: str, out: Path, kind: str | None, force: bool) -> Exported:
    from heedful.weights.export import export_gguf, export_hf, gguf_tensors, hf_tensors, widest_type

    kind = kind or ("f16" if to == "gguf" else widest_type(loaded))
    tensors = (gguf_tensors if to == "gguf" else hf_tensors)(loaded, kind)
    with progress_bar("writing", sum(tensor.num_bytes for tensor in tensors)) as progress:
        write = export_gguf if to == "gguf" else export_hf
        return write(loaded, out, kind, overwrite=force, progress=progress)


def _print(written: Exported, to: str) -> None:
    from heedful.weights.progress import bytes_text

    path = shlex.quote(str(written.path))
    print(f"{written.path}: {written.tensors:,} tensors, {bytes_text(written.num_bytes)} of {written.type} weights")
    if to == "hf":
        print(f"transformers: AutoModelForCausalLM.from_pretrained({str(written.path)!r})")
    else:
        print(f"llama.cpp: llama-cli -m {path}")
    print(f"heedful: heedful generate -m {path} 'Once'")
