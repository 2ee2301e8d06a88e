"""What a GLiClass model is made of, as data, converted here once from its `config.json`.

GLiClass (Stepanov et al., arXiv:2508.07662) sorts a text into labels that are given as text. A uni-encoder reads labels
and text together, a mark before each label; a bi-encoder reads them apart, labels with an encoder of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from heedful.errors import UnsupportedModel
from heedful.models.encoder_config import EncoderConfig, encoder_config_from_hf, known_activation

MODEL_TYPE = "GLiClass"

Scorer = Literal["simple", "mlp", "weighted-dot"]
TextPooling = Literal["first", "last", "avg", "max", "sum", "rms", "abs_max", "abs_avg"]
LabelPooling = Literal["first", "average"]
Architecture = Literal["uni-encoder", "bi-encoder"]

MLP_WIDTH = 256
"""Of the first layer of the scorer `mlp`; the second is half as wide, whatever the config says of either."""
_NOT_COMPUTED = ("use_lstm", "use_segment_embeddings", "use_calibrator", "squeeze_layers", "multimodal")


@dataclass(frozen=True)
class GLiClassConfig:
    architecture: Architecture
    encoder: EncoderConfig
    """Of texts; in a uni-encoder of labels too."""
    label_encoder: EncoderConfig | None
    """Of a bi-encoder."""
    projector_size: int
    """Channels between the two matrices of a projector."""
    activation: str
    """Between them."""
    scorer: Scorer
    text_pooling: TextPooling
    """Of all tokens, labels and marks among them; of a bi-encoder's labels as well."""
    label_pooling: LabelPooling
    """A label is one token's state, or the mean from its mark to the next one's (the last: to the end of the text)."""
    from_mark: bool
    """That token is the mark itself; False: the one after it, and a mean leaves the mark out."""
    text_only: bool
    """The text is pooled from the mark that ends the labels on; the last label's mean ends there too."""
    labels_first: bool
    """Labels stand before the text."""
    normalize: bool
    """Text and labels have length 1 before they are compared, and logits are scaled."""
    label_id: int
    """Token id of the mark before a label; -1 in a bi-encoder, which has none."""
    text_id: int
    """Token id of the mark that ends the labels; -1 in a bi-encoder."""

    @property
    def scaled(self) -> bool:
        """Logits are multiplied with a weight of the file; a bi-encoder's always are."""
        return self.normalize or self.architecture == "bi-encoder"

    @property
    def text_weights(self) -> int:
        """Weights of the matrices that every text passes once, after its encoder."""
        width = self.encoder.hidden_size
        return 2 * width * self.projector_size + (2 * width**2 if self.scorer == "weighted-dot" else 0)

    @property
    def label_weights(self) -> int:
        """Of those that every label passes once, in a uni-encoder with every text."""
        width, inner = self.encoder.hidden_size, self.projector_size
        own = 0 if self.label_encoder is None else (self.label_encoder.hidden_size + width) * inner
        return 2 * width * inner + own

    @property
    def pair_weights(self) -> int:
        """Of those that every label of every text passes: the scorer's."""
        width = self.encoder.hidden_size
        return {
            "simple": 0,
            "mlp": 2 * width * MLP_WIDTH + MLP_WIDTH * (MLP_WIDTH // 2) + MLP_WIDTH // 2,
            "weighted-dot": 2 * width**2 + 3 * width * 4 * width + 4 * width,
        }[self.scorer]


def gliclass_config_from_hf(hf: Mapping[str, Any]) -> GLiClassConfig:
    """From a `config.json`. Raises UnsupportedModel for a setting that heedful does not compute."""
    if hf.get("model_type") != MODEL_TYPE:
        raise UnsupportedModel(f"config.json has model_type {str(hf.get('model_type'))[:60]!r}, not {MODEL_TYPE}", "")
    if asked := [name for name in _NOT_COMPUTED if hf.get(name)]:
        raise UnsupportedModel(f"this GLiClass asks for {', '.join(asked)}", "heedful does not compute that.")
    if hf.get("encoder_layer_id", -1) != -1:
        raise UnsupportedModel("this GLiClass reads a layer before the last one", "heedful does not compute that.")
    architecture: Architecture = _one_of("architecture_type", hf.get("architecture_type", "uni-encoder"), Architecture)
    encoder = _trunk(hf, "encoder_config")
    label_encoder = None
    if architecture == "bi-encoder":
        label_encoder = _trunk(hf, "label_model_config")
    elif hf.get("vocab_size") is not None:  # the marks may have been added after the encoder's own config was written
        encoder = replace(encoder, vocab_size=hf["vocab_size"])
    inner = hf.get("hidden_size") or encoder.hidden_size
    return GLiClassConfig(
        architecture,
        encoder,
        label_encoder,
        projector_size=_whole("hidden_size", inner),
        activation=known_activation(hf.get("projector_hidden_act", "gelu")),
        scorer=_one_of("scorer_type", hf.get("scorer_type", "simple"), Scorer),
        text_pooling=_one_of("pooling_strategy", hf.get("pooling_strategy", "first"), TextPooling),
        label_pooling=_one_of("class_token_pooling", hf.get("class_token_pooling", "first"), LabelPooling),
        from_mark=_flag(hf, "embed_class_token", True),
        text_only=_flag(hf, "extract_text_features", False),
        labels_first=_flag(hf, "prompt_first", False),
        normalize=_flag(hf, "normalize_features", False),
        label_id=-1 if label_encoder else _mark_id(hf, "class_token_index", encoder),
        text_id=-1 if label_encoder else _mark_id(hf, "text_token_index", encoder),
    )


def _trunk(hf: Mapping[str, Any], name: str) -> EncoderConfig:
    settings = hf.get(name)
    if not isinstance(settings, Mapping):
        raise UnsupportedModel(f"config.json of this GLiClass has no {name}", "The file is incomplete.")
    return encoder_config_from_hf({"model_type": "deberta-v2", **settings})


def _mark_id(hf: Mapping[str, Any], name: str, encoder: EncoderConfig) -> int:
    value = hf.get(name)
    if type(value) is not int or not 0 <= value < encoder.vocab_size:
        raise UnsupportedModel(f"{name} is {str(value)[:60]}", f"It must be a token of {encoder.vocab_size:,}.")
    return value


def _one_of(name: str, value: Any, known: Any) -> Any:
    if value not in get_args(known):
        raise UnsupportedModel(f"{name} is {str(value)[:60]!r}", f"Computed here: {', '.join(get_args(known))}.")
    return value


def _whole(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= 2**20:
        raise UnsupportedModel(f"{name} is {str(value)[:60]!r}", "It must be a positive whole number.")
    return value


def _flag(hf: Mapping[str, Any], name: str, default: bool) -> bool:
    value = hf.get(name, default)
    if not isinstance(value, bool):
        raise UnsupportedModel(f"{name} is {str(value)[:60]!r}", "It must be true or false.")
    return value
