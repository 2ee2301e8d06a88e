"""A GLiClass checkpoint's foreign weight names to ours, once, at the border: its encoders' and its head's apart.

Our names of the head: text, label and from_label_encoder, each .up and .down; scorer.layers.N, or scorer.text,
scorer.label, scorer.up and scorer.out; each with .weight or .bias; and logit_scale. Matrices are (out, in).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from heedful.errors import UnsupportedModel
from heedful.weights.names import Weights
from heedful.weights.tensor import StoredTensor

_ENCODER = "model.encoder_model."
_LABEL_ENCODER = "model.label_encoder."
_HEAD = {
    "model.text_projector.linear_1": "text.up",
    "model.text_projector.linear_2": "text.down",
    "model.classes_projector.linear_1": "label.up",
    "model.classes_projector.linear_2": "label.down",
    "model.biencoder_projector.linear_1": "from_label_encoder.up",
    "model.biencoder_projector.linear_2": "from_label_encoder.down",
    "model.scorer.mlp.0": "scorer.layers.0",
    "model.scorer.mlp.2": "scorer.layers.1",
    "model.scorer.mlp.4": "scorer.layers.2",
    "model.scorer.proj_text": "scorer.text",
    "model.scorer.proj_label": "scorer.label",
    "model.scorer.out_mlp.0": "scorer.up",
    "model.scorer.out_mlp.3": "scorer.out",
}


@dataclass(frozen=True)
class GLiClassWeights:
    encoder: Weights
    """By its family's names, without the prefix."""
    label_encoder: Weights
    """The same; empty in a uni-encoder."""
    head: Weights
    """By our names."""


def gliclass_from_hf(stored: Mapping[str, StoredTensor]) -> GLiClassWeights:
    """Raises UnsupportedModel for a name nobody knows."""
    found = GLiClassWeights({}, {}, {})
    for name, tensor in stored.items():
        if name.startswith(_ENCODER):
            found.encoder[name.removeprefix(_ENCODER)] = tensor
        elif name.startswith(_LABEL_ENCODER):
            found.label_encoder[name.removeprefix(_LABEL_ENCODER)] = tensor
        else:
            found.head[_ours(name)] = tensor
    return found


def _ours(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _HEAD and kind in ("weight", "bias"):
        return f"{_HEAD[stem]}.{kind}"
    if name == "model.logit_scale":
        return "logit_scale"
    raise UnsupportedModel(f"weight {name!r:.80} has no place in a GLiClass model", "It is another architecture.")
