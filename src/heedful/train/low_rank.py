"""Low-rank updates beside a frozen base: y = W x + alpha / r · B A x, with A and B alone trained (LoRA,
arXiv:2106.09685), and the adapter in the layout of the peft package.

The base's matrices stay as their file has them, quantized ones too: a matrix becomes float32 in a buffer that all
share, each time that it is used, forward and backward.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heedful.errors import BadParameter
from heedful.models.config import ModelConfig
from heedful.models.decoder import Decoder
from heedful.train.base import reopened
from heedful.train.checkpoint import Arrays
from heedful.train.report import training_flops
from heedful.train.run_files import RunFiles, base_of, read_settings
from heedful.weights.load import LoadedModel, load
from heedful.weights.lora import CONFIG_NAME, WEIGHTS_NAME
from heedful.weights.names import Weights, WeightsToPlace, hf_name
from heedful.weights.safetensors_file import read_safetensors
from heedful.weights.tensor import StoredTensor

_PEFT_PREFIX = "base_model.model."


class Scratch:
    """Memory for one matrix in float32; what is in it counts until the next one is asked for."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.float32)

    def dequantized(self, parts: Sequence[StoredTensor]) -> Tensor:
        """Matrices of as many columns each, stacked: (rows of all, columns)."""
        columns, size = parts[0].shape[1], sum(part.num_weights for part in parts)
        if len(self._buffer) < size:
            self._buffer = np.empty(size, np.float32)
        begin = 0
        for part in parts:
            part.to_float32(self._buffer[begin : begin + part.num_weights].reshape(part.shape))
            begin += part.num_weights
        return torch.from_numpy(self._buffer[:size]).view(-1, columns)


class FrozenLinear(nn.Module):
    """x (T, in) → (T, out). `parts`: matrices as they are stored, one below the other."""

    def __init__(self, parts: Sequence[StoredTensor], bias: Tensor | None, scratch: Scratch) -> None:
        super().__init__()
        self.parts, self.bias, self._scratch = tuple(parts), bias, scratch

    @property
    def weight(self) -> Tensor:
        """(out, in) in float32, until another matrix is asked for."""
        return self._scratch.dequantized(self.parts)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _FrozenProduct.apply(x, self)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: FrozenLinear) -> Tensor:
        ctx.linear = linear
        return x @ linear.weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0] @ ctx.linear.weight, None


class FrozenEmbedding(nn.Module):
    """int64 (T,) → (T, C); the rows of these tokens alone become float32."""

    def __init__(self, stored: StoredTensor) -> None:
        super().__init__()
        self._stored = stored

    def forward(self, token_ids: Tensor) -> Tensor:
        wanted, places = np.unique(token_ids.numpy(), return_inverse=True)
        return torch.from_numpy(self._stored.take_rows(wanted).to_float32()[places])


class LowRankUpdate(nn.Module):
    """x (T, in) → B A x (T, out). B begins at zero, so that the sum begins as the base."""

    def __init__(self, columns: int, rows: int, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        bound = columns**-0.5
        self.a = nn.Parameter(torch.empty(rank, columns).uniform_(-bound, bound, generator=generator))
        self.b = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.a), self.b)


class UpdatedLinear(nn.Module):
    """A frozen matrix whose parts, one below the other, have so many rows each; and the updates of some, by place."""

    def __init__(
        self, base: nn.Module, rows: Sequence[int], updates: Mapping[int, LowRankUpdate], scale: float, dropout: float
    ) -> None:
        super().__init__()
        self.base, self._rows, self._scale, self._dropout = base, tuple(rows), scale, dropout
        self.updates = nn.ModuleDict({str(place): update for place, update in updates.items()})

    def forward(self, x: Tensor) -> Tensor:
        kept = F.dropout(x, self._dropout, self.training)
        parts = [
            self.updates[str(place)](kept) if str(place) in self.updates else x.new_zeros(len(x), rows)
            for place, rows in enumerate(self._rows)
        ]
        update = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return torch.add(self.base(x), update, alpha=self._scale)


@dataclass(frozen=True)
class _StoredMatrix:
    name: str
    """Ours."""
    rows: int
    targets: frozenset[str]
    """Of the settings, all that it consists of."""


