"""The files that sentence-transformers keeps beside a model: modules.json, a pooling config, sentence_bert_config.json.

What they ask for and heedful does not compute is refused, not left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heedful.errors import SourceError, UnsupportedModel
from heedful.models.pooling import Pooling, PoolingMode
from heedful.weights.load import read_json
from heedful.weights.source_names import is_safe_relative_path

_MODES: dict[str, PoolingMode] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
    "lasttoken": "last",
}
"""By the flag of older files and by the word of newer ones."""

_SUPPORTED = "heedful pools by mean, cls or lasttoken, and normalises."


def read_pooling(folder: Path) -> Pooling:
    """What the files in a model's folder say; Pooling() where there are none.

    Raises SourceError for a damaged file, UnsupportedModel for a step that heedful does not compute.
    """
    mode, normalize = _read_modules(folder)
    sizes = read_json(folder / "sentence_bert_config.json") if (folder / "sentence_bert_config.json").exists() else {}
    max_tokens = sizes.get("max_seq_length")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise UnsupportedModel(f"max_seq_length is {str(max_tokens)[:60]}", "It must be a positive whole number.")
    return Pooling(mode, normalize, max_tokens, lowercase=bool(sizes.get("do_lower_case", False)))


def _read_modules(folder: Path) -> tuple[PoolingMode, bool]:
    """(mode, whether a Normalize module follows)."""
    mode: PoolingMode = "mean"
    normalize = False
    for kind, place in _modules(folder / "modules.json"):
        if kind == "Pooling":
            mode = _mode(read_json(folder / place / "config.json"))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise UnsupportedModel(f"modules.json has a step {kind[:60]!r} after the model", _SUPPORTED)
    return mode, normalize


def _modules(path: Path) -> list[tuple[str, str]]:
    """(kind, folder) of each step; [] where there is no such file."""
    if not path.is_file():
        return []
    try:
        listed = json.loads(path.read_bytes())
        modules = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in listed]
    except (ValueError, OSError, RecursionError, LookupError, TypeError) as error:
        raise SourceError(f"{path} is no list of modules: {error!r:.200}", "Fetch the file again.") from error
    for _, place in modules:
        if place and not is_safe_relative_path(place):
            raise SourceError(f"{path} names the folder {place[:60]!r}", "It must lie inside the model's folder.")
    return modules


def _mode(config: Mapping[str, Any]) -> PoolingMode:
    word = config.get("pooling_mode")
    flags = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    asked = [str(word)] if word is not None else flags
    if len(asked) != 1 or asked[0] not in _MODES:
        raise UnsupportedModel(f"the model pools by {', '.join(asked)[:200] or 'nothing'}", _SUPPORTED)
    return _MODES[asked[0]]
