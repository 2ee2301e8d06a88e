"""The options of a prefix cache on disk, the same for every verb that computes answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from heedful.errors import BadParameter

PrefixCache = Annotated[
    Path | None, typer.Option(help="A folder that keeps computed prompts: one that begins alike goes on from there.")
]
PrefixCacheSize = Annotated[str, typer.Option(help="With --prefix-cache: the most it may grow to, as in 500MB.")]

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}


def prefix_cache_from_options(folder: Path | None, size: str) -> dict[str, Any]:
    """Arguments of LLM. Raises BadParameter."""
    return {"prefix_cache": folder, "prefix_cache_bytes": size_in_bytes("--prefix-cache-size", size)}


def size_in_bytes(option: str, size: str) -> int:
    """Raises BadParameter."""
    found = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,3})?)\s*([kmgt]?)b?\s*", size, flags=re.IGNORECASE | re.ASCII)
    size_bytes = int(float(found[1]) * _UNITS[found[2].lower()]) if found else 0
    if not size_bytes:
        raise BadParameter(option, f"{size!r:.40} is not a size", "Write 2GB, 500MB or a byte count.")
    return size_bytes
