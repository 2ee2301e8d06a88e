"""What stands on an encoder's trunk, as data: the head that sorts texts into classes, the one that guesses tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from heedful.errors import UnsupportedModel
from heedful.models.encoder_config import EncoderConfig, known_activation
from heedful.models.pooling import PoolingMode

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
"""One class is right; each class is right or not; the logits are the numbers that were asked for."""

_PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression")


@dataclass(frozen=True)
class SequenceHeadConfig:
    """Pooled state → dense → activation → norm, where there is one → one logit a class."""

    hidden_size: int
    labels: tuple[str, ...]
    """By class, as `id2label` has them."""
    problem_type: ProblemType | None
    """None: the file does not say."""
    pooling: PoolingMode
    activation: str
    dense_bias: bool = True
    norm: bool = False
    norm_bias: bool = True
    norm_eps: float = 1e-5


@dataclass(frozen=True)
class MlmHeadConfig:
    """State → dense → activation → norm → one logit a token of the vocabulary."""

    hidden_size: int
    vocab_size: int
    activation: str
    norm_eps: float
    dense_bias: bool = True
    norm_bias: bool = True
    out_bias: bool = True
    tied: bool = True
    """The last matrix is the embedding of tokens."""


def sequence_head_config_from_hf(hf: Mapping[str, Any], encoder: EncoderConfig, num_labels: int) -> SequenceHeadConfig:
    """From a `config.json`. `num_labels`: rows of the classifier's matrix; a file that names no labels has LABEL_0, ….

    Raises UnsupportedModel for labels that do not go with them, and for a setting that heedful does not compute.
    """
    problem = hf.get("problem_type")
    if problem is not None and problem not in _PROBLEM_TYPES:
        raise UnsupportedModel(f"problem_type is {str(problem)[:60]!r}", "Known: " + ", ".join(_PROBLEM_TYPES) + ".")
    labels = _labels(hf.get("id2label"), num_labels)
    if encoder.family == "bert":
        return SequenceHeadConfig(encoder.hidden_size, labels, problem, "cls", "tanh")
    if encoder.family == "deberta-v2":
        if hf.get("pooler_hidden_size", encoder.hidden_size) != encoder.hidden_size:
            raise UnsupportedModel("this DeBERTa's pooler has another width", "heedful does not compute that.")
        activation = known_activation(hf.get("pooler_hidden_act", "gelu"))
        return SequenceHeadConfig(encoder.hidden_size, labels, problem, "cls", activation)
    pooling = hf.get("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise UnsupportedModel(f"classifier_pooling is {str(pooling)[:60]!r}", "Known: cls, mean.")
    return SequenceHeadConfig(
        encoder.hidden_size,
        labels,
        problem,
        pooling,
        known_activation(hf.get("classifier_activation", "gelu")),
        dense_bias=bool(hf.get("classifier_bias", False)),
        norm=True,
        norm_bias=encoder.norm_bias,
        norm_eps=encoder.norm_eps,
    )


def mlm_head_config_from_hf(hf: Mapping[str, Any], encoder: EncoderConfig) -> MlmHeadConfig:
    """From a `config.json`. Raises UnsupportedModel for a setting that heedful does not compute."""
    modern = encoder.family == "modernbert"
    return MlmHeadConfig(
        encoder.hidden_size,
        encoder.vocab_size,
        known_activation(hf.get("classifier_activation", "gelu")) if modern else encoder.activation,
        encoder.norm_eps,
        dense_bias=bool(hf.get("classifier_bias", False)) if modern else True,
        norm_bias=encoder.norm_bias,
        out_bias=bool(hf.get("decoder_bias", True)) if modern else True,
        tied=bool(hf.get("tie_word_embeddings", True)),
    )


def _labels(named: Any, num_labels: int) -> tuple[str, ...]:
    if named is None:
        return tuple(f"LABEL_{index}" for index in range(num_labels))
    if not isinstance(named, Mapping) or set(named) != {str(index) for index in range(num_labels)}:
        raise UnsupportedModel(
            f"id2label does not name the {num_labels} classes: {str(named)[:60]}",
            "Config and weights do not belong together.",
        )
    return tuple(str(named[str(index)]) for index in range(num_labels))
