"""Weights on their way out: the name and shape that a file gives them, and their values when it is their turn.

    for tensor in to_hf(weights, config):
        write(tensor.name, tensor.values())

Everything that names.py does on the way in is undone here: names, fused matrices, Gemma's norms, Llama's rotary order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from heedful.errors import CannotExport
from heedful.models.config import ModelConfig
from heedful.weights.names import ROTARY, gguf_name, hf_name, pairs_side_by_side
from heedful.weights.quantize import FORMATS, Bytes, Floats, quantize
from heedful.weights.tensor import StoredTensor, fold

LARGEST_F16 = 65504.0
FORMAT_BY_OPTION = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}


@dataclass(frozen=True, eq=False)
class OutTensor:
    name: str
    shape: tuple[int, ...]
    format_name: str
    parts: tuple[StoredTensor, ...]
    """Stacked along the first dimension."""
    added: float = 0.0
    """To every value."""

    @property
    def num_bytes(self) -> int:
        rows, columns = fold(self.shape)
        return rows * FORMATS[self.format_name].row_bytes(columns)

    def values(self) -> Floats:
        """float32 of `shape`."""
        found = np.concatenate([part.to_float32() for part in self.parts])
        return found + np.float32(self.added) if self.added else found

    def blocks(self) -> Bytes:
        """(rows, row_bytes). Raises CannotExport for what float16 cannot hold."""
        values = self.values().reshape(fold(self.shape))
        if self.format_name == "F16" and np.abs(values).max(initial=0) > LARGEST_F16:
            raise CannotExport(f"{self.name} has weights beyond the range of f16", "Give --type bf16, f32 or q8_0.")
        return quantize(self.format_name, values)


def to_hf(weights: Mapping[str, StoredTensor], config: ModelConfig, format_name: str) -> Iterator[OutTensor]:
    """Under their Hugging Face names, all in one format."""
    gemma = config.family == "gemma3"
    for name, parts in _fused(weights, config.family == "phi3"):
        added = -1.0 if gemma and name.endswith("norm.weight") else 0.0  # stored as weight - 1
        yield OutTensor(hf_name(name, config.family), _stacked(parts), format_name, parts, added)


def to_gguf(weights: Mapping[str, StoredTensor], config: ModelConfig, format_name: str) -> Iterator[OutTensor]:
    """Under their GGUF names: matrices in the format, or in F16 where their rows are not whole blocks; all else in F32,
    as llama.cpp wants it.
    """
    if config.family in ("llama", "mistral"):
        weights = {
            name: pairs_side_by_side(tensor, config.head_dim) if name.endswith(ROTARY) else tensor
            for name, tensor in weights.items()
        }
    for name, parts in _fused(weights, config.family == "phi3"):
        shape = _stacked(parts)
        fits = shape[-1] % FORMATS[format_name].block_len == 0
        of_matrix = format_name if fits else "F16"
        yield OutTensor(gguf_name(name), shape, of_matrix if len(shape) > 1 else "F32", parts)


_FUSED = {"attn.q": ("attn.qkv", ("attn.q", "attn.k", "attn.v")), "mlp.gate": ("mlp.gate_up", ("mlp.gate", "mlp.up"))}


def _fused(weights: Mapping[str, StoredTensor], wanted: bool) -> Iterator[tuple[str, tuple[StoredTensor, ...]]]:
    """Name → parts; where `wanted`, q, k and v are the parts of one matrix, gate and up those of another."""
    if not wanted:
        yield from ((name, (tensor,)) for name, tensor in weights.items())
        return
    inner = {part for _, parts in _FUSED.values() for part in parts[1:]}
    for name, tensor in weights.items():
        layer, _, stem_and_kind = name.partition(".attn.") if ".attn." in name else name.partition(".mlp.")
        stem = name.removeprefix(f"{layer}.").rpartition(".")[0] if stem_and_kind else ""
        if stem in inner:
            continue
        if stem in _FUSED:
            fused, parts = _FUSED[stem]
            yield name.replace(stem, fused), tuple(weights[name.replace(stem, part)] for part in parts)
        else:
            yield name, (tensor,)


def _stacked(parts: tuple[StoredTensor, ...]) -> tuple[int, ...]:
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
