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
from heedful.models.rope import Rope

RUNNING_ENCODERS = ENCODER_FAMILIES

_SUPPORTED = "heedful runs these encoders: " + ", ".join(RUNNING_ENCODERS) + "."
_SIZES = ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size", "context_len", "token_types")
_LARGEST = 2**31 - 1
_MOST_LAYERS = 4096
_WIDEST_CONVOLUTION = 255
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


@dataclass(frozen=True)
class RelativePositions:
    """DeBERTa's disentangled attention: the score of a pair of tokens also depends on how far apart they are.

    Distances up to buckets / 2 have an embedding each; farther ones share them, by logarithm, up to max_distance.
    """

    span: int
    """The table has 2 · span rows: distances -span … span - 1."""
    buckets: int
    """0: every distance has a row, clipped to the span."""
    max_distance: int
    content_to_position: bool = True
    position_to_content: bool = True
    shared: bool = True
    """Positions pass the layer's own query and key matrices; False: they have some for themselves."""
    normed: bool = False
    """The table passes a layer norm."""

    def __post_init__(self) -> None:
        possible = 1 <= self.span <= _LARGEST // 2 and self.max_distance > 1 and (self.buckets or 4) >= 4
        if not possible or self.buckets // 2 >= self.max_distance - 1:
            raise UnsupportedModel(
                f"{self.buckets} buckets for distances up to {self.max_distance} are impossible", "The file is damaged."
            )

    @property
    def kinds(self) -> int:
        """Terms of a score beside content to content."""
        return self.content_to_position + self.position_to_content


@dataclass(frozen=True)
class Convolution:
    """Of large DeBERTas: over neighbouring embeddings of a text, added to what the first layer gives."""

    width: int
    """Neighbours that count, the token itself among them: an odd number."""
    groups: int = 1
    activation: str = "tanh"


