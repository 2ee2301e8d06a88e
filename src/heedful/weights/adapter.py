"""An adapter beside its base: read once, told from others by what is in it, used per request or merged for good.

    adapter = load_adapter("path/to/adapter", config, weights)
    adapter.updates["layers.0.attn.q.weight"]       # A (r, in) and B (out, r), the scale in B
    merged = merged_weights(weights, adapter)       # the base with W + B A

Sources are those of models: a path, `hf:…`. What is read of the files, and what is refused, is lora.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from heedful.errors import SourceError, UnknownModel, UnsupportedModel
from heedful.models.config import ModelConfig
from heedful.weights.lora import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    LoraAdapter,
    LowRank,
    read_lora,
    require_none_missing,
    require_shape,
)
from heedful.weights.names import Weights
from heedful.weights.quantize import Floats
from heedful.weights.sources import resolve
from heedful.weights.tensor import StoredTensor

_NOT_PRODUCTS = ("embed.weight", "position_embed.weight", ".delta.conv.weight")
"""Matrices that no token's vector is multiplied with: ends of names."""
_FORM = f"An adapter is a folder with {CONFIG_NAME} and {WEIGHTS_NAME}, as the peft package saves it."


@dataclass(frozen=True, eq=False)
class Adapter:
    source: str
    """As it was asked for."""
    updates: Mapping[str, LowRank]
    """By the base's matrix names (weights/names.py). C-contiguous float32; the scale is in B, `scale` is 1."""
    sha256: str
    """In hex, of all names and numbers: what its base computes with it depends on nothing else of it."""


def load_adapter(source: str, config: ModelConfig, weights: Weights) -> Adapter:
    """The adapter called `source` for the base with this config and these weights; fetched where it is not here.

    Raises SourceError when it cannot be had, FileFormatError when a file is damaged, UnsupportedModel when it is not a
    plain LoRA, or not of this base.
    """
    lora = read_lora(_folder(source), config)
    require_none_missing(name for name in lora.updates if name not in weights)
    for name, update in lora.updates.items():
        require_shape(name, update, weights[name].shape)
        if name.endswith(_NOT_PRODUCTS):
            raise UnsupportedModel(f"the adapter updates {name}, which tokens are not multiplied with", _FORM)
    updates = {name: _scaled(name, update) for name, update in sorted(lora.updates.items())}
    return Adapter(source, updates, _digest(updates))


def merged_weights(base: Weights, adapter: Adapter) -> Weights:
    """The base's weights, those that the adapter updates as float32 sums: W + B A. The others are the base's own.

    Raises UnsupportedModel when they do not belong together.
    """
    require_none_missing(name for name in adapter.updates if name not in base)
    merged = dict(base)
    for name, update in adapter.updates.items():
        matrix = base[name].to_float32()
        LoraAdapter({name: update}).merge_into([(name, matrix)])
        merged[name] = StoredTensor(base[name].name, "F32", matrix.shape, matrix.view(np.uint8))
    return merged


def _folder(source: str) -> Path:
    try:
        path = resolve(source).path
    except UnknownModel as error:
        raise SourceError(f"no adapter is at {source!r:.200}", f"Give a path, or hf:org/name. {_FORM}") from error
    if path.name in (CONFIG_NAME, WEIGHTS_NAME):
        path = path.parent
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (path / name).exists():
            pickled = (path / "adapter_model.bin").exists()
            why = "Its weights are pickled, and such files are not opened. " if pickled else ""
            raise SourceError(f"{path} has no {name}", why + _FORM)
    return path


def _scaled(name: str, update: LowRank) -> LowRank:
    a, b = np.ascontiguousarray(update.a), update.b * np.float32(update.scale)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise UnsupportedModel(f"the adapter's update of {name} has numbers that are not finite", "Train it again.")
    return LowRank(a, b, 1.0)


def _digest(updates: Mapping[str, LowRank]) -> str:
    digest = sha256()
    for name, update in updates.items():
        digest.update(f"{name} {update.shape} {update.rank}\n".encode())
        for side in (update.a, update.b):
            digest.update(_bytes(side))
    return digest.hexdigest()


def _bytes(values: Floats) -> memoryview:
    return np.ascontiguousarray(values, dtype="<f4").data
