"""LoRA adapters in the layout of the peft package: read with distrust, then added to the weights they belong to.

    adapter = read_lora(folder, config)
    adapter.merge_into(slots)       # W += scale · B A, in float32, once

(LoRA: arXiv:2106.09685.) Parts of an adapter that such a sum cannot express are refused by their names. To keep an
adapter apart from its base: adapter.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from heedful.errors import UnsupportedModel
from heedful.models.config import ModelConfig
from heedful.weights.load import read_json
from heedful.weights.names import from_hf
from heedful.weights.quantize import Floats
from heedful.weights.safetensors_file import read_safetensors
from heedful.weights.tensor import StoredTensor, brief

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

_NOT_MERGED = (
    "alora_invocation_tokens",
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
)
"""Settings of parts that are not read here; so are all `use_…` but rsLoRA's, which name other formulas (DoRA, …), and
all `…_config` but those of how the matrices were initialised."""
_OF_INITIALISATION = ("corda_config", "eva_config", "loftq_config", "lora_ga_config")
_KEEPS_THE_BASE = (True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights; others (PiSSA, OLoRA, LoftQ, …) change the base's own weights."""
_PREFIX = "base_model.model."
_FLOATS = ("F32", "F16", "BF16", "F64")
MOST_RANK, MOST_ALPHA = 1 << 20, 1 << 30
_ANOTHER_BASE = "Adapter and base do not belong together."
_COPY = "It is a copy of the base's matrix: save the adapter with save_embedding_layers=False."
_REMEDY = "Merge the adapter with the tool that made it, and give the merged model."


@dataclass(frozen=True, eq=False)
class LowRank:
    """An update scale · B A of one matrix."""

    a: Floats
    """(r, in)."""
    b: Floats
    """(out, r)."""
    scale: float
    """alpha / r, or alpha / sqrt(r) in rsLoRA (arXiv:2312.03732)."""

    @property
    def rank(self) -> int:
        return len(self.a)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.b), self.a.shape[1]


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    updates: Mapping[str, LowRank]
    """By the names of weights/names.py."""

    def merge_into(self, slots: Iterable[tuple[str, Floats]]) -> None:
        """Adds each update, in place, to the float32 matrix of its name. Raises UnsupportedModel for a matrix that is
        not there or has another shape.
        """
        left = dict(self.updates)
        for name, slot in slots:
            if (update := left.pop(name, None)) is None:
                continue
            require_shape(name, update, slot.shape)
            slot += update.scale * (update.b @ update.a)
        require_none_missing(left)


def require_shape(name: str, update: LowRank, shape: tuple[int, ...]) -> None:
    """That the update fits the base's matrix of this shape. Raises UnsupportedModel."""
    if shape != update.shape:
        raise UnsupportedModel(
            f"the adapter's update of {name} has shape {update.shape}, the base's matrix {shape}", _ANOTHER_BASE
        )


def require_none_missing(names: Iterable[str]) -> None:
    """That there are none: updates whose matrices the base has not. Raises UnsupportedModel."""
    if missing := list(names):
        raise UnsupportedModel(
            f"the base has no matrices {', '.join(missing[:5])}, which the adapter updates", _ANOTHER_BASE
        )


def read_lora(folder: Path, config: ModelConfig) -> LoraAdapter:
    """The adapter in `folder` for a base of this config.

    Raises SourceError or FileFormatError for files that are missing or damaged, UnsupportedModel for an adapter that
    is not a plain LoRA, or not of such a base.
    """
    settings = read_json(folder / CONFIG_NAME)
    _require_plain(settings)
    pairs = _pairs(read_safetensors(folder / WEIGHTS_NAME))
    ranks, scales = _ByLayer(settings, "r", "rank_pattern"), _ByLayer(settings, "lora_alpha", "alpha_pattern")
    scale_of = {}
    for layer, (a, b) in pairs.items():
        rank = ranks.of(layer)
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= MOST_RANK:
            raise UnsupportedModel(f"{CONFIG_NAME} has r {brief(rank)}, which is no rank", "The file is damaged.")
        if not (len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1] == rank):
            raise UnsupportedModel(
                f"the adapter's matrices for {layer} have shapes {a.shape} and {b.shape}, of rank {rank}",
                "The file is damaged.",
            )
        scale_of[layer] = lora_scale(scales.of(layer), rank, rank_stabilised=bool(settings.get("use_rslora")))
    return LoraAdapter(_by_our_names(pairs, scale_of, config))