@dataclass(frozen=True)
class EncoderConfig:
    """One encoder: every token sees every token of its text, or those near it. Lengths are in tokens, sizes in
    channels.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    context_len: int
    """The longest text. Learned positions, where the family has such, end there."""
    token_types: int
    """Kinds of tokens with an embedding of their own: first and second text of a pair. 0: there is no such table."""
    norm_eps: float = 1e-12
    activation: str = "gelu"
    windows: tuple[int | None, ...] = ()
    """By layer: tokens less than so many places apart see each other; None: all of a text do. (): all layers None."""
    ropes: tuple[Rope, ...] = ()
    """By layer; (): positions are not rotary."""
    learned_positions: bool = True
    relative: RelativePositions | None = None
    convolution: Convolution | None = None
    attention_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    gated_mlp: bool = False

    def __post_init__(self) -> None:
        for name in _SIZES:
            value, most = getattr(self, name), _MOST_LAYERS if name == "num_layers" else _LARGEST
            least = 0 if name == "token_types" and self.family != "bert" else 1
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise UnsupportedModel(
                    f"{name} is {str(value)[:60]}; {least} to {most:,} are possible", "The file is damaged."
                )
        if self.hidden_size % self.num_heads:
            raise UnsupportedModel(
                f"{self.hidden_size} channels do not part into {self.num_heads} heads", "The file is damaged."
            )
        if not (isinstance(self.norm_eps, float) and isfinite(self.norm_eps) and self.norm_eps > 0):
            raise UnsupportedModel(f"norm eps is {self.norm_eps}", "It must be a positive number.")
        assert len(self.windows) in (0, self.num_layers), self.windows
        assert len(self.ropes) in (0, self.num_layers), self.ropes

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """(num_layers,), each as in `windows`."""
        return self.windows or (None,) * self.num_layers

    @property
    def matrix_weights(self) -> int:
        """Stored weights of all matrices that every token passes, without embeddings."""
        mlp = (3 if self.gated_mlp else 2) * self.hidden_size * self.intermediate_size
        own = self.relative.kinds if self.relative and not self.relative.shared else 0
        return self.num_layers * ((4 + own) * self.hidden_size**2 + mlp) + self._convolution_weights

    @property
    def linear_weights(self) -> int:
        """Numbers that every token is multiplied with: the matrices, and DeBERTa's keys and queries of distances, which
        are computed once from its table.
        """
        mlp = (3 if self.gated_mlp else 2) * self.hidden_size * self.intermediate_size
        distances = 2 * self.relative.span * self.relative.kinds * self.hidden_size if self.relative else 0
        return self.num_layers * (4 * self.hidden_size**2 + mlp + distances) + self._convolution_weights

    @property
    def _convolution_weights(self) -> int:
        if self.convolution is None:
            return 0
        return self.convolution.width * self.hidden_size**2 // self.convolution.groups

    @property
    def embedding_weights(self) -> int:
        positions = self.context_len if self.learned_positions else 0
        positions += 2 * self.relative.span if self.relative else 0
        return (self.vocab_size + positions + self.token_types) * self.hidden_size


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
    if hf.get("is_decoder"):
        raise UnsupportedModel(f"this {family} was made a decoder", _SUPPORTED)
    read = {"bert": _bert, "modernbert": _modernbert, "deberta-v2": _deberta}[str(family)]
    try:
        return read(hf)
    except KeyError as missing:
        raise UnsupportedModel(f"config.json of this {family} lacks {missing}", "The file is incomplete.") from None


def _common(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "family": hf["model_type"],
        "vocab_size": hf["vocab_size"],
        "hidden_size": hf["hidden_size"],
        "num_layers": hf["num_hidden_layers"],
        "num_heads": hf["num_attention_heads"],
        "intermediate_size": hf["intermediate_size"],
        "context_len": hf["max_position_embeddings"],
    }


def _bert(hf: Mapping[str, Any]) -> EncoderConfig:
    positions = hf.get("position_embedding_type")
    if positions not in (None, "absolute"):
        raise UnsupportedModel(f"this BERT has {str(positions)[:60]!r} positions", "Only learned ones are computed.")
    return EncoderConfig(
        **_common(hf),
        token_types=hf.get("type_vocab_size", 2),
        norm_eps=_number("layer_norm_eps", hf.get("layer_norm_eps", 1e-12)),
        activation=known_activation(hf.get("hidden_act", "gelu")),
    )


def _modernbert(hf: Mapping[str, Any]) -> EncoderConfig:
    common = _common(hf)
    plain = EncoderConfig(**common, token_types=0, learned_positions=False)  # checks its sizes before their use
    is_local = _local_layers(hf, plain.num_layers)
    full, local = (Rope(plain.head_dim, theta) for theta in _thetas(hf))
    reach = _whole("local_attention", hf.get("local_attention", 128), 0) // 2
    return EncoderConfig(
        **common,
        token_types=0,
        norm_eps=_number("norm_eps", hf.get("norm_eps", 1e-5)),
        activation=known_activation(hf.get("hidden_activation", "gelu")),
        windows=tuple(reach + 1 if here else None for here in is_local),
        ropes=tuple(local if here else full for here in is_local),
        learned_positions=False,
        attention_bias=bool(hf.get("attention_bias", False)),
        mlp_bias=bool(hf.get("mlp_bias", False)),
        norm_bias=bool(hf.get("norm_bias", False)),
        gated_mlp=True,
    )


def _local_layers(hf: Mapping[str, Any], num_layers: int) -> list[bool]:
    kinds = hf.get("layer_types")
    if kinds is None:
        every = _whole("global_attn_every_n_layers", hf.get("global_attn_every_n_layers", 3), 1)
        return [layer % every != 0 for layer in range(num_layers)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise UnsupportedModel(f"layer_types is {str(kinds)[:60]}", f"One of {', '.join(known)} for each layer.")
    return [kind == "sliding_attention" for kind in kinds]


def _thetas(hf: Mapping[str, Any]) -> tuple[float, float]:
    """Rotary bases (of layers that see all, of local ones), as transformers 5 or as older ones write them."""
    parameters = hf.get("rope_parameters")
    if parameters is None:
        full = _number("global_rope_theta", hf.get("global_rope_theta", 160000.0))
        local = hf.get("local_rope_theta", 10000.0)
        return full, full if local is None else _number("local_rope_theta", local)
    found = []
    for kind, usual in (("full_attention", 160000.0), ("sliding_attention", 10000.0)):
        one = parameters.get(kind, {}) if isinstance(parameters, Mapping) else None
        if not isinstance(one, Mapping) or one.get("rope_type", "default") != "default":
            raise UnsupportedModel(f"rope_parameters of {kind} are {str(one)[:60]}", "Only plain ones are computed.")
        found.append(_number("rope_theta", one.get("rope_theta", usual)))
    return found[0], found[1]


def _deberta(hf: Mapping[str, Any]) -> EncoderConfig:
    _refuse_deberta_parts(hf)
    return EncoderConfig(
        **_common(hf),
        token_types=hf.get("type_vocab_size", 0),
        norm_eps=_number("layer_norm_eps", hf.get("layer_norm_eps", 1e-7)),
        activation=known_activation(hf.get("hidden_act", "gelu")),
        learned_positions=bool(hf.get("position_biased_input", True)),
        relative=_relative(hf),
        convolution=_convolution(hf),
    )


def _refuse_deberta_parts(hf: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel for what some DeBERTas have and none that is run here."""
    hidden, head = hf["hidden_size"], hf.get("attention_head_size")
    for is_there, what in (
        (not hf.get("relative_attention"), "no relative attention"),
        (hf.get("embedding_size", hidden) != hidden, "narrower embeddings"),
        (head is not None and head * hf["num_attention_heads"] != hidden, "heads of another size"),
    ):
        if is_there:
            raise UnsupportedModel(f"this DeBERTa has {what}", "heedful does not compute that.")