class UpdatedBase:
    """Of a run with lora.rank."""

    weights_file = WEIGHTS_NAME
    stored_exactly = True

    def __init__(self, run: RunFiles) -> None:
        assert run.base is not None, run.folder
        loaded = reopened(run.base)
        self.config, self._run, self._lora = loaded.config, run, run.settings.lora
        self.frozen_weights = sum(tensor.num_weights for tensor in loaded.weights.values())
        self.frozen_bytes = sum(tensor.num_bytes for tensor in loaded.weights.values())
        self._by_name: dict[str, LowRankUpdate] = {}
        self.decoder = self._frozen(loaded.weights)
        self._add_updates(torch.Generator().manual_seed(run.settings.run.seed))

    @property
    def matrices(self) -> Mapping[str, list[int]]:
        return {}

    # ---- building

    def _frozen(self, weights: Weights) -> Decoder:
        """The base's decoder with its matrices as they are stored; vectors are float32."""
        with torch.device("meta"):
            decoder = Decoder(self.config)
        to_place, scratch = WeightsToPlace(weights), Scratch()
        by_module = _slots_by_module(decoder)
        for name, slots in by_module.items():
            stored = {kind: [to_place.take(n, shape) for n, shape in of_kind] for kind, of_kind in slots.items()}
            module = decoder.get_submodule(name)
            if isinstance(module, nn.Embedding):
                frozen: nn.Module = FrozenEmbedding(stored["weight"][0])
                if name == "embed" and self.config.tied_head:
                    decoder.head = FrozenLinear(stored["weight"], None, scratch)  # type: ignore[assignment]
            elif isinstance(module, nn.Linear):
                frozen = FrozenLinear(stored["weight"], _vector(stored.get("bias")), scratch)
            else:
                for kind, of_kind in stored.items():
                    values = _vector(of_kind)
                    assert values is not None, name
                    setattr(module, kind, nn.Parameter(values, requires_grad=False))
                continue
            replace_module(decoder, name, frozen)
        to_place.require_none_left()
        return decoder

    def _add_updates(self, generator: torch.Generator) -> None:
        settings = self._lora
        for name, module in list(self.decoder.named_modules()):
            if not isinstance(module, FrozenLinear) or not name.startswith("layers."):
                continue
            parts = self._stored_matrices(name, module)
            updates: dict[int, LowRankUpdate] = {}
            for place, part in enumerate(parts):
                if part.targets <= set(settings.targets):
                    columns = module.parts[0].shape[1]
                    updates[place] = LowRankUpdate(columns, part.rows, settings.rank, generator)
                    self._by_name[part.name] = updates[place]
            if updates:
                rows = [part.rows for part in parts]
                replace_module(
                    self.decoder, name, UpdatedLinear(module, rows, updates, settings.scale, settings.dropout)
                )

    def _stored_matrices(self, name: str, module: FrozenLinear) -> list[_StoredMatrix]:
        """What the family's files have of a module: Phi-3's have fused matrices whole, and so an update of one is."""
        names, rows = _part_names(name, self.config), [part.shape[0] for part in module.parts]
        targets = [self._target_of(part) for part in names]
        if self.config.family == "phi3" and len(names) > 1:
            fused = name if name.endswith("qkv") else f"{name.removesuffix('up')}gate_up"
            return [_StoredMatrix(fused, sum(rows), frozenset(targets))]
        return [
            _StoredMatrix(part, n, frozenset([target])) for part, n, target in zip(names, rows, targets, strict=True)
        ]

    def _target_of(self, part: str) -> str:
        """As the peft package knows the matrix."""
        return hf_name(f"{part}.weight", self.config.family).split(".")[-2]

    # ---- checkpoints

    def weights(self) -> Arrays:
        return {name: parameter.detach().numpy() for name, parameter in self._named()}

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for part, update in self._by_name.items():
            stem = _PEFT_PREFIX + hf_name(f"{part}.weight", self.config.family).removesuffix(".weight")
            yield f"{stem}.lora_A.weight", update.a
            yield f"{stem}.lora_B.weight", update.b

    def place(self, stored: Path) -> None:
        to_place = WeightsToPlace(read_safetensors(stored))
        with torch.no_grad():
            for name, parameter in self._named():
                parameter.copy_(torch.from_numpy(to_place.take(name, tuple(parameter.shape)).to_float32()))
        to_place.require_none_left()

    def documents(self) -> dict[str, bytes]:
        assert self._run.base is not None, self._run.folder
        alpha = self._lora.told_alpha
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self._run.base.source,
            "r": self._lora.rank,
            "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
            "lora_dropout": self._lora.dropout,
            "target_modules": list(dict.fromkeys(map(self._target_of, self._by_name))),
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "inference_mode": True,
        }
        of_tokenizer = self._run.model_files()
        del of_tokenizer["config.json"]  # it is of a whole model
        return {CONFIG_NAME: f"{json.dumps(settings, indent=1)}\n".encode(), **of_tokenizer}

    def training_flops(self, tokens: int, visits: int) -> int:
        """The base's matrices have no gradients of their own: a third less than if they had."""
        frozen = self.config.linear_weights + self.config.head_weights
        trained = sum(parameter.numel() for _, parameter in self._named())
        return training_flops(self.config, tokens, visits) - 2 * frozen * tokens + 6 * trained * tokens


def merged(run: Path) -> LoadedModel:
    """The base of a run with lora.rank, with the updates of the newest checkpoint added; its changed matrices are
    float32. Raises BadParameter for a run of another kind, FileFormatError when the base is another now.
    """
    base = base_of(run)
    if base is None or not read_settings(run).lora.rank:
        raise BadParameter("run", f"{run} trains no low-rank updates: its checkpoints are whole models")
    reopened(base)
    return load(str(run))


def _slots_by_module(decoder: Decoder) -> dict[str, dict[str, list[tuple[str, tuple[int, ...]]]]]:
    """Module → "weight" or "bias" → (our name, shape) of each part."""
    shapes = {name: tuple(slot.shape) for name, slot in decoder.weight_slots()}
    found: dict[str, dict[str, list[tuple[str, tuple[int, ...]]]]] = {}
    for name, _ in decoder.named_parameters():
        module, _, kind = name.rpartition(".")
        parts = [f"{part}.{kind}" for part in _part_names(module, decoder.config)]
        found.setdefault(module, {})[kind] = [(part, shapes[part]) for part in parts]
    return found


def _part_names(module: str, config: ModelConfig) -> list[str]:
    """Our names of the matrices that are fused in a module."""
    if module.endswith("attn.qkv"):
        return [module.removesuffix("qkv") + part for part in "qkv"]
    if module.endswith("mlp.up") and config.gated_mlp:
        return [module.removesuffix("up") + part for part in ("gate", "up")]
    return [module]


def _vector(parts: Sequence[StoredTensor] | None) -> Tensor | None:
    return None if parts is None else torch.from_numpy(np.concatenate([part.to_float32() for part in parts]))


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, module)
