"""What an encoder is made of, as data, converted here once from a Hugging Face `config.json`.

`EncoderConfig` says nothing of what stands on the trunk: pooling and heads come from elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from heedful.errors import UnsupportedModel
from heedful.models.config import ENCODER_FAMILIES

RUNNING_ENCODERS = ("bert",)

_SUPPORTED = "heedful runs these encoders: " + ", ".join(RUNNING_ENCODERS) + "."
_SIZES = ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size", "context_len", "token_types")
_LARGEST = 2**31 - 1
_MOST_LAYERS = 4096
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


@dataclass(frozen=True)
class EncoderConfig:
    """One encoder: every token sees every token of its text. Lengths are in tokens, sizes in channels."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    context_len: int
    """Learned positions; a longer text has no embedding for its end."""
    token_types: int
    """Kinds of tokens with an embedding of their own: first and second text of a pair."""
    norm_eps: float = 1e-12
    activation: str = "gelu"

    def __post_init__(self) -> None:
        for name in _SIZES:
            value, most = getattr(self, name), _MOST_LAYERS if name == "num_layers" else _LARGEST
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise UnsupportedModel(
                    f"{name} is {str(value)[:60]}; 1 to {most:,} are possible", "The file is damaged."
                )
        if self.hidden_size % self.num_heads:
            raise UnsupportedModel(
                f"{self.hidden_size} channels do not part into {self.num_heads} heads", "The file is damaged."
            )
        if not (isinstance(self.norm_eps, float) and isfinite(self.norm_eps) and self.norm_eps > 0):
            raise UnsupportedModel(f"norm eps is {self.norm_eps}", "It must be a positive number.")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def linear_weights(self) -> int:
        """Weights of all matrices that every token passes, without embeddings."""
        return self.num_layers * (4 * self.hidden_size**2 + 2 * self.hidden_size * self.intermediate_size)

    @property
    def embedding_weights(self) -> int:
        return (self.vocab_size + self.context_len + self.token_types) * self.hidden_size


def is_encoder(hf: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of an encoder family, one that runs here or not."""
    return hf.get("model_type") in ENCODER_FAMILIES


def encoder_config_from_hf(hf: Mapping[str, Any]) -> EncoderConfig:
    """An EncoderConfig from a Hugging Face `config.json`, as transformers 3 to 5 write it.

    Raises UnsupportedModel for a family or a setting that heedful does not compute.
    """
    family = hf.get("model_type")
    if family not in RUNNING_ENCODERS:
        raise UnsupportedModel(f"config.json has model_type {str(family)[:60]!r}", _SUPPORTED)
    positions = hf.get("position_embedding_type")
    if positions not in (None, "absolute"):
        raise UnsupportedModel(f"this BERT has {str(positions)[:60]!r} positions", "Only learned ones are computed.")
    if hf.get("is_decoder"):
        raise UnsupportedModel("this BERT was made a decoder", _SUPPORTED)
    try:
        return EncoderConfig(
            family="bert",
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            num_layers=hf["num_hidden_layers"],
            num_heads=hf["num_attention_heads"],
            intermediate_size=hf["intermediate_size"],
            context_len=hf["max_position_embeddings"],
            token_types=hf.get("type_vocab_size", 2),
            norm_eps=_number("layer_norm_eps", hf.get("layer_norm_eps", 1e-12)),
            activation=_activation(hf.get("hidden_act", "gelu")),
        )
    except KeyError as missing:
        raise UnsupportedModel(f"config.json of this BERT lacks {missing}", "The file is incomplete.") from None


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnsupportedModel(f"{name} is {str(value)[:60]!r}", "It must be a number.")
    return float(value)


def _activation(name: Any) -> str:
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise UnsupportedModel(f"activation {str(name)[:60]!r} is not known", "Known: " + ", ".join(_ACTIVATIONS) + ".")
    return _ACTIVATIONS[name]