def _relative(hf: Mapping[str, Any]) -> RelativePositions:
    asked = hf.get("pos_att_type") or []
    terms = asked.split("|") if isinstance(asked, str) else asked
    if not isinstance(terms, list) or any(term not in ("c2p", "p2c") for term in terms):
        raise UnsupportedModel(f"pos_att_type is {str(asked)[:60]}", "c2p and p2c are computed.")
    longest = _whole("max_relative_positions", hf.get("max_relative_positions", -1), -1)
    longest = longest if longest > 0 else _whole("max_position_embeddings", hf["max_position_embeddings"], 1)
    buckets = max(0, _whole("position_buckets", hf.get("position_buckets", -1), -1))
    return RelativePositions(
        span=buckets or longest,
        buckets=buckets,
        max_distance=longest,
        content_to_position="c2p" in terms,
        position_to_content="p2c" in terms,
        shared=bool(hf.get("share_att_key", False)),
        normed="layer_norm" in str(hf.get("norm_rel_ebd", "none")).lower().split("|"),
    )


def _convolution(hf: Mapping[str, Any]) -> Convolution | None:
    width = _whole("conv_kernel_size", hf.get("conv_kernel_size") or 0, 0)
    if not width:
        return None
    groups = _whole("conv_groups", hf.get("conv_groups", 1), 1)
    if width % 2 == 0 or width > _WIDEST_CONVOLUTION or hf["hidden_size"] % groups:
        raise UnsupportedModel(
            f"a convolution over {width} neighbours in {groups} groups is not computed", "The file may be damaged."
        )
    name = hf.get("conv_act", "tanh")
    return Convolution(width, groups, "tanh" if name == "tanh" else known_activation(name))


def known_activation(name: Any) -> str:
    """Our name of an activation. Raises UnsupportedModel for one that is not computed here."""
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise UnsupportedModel(f"activation {str(name)[:60]!r} is not known", "Known: " + ", ".join(_ACTIVATIONS) + ".")
    return _ACTIVATIONS[name]


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        raise UnsupportedModel(f"{name} is {str(value)[:60]!r}", "It must be a number.")
    return float(value)


def _whole(name: str, value: Any, least: int) -> int:
    if type(value) is not int or not least <= value <= _LARGEST:
        raise UnsupportedModel(f"{name} is {str(value)[:60]!r}", "It must be a whole number.")
    return value
