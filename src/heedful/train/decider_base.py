"""What a run that learns to decide begins from: an encoder, which gets a fresh head, or a Laya checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heedful.decide.laya_input import LayaPacker
from heedful.decide.load import find_decider
from heedful.errors import BadParameter, HeedfulError
from heedful.models.laya_config import LayaConfig, LayaLayout
from heedful.train.base import Base, cannot_be_opened, recorded, require_unchanged
from heedful.train.settings import LoraSettings, TrainSettings
from heedful.weights.load_encoder import load_encoder
from heedful.weights.load_laya import MOST_LEN, load_laya, marked_tokenizer, require_tokens_of_trunk
from heedful.weights.lora import LoraAdapter
from heedful.weights.names import Weights
from heedful.weights.source_names import ALIASES

TRAINED_TRUNKS = ("bert", "modernbert")
_ROOM, _ROOM_WITHOUT_STATE = 8, 6
"""Tokens of a question to each position of the trunk: options share their positions."""
_TARGETS = {
    "q": ("q_proj",),
    "k": ("k_proj",),
    "v": ("v_proj",),
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "up": ("up_proj",),
    "down": ("down_proj",),
}
"""Matrices of an encoder's layers by the names that settings have for them."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class DeciderBase:
    config: LayaConfig
    packer: LayaPacker
    trunk: Weights
    updates: LoraAdapter | None
    """Of the trunk, which they are not yet added to."""
    head: Weights | None
    """None: it has none yet."""
    alias: str | None
    """Of the trunk, where heedful has it by one: a checkpoint of updates then need not hold it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """rl_agent_config.json of a checkpoint."""
    trunk_files: Mapping[str, Path] = field(default_factory=dict)
    """What a checkpoint with the trunk in it has beside the weights, by name."""


def open_decider_base(name: str, settings: TrainSettings) -> tuple[Base, DeciderBase]:
    """Raises as `find_decider` and the loaders do; BadParameter for what cannot learn decisions, or not so."""
    source = find_decider(name)
    if source.kind not in ("laya", "classifier") or source.path is None:
        raise BadParameter(
            "--base",
            f"{name} is neither an encoder nor a Laya checkpoint",
            "Take minilm, or a run that learned to decide.",
        )
    found = _of_checkpoint(source.path) if source.kind == "laya" else _of_encoder(name, settings.decide.head_layers)
    if found.config.trunk.family not in TRAINED_TRUNKS:
        raise BadParameter(
            "--base", f"is of the family {found.config.trunk.family}", f"Trained are {', '.join(TRAINED_TRUNKS)}."
        )
    if settings.lora.rank:
        _require_fitting_updates(found, settings.lora)
    return recorded(name, source.path), found


def _require_fitting_updates(base: DeciderBase, settings: LoraSettings) -> None:
    """Those of the base are gone on with."""
    if not any(is_target(name, settings) for name in base.trunk):
        known = ", ".join(dict.fromkeys(name for names in _TARGETS.values() for name in names))
        raise BadParameter("lora.targets", "names no matrix of this encoder", f"Known: {known}.")
    for name, update in ({} if base.updates is None else base.updates.updates).items():
        if (update.rank, update.scale) != (settings.rank, settings.scale):
            raise BadParameter(
                "lora.rank",
                f"is {settings.rank} with alpha {settings.told_alpha:g}; the base has updates of rank {update.rank} "
                f"with alpha {update.scale * update.rank:g}",
                f"Give --lora {update.rank}, or train all weights, without --lora.",
            )
        if not is_target(name, settings):
            raise BadParameter("lora.targets", f"leaves out {name}, which the base updates", "Do not set it.")


def is_target(name: str, settings: LoraSettings) -> bool:
    """Whether a weight of the trunk, by our name, gets an update."""
    wanted = _TARGETS.get(name.removesuffix(".weight").rpartition(".")[2])
    return name.startswith("layers.") and wanted is not None and set(wanted) <= set(settings.targets)


def reopened_decider_base(base: Base, settings: TrainSettings) -> DeciderBase:
    """Raises FileFormatError when it is not there any more or is another now."""
    try:
        found, opened = open_decider_base(base.source, settings)
    except HeedfulError as error:
        raise cannot_be_opened(base, error) from error
    require_unchanged(base, found)
    return opened


def _of_encoder(name: str, head_layers: int) -> DeciderBase:
    loaded = load_encoder(name)
    config = LayaConfig(loaded.config, head_layers)
    tokenizer, marks = marked_tokenizer(loaded.path)
    require_tokens_of_trunk(tokenizer, loaded.config)
    positions = loaded.config.context_len
    layout = LayaLayout(
        min(MOST_LEN, _ROOM * positions), min(MOST_LEN, _ROOM_WITHOUT_STATE * positions), positions, parallel=True
    )
    return DeciderBase(
        config,
        LayaPacker(tokenizer, marks, layout),
        loaded.weights,
        updates=None,
        head=None,
        alias=name if name in ALIASES else None,
        settings={"encoder": name, "head_layers": head_layers, "act_costs": {}, **_of_layout(layout)},
        trunk_files=_files(loaded.path / "config.json", loaded.path),
    )


def _of_layout(layout: LayaLayout) -> dict[str, Any]:
    return {"max_len": layout.max_len, "head_max_len": layout.head_max_len, "option_layout": "parallel"}


def _of_checkpoint(folder: Path) -> DeciderBase:
    loaded = load_laya(folder)
    alias = str(loaded.settings["encoder"]) if loaded.settings.get("trunk") == "alias" else None
    if alias is None:
        files = _files(folder / "encoder" / "config.json", folder / "tokenizer")
    else:
        trunk = load_encoder(alias).path
        files = _files(trunk / "config.json", trunk)
    return DeciderBase(
        loaded.config,
        LayaPacker(loaded.tokenizer, loaded.marks, loaded.layout),
        loaded.trunk,
        loaded.updates,
        loaded.head,
        alias,
        loaded.settings,
        files,
    )


def _files(config: Path, tokenizer: Path) -> dict[str, Path]:
    named = {f"tokenizer/{name}": tokenizer / name for name in _TOKENIZER_FILES if (tokenizer / name).exists()}
    return {"encoder/config.json": config, **named}
