"""An encoder's foreign weight names to ours, once, at the border; what stands on the trunk is set apart as its heads.

Our names: embed, position_embed, type_embed, embed_norm, layers.N.{attn.q, attn.k, attn.v, attn.out, attn_norm, mlp.up,
mlp.down, mlp_norm}; each with .weight or .bias. Matrices are (out, in). ModernBERT has attn.qkv, mlp.up with the gate's
rows first, and norm after its last layer; DeBERTa has rel_embed, rel_norm, and perhaps attn.pos_q, attn.pos_k,
conv.conv and conv.norm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from heedful.errors import UnsupportedModel
from heedful.weights.names import Weights
from heedful.weights.tensor import StoredTensor

_KINDS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}  # the last two: first releases


@dataclass(frozen=True)
class _FamilyNames:
    """Theirs to ours, without .weight and .bias."""

    prefix: str
    """Before every name of the trunk where a head stands on it."""
    layers: str
    top: Mapping[str, str]
    layer: Mapping[str, str]
    heads: tuple[str, ...]
    buffers: tuple[str, ...] = ()
    """Saved by old versions, computed here."""


_POST_NORM = {
    "attention.output.dense": "attn.out",
    "attention.output.LayerNorm": "attn_norm",
    "intermediate.dense": "mlp.up",
    "output.dense": "mlp.down",
    "output.LayerNorm": "mlp_norm",
}
_EMBEDDINGS = {
    "embeddings.word_embeddings": "embed",
    "embeddings.position_embeddings": "position_embed",
    "embeddings.token_type_embeddings": "type_embed",
    "embeddings.LayerNorm": "embed_norm",
}
_NAMES = {
    "bert": _FamilyNames(
        prefix="bert.",
        layers="encoder.layer.",
        top=_EMBEDDINGS,
        layer={
            **_POST_NORM,
            "attention.self.query": "attn.q",
            "attention.self.key": "attn.k",
            "attention.self.value": "attn.v",
        },
        heads=("pooler.", "cls.", "classifier.", "qa_outputs."),
        buffers=("embeddings.position_ids", "embeddings.token_type_ids"),
    ),
    "modernbert": _FamilyNames(
        prefix="model.",
        layers="layers.",
        top={"embeddings.tok_embeddings": "embed", "embeddings.norm": "embed_norm", "final_norm": "norm"},
        layer={
            "attn.Wqkv": "attn.qkv",
            "attn.Wo": "attn.out",
            "attn_norm": "attn_norm",
            "mlp.Wi": "mlp.up",
            "mlp.Wo": "mlp.down",
            "mlp_norm": "mlp_norm",
        },
        heads=("head.", "classifier.", "decoder.", "qa_outputs."),
    ),
    "deberta-v2": _FamilyNames(
        prefix="deberta.",
        layers="encoder.layer.",
        top={
            **_EMBEDDINGS,
            "encoder.rel_embeddings": "rel_embed",
            "encoder.LayerNorm": "rel_norm",
            "encoder.conv.conv": "conv.conv",
            "encoder.conv.LayerNorm": "conv.norm",
        },
        layer={
            **_POST_NORM,
            "attention.self.query_proj": "attn.q",
            "attention.self.key_proj": "attn.k",
            "attention.self.value_proj": "attn.v",
            "attention.self.pos_query_proj": "attn.pos_q",
            "attention.self.pos_key_proj": "attn.pos_k",
        },
        heads=("pooler.", "classifier.", "cls.", "lm_predictions.", "mask_predictions.", "qa_outputs."),
        buffers=("embeddings.position_ids",),
    ),
}


def encoder_from_hf(family: str, stored: Mapping[str, StoredTensor]) -> tuple[Weights, Weights]:
    """(trunk by our names, heads by their own without the trunk's prefix) of a Hugging Face checkpoint.

    Raises UnsupportedModel for a name nobody knows.
    """
    names = _NAMES[family]
    trunk: Weights = {}
    heads: Weights = {}
    for name, tensor in stored.items():
        bare = name.removeprefix(names.prefix)
        if bare.startswith(names.heads):
            heads[bare] = tensor
        elif bare not in names.buffers:
            trunk[_ours(names, name, bare)] = tensor
    return trunk, heads


def encoder_hf_name(family: str, name: str) -> str:
    """What a checkpoint of the family calls one of our weights of the trunk, without the prefix."""
    names = _NAMES[family]
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", stem)
    known = names.layer if layer else names.top
    wanted = layer[2] if layer else stem
    theirs = next(theirs for theirs, ours in known.items() if ours == wanted)
    return f"{names.layers}{layer[1]}.{theirs}.{kind}" if layer else f"{theirs}.{kind}"


def _ours(names: _FamilyNames, name: str, bare: str) -> str:
    stem, _, kind = bare.rpartition(".")
    if kind in _KINDS:
        if stem in names.top:
            return f"{names.top[stem]}.{_KINDS[kind]}"
        found = re.fullmatch(rf"{re.escape(names.layers)}(\d{{1,4}})\.(.+)", stem)
        if found and found[2] in names.layer:
            return f"layers.{int(found[1])}.{names.layer[found[2]]}.{_KINDS[kind]}"
    raise UnsupportedModel(f"weight {name!r} has no place in this model", "The file holds another architecture.")
