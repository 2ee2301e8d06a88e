"""The decider that a run trains, and how a checkpoint keeps it, in Laya's layout: a head on a trunk whose weights are
all trained, or stay and get low-rank updates beside them.

Of updates on a trunk that heedful has by an alias a checkpoint holds the updates alone; else it holds the whole trunk,
updates added, and what training goes on from in a file of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from heedful.engine.torch_embed import build_encoder
from heedful.engine.torch_laya import build_head
from heedful.models.laya import HeadBlock, LayaHead, LayaNetwork
from heedful.models.laya_config import LayaConfig
from heedful.train import checkpoint as files
from heedful.train.checkpoint import Arrays
from heedful.train.decider_base import DeciderBase, is_target
from heedful.train.low_rank import LowRankUpdate, UpdatedLinear, replace_module
from heedful.train.settings import TrainSettings
from heedful.weights.encoder_names import encoder_hf_name
from heedful.weights.laya_names import TRUNK, laya_name
from heedful.weights.load_laya import CONFIG_NAME
from heedful.weights.names import WeightsToPlace
from heedful.weights.safetensors_file import read_safetensors

UPDATES = "updates.safetensors"


class TrainedDecider:
    def __init__(self, base: DeciderBase, settings: TrainSettings) -> None:
        self.config, self._base, self._lora = base.config, base, settings.lora
        trunk = build_encoder(base.config.trunk, base.trunk)
        head = fresh_head(base.config, settings.run.seed) if base.head is None else build_head(base.config, base.head)
        head.requires_grad_(True)
        if head.act is not None:
            head.act.requires_grad_(False)
        self.network = LayaNetwork(trunk, head)
        self._updates: dict[str, LowRankUpdate] = {}
        if not settings.lora.rank:
            self._add_base_updates()
            trunk.requires_grad_(True)
            return
        self._trunk_slots = dict(trunk.weight_slots())
        self._add_updates(torch.Generator().manual_seed(settings.run.seed))

    @property
    def _holds_updates(self) -> bool:
        """Whether a checkpoint leaves the trunk out."""
        return bool(self._updates) and self._base.alias is not None

    @property
    def head_weights(self) -> int:
        """Trained ones."""
        return sum(each.numel() for each in self.network.head.parameters() if each.requires_grad)

    @property
    def weights_file(self) -> str:
        return UPDATES if self._updates and not self._holds_updates else files.MODEL

    # ---- building

    def _add_base_updates(self) -> None:
        if self._base.updates is not None:
            self._base.updates.merge_into((name, slot.numpy()) for name, slot in self.network.trunk.weight_slots())

    def _add_updates(self, generator: torch.Generator) -> None:
        settings, trunk = self._lora, self.network.trunk
        for name, module in list(trunk.named_modules()):
            if not isinstance(module, nn.Linear) or not name.startswith("layers."):
                continue
            parts = self._parts(name)
            rows = [len(self._trunk_slots[f"{part}.weight"]) for part in parts]
            chosen = {place: part for place, part in enumerate(parts) if is_target(part, settings)}
            updates = {}
            for place, part in chosen.items():
                updates[place] = LowRankUpdate(module.in_features, rows[place], settings.rank, generator)
                # wider than a decoder's: beside a fresh head they have to move from the first steps on
                nn.init.normal_(updates[place].a, 0.0, module.in_features**-0.5, generator=generator)
                self._updates[part] = updates[place]
            if updates:
                replace_module(trunk, name, UpdatedLinear(module, rows, updates, settings.scale, settings.dropout))
        self._place_base_updates()

    def _parts(self, module: str) -> list[str]:
        """Our names of the matrices that are fused in a module."""
        stem = module.removesuffix("qkv")
        return [stem + part for part in "qkv"] if f"{stem}q.weight" in self._trunk_slots else [module]

    def _place_base_updates(self) -> None:
        if self._base.updates is None:
            return
        with torch.no_grad():
            for name, stored in self._base.updates.updates.items():
                update = self._updates[name.removesuffix(".weight")]
                update.a.copy_(torch.from_numpy(stored.a))
                update.b.copy_(torch.from_numpy(stored.b))

    # ---- checkpoints

    def weights(self) -> Arrays:
        return {name: each.detach().numpy() for name, each in self._trained()}

    def derived(self) -> dict[str, Arrays]:
        """Of updates that a checkpoint has to add to the trunk: the model that is run, by file."""
        if self.weights_file == files.MODEL:
            return {}
        whole: dict[str, npt.NDArray[Any]] = {name: each.detach().numpy() for name, each in self._head()}
        for name, slot in self._trunk_slots.items():
            update = self._updates.get(name.removesuffix(".weight"))
            added = slot if update is None else slot + self._lora.scale * (update.b @ update.a)
            whole[self._trunk_name(name)] = added.detach().numpy()
        return {files.MODEL: whole}

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        """And the rest of the file that they are stored in."""
        yield from self._head()
        for part, update in self._updates.items():
            stem = self._trunk_name(f"{part}.weight").removesuffix(".weight")
            yield f"{stem}.lora_A", update.a
            yield f"{stem}.lora_B", update.b
        if not self._updates:
            for name, slot in self.network.trunk.weight_slots():
                yield self._trunk_name(name), slot

    def _head(self) -> Iterator[tuple[str, Tensor]]:
        for name, slot in self.network.head.weight_slots():
            yield laya_name(name), slot

    def _trunk_name(self, name: str) -> str:
        return TRUNK + encoder_hf_name(self.config.trunk.family, name)

    def place(self, stored: Path) -> None:
        """Raises FileFormatError, UnsupportedModel."""
        to_place = WeightsToPlace(read_safetensors(stored))
        with torch.no_grad():
            for name, slot in self._trained():
                slot.copy_(torch.from_numpy(to_place.take(name, tuple(slot.shape)).to_float32()))
        to_place.require_none_left()

    def documents(self) -> dict[str, bytes]:
        """Temperatures are to be fitted anew: heedful calibrate."""
        settings = {**self._base.settings, "temperature": [1.0, 1.0, 1.0], "temperature_by_options": {}}
        for name in ("trunk", "lora_r", "lora_alpha"):
            settings.pop(name, None)
        if self._holds_updates:
            settings |= {"trunk": "alias", "lora_r": self._lora.rank, "lora_alpha": self._lora.told_alpha}
        found = {CONFIG_NAME: f"{json.dumps(settings, indent=1)}\n".encode()}
        if not self._holds_updates:
            found |= {name: path.read_bytes() for name, path in self._base.trunk_files.items()}
        return found


def fresh_head(config: LayaConfig, seed: int) -> LayaHead:
    """Each layer as PyTorch begins one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = LayaHead(config)
        nn.init.normal_(head.type_embed.weight, 0.0, 0.02)
        for block in head.layers:
            assert isinstance(block, HeadBlock), block
            nn.init.xavier_uniform_(block.attn.qkv.weight)
            nn.init.zeros_(block.attn.qkv.bias)
            nn.init.zeros_(block.attn.out.bias)
    return head
