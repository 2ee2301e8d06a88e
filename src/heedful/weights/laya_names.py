"""A Laya checkpoint's foreign weight names to ours, once, at the border: the trunk's, its updates', the head's.

Our names of the head: type_embed, layers.N.{attn_norm, attn.qkv, attn.out, mlp_norm, mlp.up, mlp.down}, scorer.{norm,
dense, out}, act.{dense, out}; each with .weight or .bias. Matrices are (out, in).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from heedful.errors import UnsupportedModel
from heedful.weights.names import Weights
from heedful.weights.tensor import StoredTensor, brief

TRUNK = "encoder."
"""Before the trunk's names."""
_LAYER = {
    "self_attn.in_proj_weight": "attn.qkv.weight",
    "self_attn.in_proj_bias": "attn.qkv.bias",
    "self_attn.out_proj.weight": "attn.out.weight",
    "self_attn.out_proj.bias": "attn.out.bias",
    "linear1.weight": "mlp.up.weight",
    "linear1.bias": "mlp.up.bias",
    "linear2.weight": "mlp.down.weight",
    "linear2.bias": "mlp.down.bias",
    "norm1.weight": "attn_norm.weight",
    "norm1.bias": "attn_norm.bias",
    "norm2.weight": "mlp_norm.weight",
    "norm2.bias": "mlp_norm.bias",
}
_TOP = {
    "type_emb.weight": "type_embed.weight",
    "scorer.0.weight": "scorer.norm.weight",
    "scorer.0.bias": "scorer.norm.bias",
    "scorer.1.weight": "scorer.dense.weight",
    "scorer.1.bias": "scorer.dense.bias",
    "scorer.3.weight": "scorer.out.weight",
    "scorer.3.bias": "scorer.out.bias",
    "act_head.0.weight": "act.dense.weight",
    "act_head.0.bias": "act.dense.bias",
    "act_head.2.weight": "act.out.weight",
    "act_head.2.bias": "act.out.bias",
}
_TO_LAYER, _TO_TOP = ({ours: theirs for theirs, ours in names.items()} for names in (_LAYER, _TOP))
_BUFFERS = ("temperature",)
"""Ones; the fitted temperatures stand in the config."""


@dataclass(frozen=True)
class LayaTensors:
    """A checkpoint's tensors by what they belong to."""

    trunk: Weights
    """By its family's names there, without the prefix."""
    updates: Mapping[str, tuple[StoredTensor, StoredTensor]]
    """(A, B) of low-rank updates W += scale · B A, by the trunk's layer, named as `trunk` is."""
    head: Weights
    """By our names."""


def laya_from_hf(stored: Mapping[str, StoredTensor]) -> LayaTensors:
    """Raises UnsupportedModel for a name nobody knows, and for half an update."""
    trunk: Weights = {}
    sides: dict[str, dict[str, StoredTensor]] = {}
    head: Weights = {}
    for name, tensor in stored.items():
        bare = name.removeprefix(TRUNK)
        layer, _, side = bare.rpartition(".lora_")
        if bare == name:
            if name not in _BUFFERS:
                head[_ours(name)] = tensor
        elif side in ("A", "B"):
            sides.setdefault(layer, {})[side] = tensor
        else:
            trunk[bare] = tensor
    for layer, of_layer in sides.items():
        if len(of_layer) != 2:
            raise UnsupportedModel(f"there is one of two matrices of the update of {layer}", "The file is incomplete.")
    return LayaTensors(trunk, {layer: (both["A"], both["B"]) for layer, both in sides.items()}, head)


def laya_name(name: str) -> str:
    """What a checkpoint calls one of our weights of the head."""
    if found := re.fullmatch(r"layers\.(\d+)\.(.+)", name):
        return f"head.layers.{found[1]}.{_TO_LAYER[found[2]]}"
    return _TO_TOP[name]


def _ours(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    found = re.fullmatch(r"head\.layers\.(\d{1,4})\.(.+)", name)
    if found and found[2] in _LAYER:
        return f"layers.{int(found[1])}.{_LAYER[found[2]]}"
    raise UnsupportedModel(f"weight {brief(name)} has no place in a Laya model", "The file holds another architecture.")