class _ByLayer:
    """A setting, and the layers for which a pattern says otherwise: the first that is a layer's name, or the end of it
    behind a dot, as peft has it. Patterns may be any regular expression there; here they are names, with ^ or without.
    """

    def __init__(self, settings: Mapping[str, Any], name: str, patterns: str) -> None:
        self._plain = settings.get(name)
        self._others = settings.get(patterns) or {}
        if not isinstance(self._others, Mapping):
            raise UnsupportedModel(f"{CONFIG_NAME} has {patterns} {brief(self._others)}", "The file is damaged.")
        for pattern in self._others:
            if not re.fullmatch(r"\^?[\w.]{1,200}", pattern):
                raise UnsupportedModel(f"{patterns} has {brief(pattern)}, which is no name of a layer", _REMEDY)

    def of(self, layer: str) -> Any:
        for pattern, value in self._others.items():
            if layer == pattern.removeprefix("^") or layer.endswith(f".{pattern}"):
                return value
        return self._plain


def lora_scale(alpha: Any, rank: int, *, rank_stabilised: bool = False) -> float:
    """alpha / rank, or alpha / sqrt(rank). Raises UnsupportedModel."""
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= MOST_ALPHA:
        raise UnsupportedModel(f"lora_alpha is {brief(alpha)}", f"It must be a number of at most {MOST_ALPHA:,}.")
    return alpha / (sqrt(rank) if rank_stabilised else rank)


def _require_plain(settings: Mapping[str, Any]) -> None:
    if settings.get("peft_type") != "LORA":
        raise UnsupportedModel(f"the adapter is of the kind {brief(settings.get('peft_type'))}, not LORA", _REMEDY)
    if settings.get("bias", "none") != "none":
        raise UnsupportedModel(f"the adapter has bias {brief(settings['bias'])}, only 'none' is read", _REMEDY)
    if settings.get("init_lora_weights", True) not in _KEEPS_THE_BASE:
        how = brief(settings["init_lora_weights"])
        raise UnsupportedModel(f"the adapter has init_lora_weights {how}, which changes the base", _REMEDY)
    for name, value in settings.items():
        of_config = name.endswith("_config") and name not in _OF_INITIALISATION
        of_formula = name.startswith("use_") and name != "use_rslora"
        if value and (name in _NOT_MERGED or of_formula or of_config):
            raise UnsupportedModel(f"the adapter has {brief(name)} {brief(value)}, which is not read here", _REMEDY)


def _pairs(stored: Mapping[str, StoredTensor]) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    """(A, B) by the name of the layer they update."""
    sides: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        found = re.fullmatch(rf"{re.escape(_PREFIX)}(.+)\.lora_(A|B)\.weight", name)
        if found is None:
            remedy = _COPY if name.endswith(".base_layer.weight") else _REMEDY
            raise UnsupportedModel(f"the adapter has a tensor {brief(name)}, which is no LoRA matrix", remedy)
        if tensor.format_name not in _FLOATS:
            raise UnsupportedModel(f"{name} is stored as {tensor.format_name}", f"Read are {', '.join(_FLOATS)}.")
        sides.setdefault(found[1], {})[found[2]] = tensor
    if not sides:
        raise UnsupportedModel("the adapter updates nothing", "The file is incomplete.")
    for layer, of_layer in sides.items():
        if len(of_layer) != 2:
            raise UnsupportedModel(f"the adapter has one of two matrices for {layer}", "The file is incomplete.")
    return {layer: (of_layer["A"], of_layer["B"]) for layer, of_layer in sides.items()}


def _by_our_names(
    pairs: Mapping[str, tuple[StoredTensor, StoredTensor]], scale_of: Mapping[str, float], config: ModelConfig
) -> dict[str, LowRank]:
    """B has a row for each row of the base's matrix, so it goes the way of that matrix: renamed, fused ones split."""
    ours = from_hf({f"{layer}.weight": b for layer, (_, b) in pairs.items()}, config)
    layers = {name: b.name.removeprefix(_PREFIX).removesuffix(".lora_B.weight") for name, b in ours.items()}
    if lost := set(pairs) - set(layers.values()):  # a head that is the embedding too
        raise UnsupportedModel(f"the adapter updates {sorted(lost)[0]}, which this base has not by itself", _REMEDY)
    return {
        name: LowRank(pairs[layers[name]][0].to_float32(), b.to_float32(), scale_of[layers[name]])
        for name, b in ours.items()
    }
