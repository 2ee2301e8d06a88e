"""The model that a run begins from: found by any name that a verb takes, and recorded so that it is known again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from heedful.errors import BadParameter, FileFormatError, HeedfulError
from heedful.models.config import ModelConfig
from heedful.models.config_export import HF_CLASSES
from heedful.weights.load import LoadedModel, load, load_config
from heedful.weights.run_folder import sha256_of
from heedful.weights.sources import resolve

_NOT_OF_A_MODEL = ("optimizer.", "trained.", "updates.")
"""Files of a checkpoint from which training goes on, and nothing else does."""


@dataclass(frozen=True)
class Base:
    name: str
    """As it was given."""
    source: str
    """What finds the same files again: of a run's folder the checkpoint."""
    sha256: str
    """In hex, of its weights."""


def open_base(name: str) -> tuple[Base, LoadedModel]:
    """Raises as `load` does; BadParameter for models that cannot be trained."""
    loaded = load(name)
    _require_trainable(loaded.config)
    return recorded(name, loaded.path), loaded


def recorded(name: str, path: Path) -> Base:
    """What was called `name` and found at `path`."""
    return Base(name, str(path) if Path(name).exists() else name, _digest(path))


def require_unchanged(base: Base, found: Base) -> None:
    """Raises FileFormatError when what was found at its source is another."""
    if found.sha256 != base.sha256:
        raise FileFormatError(
            f"the base {base.name} has changed: its sha256 was {base.sha256[:16]}… and is {found.sha256[:16]}…",
            f"Put back what lay at {base.source}, or begin the run anew.",
        )


def cannot_be_opened(base: Base, error: HeedfulError) -> FileFormatError:
    return FileFormatError(f"the base {base.name} cannot be opened: {error.message}", error.remedy)


def reopened(base: Base) -> LoadedModel:
    """Raises FileFormatError when it is not there any more or is another now."""
    try:
        loaded = load(base.source)
    except HeedfulError as error:
        raise cannot_be_opened(base, error) from error
    require_unchanged(base, recorded(base.source, loaded.path))
    return loaded


def base_from_facts(facts: Mapping[str, Any]) -> Base:
    """Raises FileFormatError."""
    try:
        return Base(**facts)
    except TypeError as error:
        raise FileFormatError(f"the run does not say which base it has ({error})", "Begin the run anew.") from error


def base_config(name: str) -> ModelConfig:
    """Raises as `open_base` does."""
    config = load_config(resolve(name).path)
    _require_trainable(config)
    return config


def _require_trainable(config: ModelConfig) -> None:
    if config.family not in HF_CLASSES or config.delta is not None:
        raise BadParameter("--base", f"is of the family {config.family}", f"Trained are {', '.join(HF_CLASSES)}.")
    if config.attention_softcap is not None:
        raise BadParameter("--base", "caps its attention scores, which training does not", "Take another base.")


def _digest(path: Path) -> str:
    """Of a GGUF file, or of a folder's configuration and weights."""
    if path.is_file():
        return sha256_of(path)
    digest = sha256()
    configs = [file for name in ("config.json", "rl_agent_config.json") if (file := path / name).exists()]
    for file in [*configs, *sorted(path.glob("*.safetensors"))]:
        if file.name.startswith(_NOT_OF_A_MODEL):
            continue
        digest.update(f"{file.name} {sha256_of(file)}\n".encode())
    return digest.hexdigest()
