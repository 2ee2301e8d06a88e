"""Heads' foreign weight names to ours: dense, norm, out, each with .weight or .bias. Matrices are (out, in)."""

from __future__ import annotations

from heedful.errors import UnsupportedModel
from heedful.models.head_config import MlmHeadConfig
from heedful.weights.names import Weights

_CLASSIFIER = {"classifier": "out"}
_SEQUENCE = {
    "bert": {"pooler.dense": "dense", **_CLASSIFIER},
    "deberta-v2": {"pooler.dense": "dense", **_CLASSIFIER},
    "modernbert": {"head.dense": "dense", "head.norm": "norm", **_CLASSIFIER},
}
_TRANSFORM = {
    "cls.predictions.transform.dense": "dense",
    "cls.predictions.transform.LayerNorm": "norm",
    "cls.predictions.decoder": "out",
    "cls.predictions": "out",
}
_LM_HEAD = {
    "lm_predictions.lm_head.dense": "dense",
    "lm_predictions.lm_head.LayerNorm": "norm",
    "lm_predictions.lm_head": "out",
}
_MLM = {
    "bert": _TRANSFORM,
    "deberta-v2": {**_TRANSFORM, **_LM_HEAD},
    "modernbert": {"head.dense": "dense", "head.norm": "norm", "decoder": "out"},
}
_KINDS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}  # the last two: first releases


def sequence_head_weights(family: str, heads: Weights) -> Weights:
    """The weights of the head that sorts texts, by our names; other heads in the file are left where they are.

    Raises UnsupportedModel where there is no classifier.
    """
    found = _renamed(heads, _SEQUENCE[family])
    if "out.weight" not in found or len(found["out.weight"].shape) != 2:
        raise UnsupportedModel(
            "the model has no classifier: its file holds a trunk or another head",
            "Load it with heedful embed, or fine-tune a head for it.",
        )
    return found


def mlm_head_weights(family: str, heads: Weights, config: MlmHeadConfig) -> Weights:
    """The weights of the head that guesses tokens, by our names. A copy of the tied embedding is left out.

    Raises UnsupportedModel where there is no such head.
    """
    found = _renamed(heads, _MLM[family])
    if config.tied:
        found.pop("out.weight", None)
    if "dense.weight" not in found:
        raise UnsupportedModel("the model has no head that guesses tokens", "Its file holds a trunk or another head.")
    return found


def _renamed(heads: Weights, names: dict[str, str]) -> Weights:
    found: Weights = {}
    for name, tensor in heads.items():
        stem, _, kind = name.rpartition(".")
        if stem in names and kind in _KINDS:
            found[f"{names[stem]}.{_KINDS[kind]}"] = tensor
    return found
