"""A Laya checkpoint's folder to everything that running it needs.

As published: rl_agent_config.json, model.safetensors, encoder/config.json, tokenizer/. Or a small one, whose trunk is
an encoder that heedful has by an alias: "trunk": "alias" in the config, whose "encoder" is then the alias; there is
neither encoder/ nor tokenizer/, and of the trunk the weights hold low-rank updates alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.errors import UnsupportedModel
from heedful.models.encoder_config import EncoderConfig, encoder_config_from_hf
from heedful.models.laya_config import LayaConfig, LayaLayout
from heedful.text.tokenizer import Tokenizer
from heedful.weights.encoder_names import encoder_from_hf
from heedful.weights.laya_names import LayaTensors, laya_from_hf
from heedful.weights.load import read_json
from heedful.weights.load_encoder import load_encoder
from heedful.weights.lora import MOST_RANK, LoraAdapter, LowRank, lora_scale
from heedful.weights.names import Weights
from heedful.weights.safetensors_file import read_safetensors
from heedful.weights.source_names import ALIASES
from heedful.weights.tensor import brief

CONFIG_NAME = "rl_agent_config.json"
_MOST_HEAD_LAYERS = 64
MOST_LEN = 1 << 20
_LAYOUTS = ("sequential", "parallel")
_DAMAGED = "The file is damaged, or of another kind of model."


@dataclass(frozen=True)
class LayaMarks:
    """Ids of the tokens that no text can make."""

    cls: int
    sep: int
    mask: int
    mask_text: str


@dataclass(frozen=True)
class LoadedLaya:
    config: LayaConfig
    layout: LayaLayout
    tokenizer: Tokenizer
    marks: LayaMarks
    trunk: Weights
    """By the names of weights/encoder_names.py."""
    updates: LoraAdapter | None
    """Of the trunk, by the same names."""
    head: Weights
    """By the names of weights/laya_names.py."""
    settings: Mapping[str, Any]
    """rl_agent_config.json as it is: the temperatures are read from it elsewhere."""


@dataclass(frozen=True)
class _Trunk:
    config: EncoderConfig
    tokenizer_folder: Path
    weights: Weights


def load_laya(folder: Path) -> LoadedLaya:
    """Raises SourceError or FileFormatError for a file that is missing or damaged, UnsupportedModel for what is no
    Laya checkpoint or one that heedful does not run.
    """
    settings = read_json(folder / CONFIG_NAME)
    tensors = laya_from_hf(read_safetensors(folder))
    trunk = _alias_trunk(settings, tensors) if settings.get("trunk") == "alias" else _own_trunk(folder, tensors)
    head_layers = _whole("head_layers", settings.get("head_layers"), 1, _MOST_HEAD_LAYERS)
    config = LayaConfig(trunk.config, head_layers, _actions(settings, tensors.head))
    tokenizer, marks = marked_tokenizer(trunk.tokenizer_folder)
    require_tokens_of_trunk(tokenizer, config.trunk)
    return LoadedLaya(
        config,
        _layout(settings, config),
        tokenizer,
        marks,
        trunk.weights,
        _updates(settings, tensors, config.trunk.family),
        tensors.head,
        settings,
    )


def _own_trunk(folder: Path, tensors: LayaTensors) -> _Trunk:
    config = encoder_config_from_hf(read_json(folder / "encoder" / "config.json"))
    weights, others = encoder_from_hf(config.family, tensors.trunk)
    if unneeded := [name for name in others if not name.startswith("pooler.")]:  # BERT's, which no answer needs
        raise UnsupportedModel(f"the trunk has another head on it: {unneeded[0]}", _DAMAGED)
    return _Trunk(config, folder / "tokenizer", weights)


def _alias_trunk(settings: Mapping[str, Any], tensors: LayaTensors) -> _Trunk:
    """Only an alias: a file of a stranger must not name what is fetched from anywhere."""
    alias = settings.get("encoder")
    if not isinstance(alias, str) or alias not in ALIASES or ALIASES[alias].kind != "encoder":
        raise UnsupportedModel(f"{CONFIG_NAME} stands on {brief(alias)}, which is no alias of an encoder", _DAMAGED)
    if tensors.trunk:
        name = next(iter(tensors.trunk))
        raise UnsupportedModel(f"the trunk is {alias}, and the file has a weight {brief(name)} of its own", _DAMAGED)
    base = load_encoder(alias)
    return _Trunk(base.config, base.path, base.weights)


def _actions(settings: Mapping[str, Any], head: Weights) -> int | None:
    """Outputs of the act head; None where there is none."""
    costs = settings.get("act_costs", {})
    if not isinstance(costs, Mapping):
        raise UnsupportedModel(f"act_costs is {brief(costs)}", "It must be an object.")
    return len(costs) + 1 if any(name.startswith("act.") for name in head) else None


def _layout(settings: Mapping[str, Any], config: LayaConfig) -> LayaLayout:
    name = settings.get("option_layout", _LAYOUTS[0])
    if name not in _LAYOUTS:
        raise UnsupportedModel(f"option_layout is {brief(name)}", f"Known: {', '.join(_LAYOUTS)}.")
    parallel = name == "parallel"
    if parallel and config.trunk.relative is not None:
        raise UnsupportedModel("options side by side on a DeBERTa are not computed", "Take one in sequential layout.")
    return LayaLayout(
        _whole("max_len", settings.get("max_len", 512), 1, MOST_LEN),
        _whole("head_max_len", settings.get("head_max_len", 192), 1, MOST_LEN),
        config.trunk.context_len,
        parallel,
    )


def _updates(settings: Mapping[str, Any], tensors: LayaTensors, family: str) -> LoraAdapter | None:
    if not tensors.updates:
        return None
    rank = _whole("lora_r", settings.get("lora_r"), 1, MOST_RANK)
    scale = lora_scale(settings.get("lora_alpha"), rank)
    for layer, (a, b) in tensors.updates.items():
        if not (len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1] == rank):
            shapes = f"{a.shape} and {b.shape}, of rank {rank}"
            raise UnsupportedModel(f"the matrices of the update of {layer} have shapes {shapes}", _DAMAGED)
    # B has a row for each row of the matrix that it updates: it is renamed as that one would be
    ours, others = encoder_from_hf(family, {f"{layer}.weight": b for layer, (_, b) in tensors.updates.items()})
    if others:
        raise UnsupportedModel(f"the trunk has no {brief(next(iter(others)))} to update", _DAMAGED)
    first = {b.name: a for a, b in tensors.updates.values()}
    low_rank = {name: LowRank(first[b.name].to_float32(), b.to_float32(), scale) for name, b in ours.items()}
    return LoraAdapter(low_rank)


def require_tokens_of_trunk(tokenizer: Tokenizer, trunk: EncoderConfig) -> None:
    """Raises UnsupportedModel for a tokenizer with tokens that the trunk lacks."""
    if tokenizer.vocab_size > trunk.vocab_size:
        sizes = f"{tokenizer.vocab_size:,} tokens, the trunk {trunk.vocab_size:,}"
        raise UnsupportedModel(f"the tokenizer has {sizes}", "They do not belong together.")


def marked_tokenizer(folder: Path) -> tuple[Tokenizer, LayaMarks]:
    """Raises UnsupportedModel where it has not the marks that questions need."""
    files = [folder / name for name in ("tokenizer_config.json", "special_tokens_map.json")]
    named = [read_json(path) for path in files if path.exists()]
    texts = [_mark_text(kind, named) for kind in ("cls", "sep", "mask")]
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json", control=texts)
    cls, sep, mask = (tokenizer.id_of(text) for text in texts)
    if cls is None or sep is None or mask is None:
        raise UnsupportedModel(f"the tokenizer has not all of the tokens {', '.join(map(brief, texts))}", _DAMAGED)
    return tokenizer, LayaMarks(cls, sep, mask, texts[2])


def _mark_text(kind: str, named: list[dict[str, Any]]) -> str:
    """Of the token that the tokenizer's files name `<kind>_token`: its text, or an object with the text as `content`"""
    found = next((entry for file in named if (entry := file.get(f"{kind}_token"))), None)
    text = found.get("content") if isinstance(found, Mapping) else found
    if not isinstance(text, str) or not text:
        raise UnsupportedModel(f"the tokenizer has no {kind} token", "Laya's questions need one.")
    return text


def _whole(name: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UnsupportedModel(f"{name} is {brief(value)}", f"It must be a whole number from {least} to {most:,}.")
    return value
