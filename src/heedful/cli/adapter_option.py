"""--adapter, as `generate` and `chat` have it: one adapter, for every answer of the command."""

from __future__ import annotations

from typing import Annotated

import typer

Adapter = Annotated[
    str | None,
    typer.Option(help="A LoRA adapter in PEFT's layout to answer with: a folder, or hf:org/name."),
]


def adapter_from_option(source: str | None) -> dict[str, str]:
    """For LLM(adapters=…): its name is where it is."""
    return {} if source is None else {source: source}
