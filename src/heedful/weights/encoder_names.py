"""An encoder's foreign weight names to ours, once, at the border; what stands on the trunk is set apart as its heads.

Our names: embed, position_embed, type_embed, embed_norm, layers.N.{attn.q, attn.k, attn.v, attn.out, attn_norm, mlp.up,
mlp.down, mlp_norm}; each with .weight or .bias. Matrices are (out, in).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from heedful.errors import UnsupportedModel
from heedful.weights.names import Weights
from heedful.weights.tensor import StoredTensor

_BERT_TOP = {
    "embeddings.word_embeddings": "embed",
    "embeddings.position_embeddings": "position_embed",
    "embeddings.token_type_embeddings": "type_embed",
    "embeddings.LayerNorm": "embed_norm",
}
_BERT_LAYER = {
    "attention.self.query": "attn.q",
    "attention.self.key": "attn.k",
    "attention.self.value": "attn.v",
    "attention.output.dense": "attn.out",
    "attention.output.LayerNorm": "attn_norm",
    "intermediate.dense": "mlp.up",
    "output.dense": "mlp.down",
    "output.LayerNorm": "mlp_norm",
}
_BERT_HEADS = ("pooler.", "cls.", "classifier.", "qa_outputs.")
_BERT_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")  # saved by old versions, computed here
_KINDS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}  # the last two: first releases


def bert_from_hf(stored: Mapping[str, StoredTensor]) -> tuple[Weights, Weights]:
    """(trunk by our names, heads by their own without "bert.") of a Hugging Face checkpoint.

    Raises UnsupportedModel for a name nobody knows.
    """
    trunk: Weights = {}
    heads: Weights = {}
    for name, tensor in stored.items():
        bare = name.removeprefix("bert.")
        if bare.startswith(_BERT_HEADS):
            heads[bare] = tensor
        elif bare not in _BERT_BUFFERS:
            trunk[_ours(name, bare)] = tensor
    return trunk, heads


def _ours(name: str, bare: str) -> str:
    stem, _, kind = bare.rpartition(".")
    if kind in _KINDS:
        if stem in _BERT_TOP:
            return f"{_BERT_TOP[stem]}.{_KINDS[kind]}"
        found = re.fullmatch(r"encoder\.layer\.(\d{1,4})\.(.+)", stem)
        if found and found[2] in _BERT_LAYER:
            return f"layers.{int(found[1])}.{_BERT_LAYER[found[2]]}.{_KINDS[kind]}"
    raise UnsupportedModel(f"weight {name!r} has no place in this model", "The file holds another architecture.")
