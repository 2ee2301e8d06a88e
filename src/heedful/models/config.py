"""What a decoder is made of, as data. Foreign configs (Hugging Face JSON, GGUF metadata) are converted here, once.

`ModelConfig` knows nothing about where weights lie or how they run; `decoder.py` and the native runner both build
from it, and `cost/` counts from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from heedful.errors import UnsupportedModel
from heedful.models.rope import Rope

DECODER_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_5", "gemma3", "phi3", "gpt2")
ENCODER_FAMILIES = ("bert", "modernbert", "deberta-v2")

_SUPPORTED = "heedful runs these decoders: " + ", ".join(DECODER_FAMILIES) + "."


_SIZES = ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "context_len")
_LARGEST = 2**31 - 1
_MOST_LAYERS = 4096
_LARGEST_OF_DELTA = 1 << 14  # heads, and channels of one


def _size(name: str, value: Any, most: int = _LARGEST) -> int:
    """`value` as a size; a file that claims an impossible one is refused before anything is built from it."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise UnsupportedModel(f"{name} is {str(value)[:60]}; 1 to {most:,} are possible", "The file is damaged.")
    return value


@dataclass(frozen=True)
class DeltaNet:
    """Which layers are gated DeltaNet (arXiv:2412.06464) instead of attention, and their sizes.

    Such a layer keeps no keys and values: it carries a state of one size, whatever the length, that cannot be cut back
    to an earlier position.
    """

    layers: tuple[int, ...]
    """Their numbers in the model, ascending."""
    key_heads: int
    value_heads: int
    """Value head h reads key head h // (value_heads / key_heads)."""
    key_dim: int
    value_dim: int
    conv_len: int
    """Taps of the causal convolution over time, the current token's among them."""

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "conv_len"):
            _size(name, getattr(self, name), _LARGEST_OF_DELTA)
        if self.value_heads % self.key_heads:
            raise UnsupportedModel(
                f"{self.value_heads} value heads cannot share {self.key_heads} key heads evenly", "The file is damaged."
            )

    @property
    def value_channels(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values, which pass the convolution together."""
        return 2 * self.key_heads * self.key_dim + self.value_channels

    @property
    def state_bytes(self) -> int:
        """Of one layer and sequence, float32: the last rows before the convolution, and the recurrent state."""
        return 4 * ((self.conv_len - 1) * self.conv_channels + self.key_dim * self.value_channels)

    @property
    def recurrence_flops(self) -> int:
        """Of one layer and token: the state fades, is asked for the key, corrected, and asked for the query."""
        return 7 * self.key_dim * self.value_channels

    def weights(self, hidden_size: int) -> int:
        """Of one layer's matrices and its convolution."""
        projections = self.conv_channels + 2 * self.value_channels + 2 * self.value_heads
        return hidden_size * projections + self.conv_len * self.conv_channels


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer. Lengths are in tokens, sizes in channels."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    """Query heads of a layer."""
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    context_len: int
    windows: tuple[int | None, ...]
    """Per attention layer: a query sees itself and the window - 1 positions before it; None sees all.

    Where some layers are none of attention, those that are have numbers of their own: 0, 1, … in their order.
    """
    rope: Rope | None
    """Rotary positions of full layers; None: learned position embeddings (GPT-2)."""
    rope_local: Rope | None = None
    """Rotary positions of windowed layers, where they differ."""
    norm: str = "rms"
    norm_eps: float = 1e-5
    activation: str = "silu"
    gated_mlp: bool = True
    qk_norm: bool = False
    sandwich_norm: bool = False
    """A second norm after attention and after the MLP, before the residual sum (Gemma)."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool = True
    embedding_scale: float = 1.0
    query_scale: float = 0.0
    """Multiplies q·k before the softmax."""
    attention_softcap: float | None = None
    """Scores become cap · tanh(score / cap)."""
    logit_softcap: float | None = None
    output_gate: bool = False
    """What attention's heads give is multiplied by the sigmoid of a projection of the layer's input (Qwen3.5)."""
    delta: DeltaNet | None = None
    """The layers that are not attention; None: all are."""

    def __post_init__(self) -> None:
        for name in _SIZES:
            _size(name, getattr(self, name))
        if self.query_scale == 0.0:
            object.__setattr__(self, "query_scale", self.head_dim**-0.5)
        for rope in (self.rope, self.rope_local):
            if rope is not None and (rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= self.head_dim):
                raise UnsupportedModel(
                    f"{rope.rotary_dim} rotary channels do not fit heads of {self.head_dim}", "The file is damaged."
                )
        numbers = (self.norm_eps, self.query_scale, self.embedding_scale, self.attention_softcap, self.logit_softcap)
        if any(n is not None and not (isinstance(n, float) and isfinite(n) and n > 0) for n in numbers):
            raise UnsupportedModel(f"norm eps, scales and caps are {numbers}", "They must be positive numbers.")
        attention_layers = self.num_layers - len(self.delta_layers)
        if len(self.windows) != attention_layers or any(w is not None and w < 1 for w in self.windows):
            raise UnsupportedModel(
                f"windows {self.windows} do not fit {attention_layers} layers", "The file is damaged."
            )
        if not self.windows:
            raise UnsupportedModel("no layer of this model is attention", "The file is damaged.")
        # a window as wide as the context hides nothing
        seen = tuple(None if w is not None and w >= self.context_len else w for w in self.windows)
        object.__setattr__(self, "windows", seen)
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly", "The file is damaged."
            )

    def rope_of(self, layer: int) -> Rope | None:
        """Of an attention layer."""
        return self.rope_local if self.windows[layer] is not None and self.rope_local else self.rope

    @property
    def kv_channels(self) -> int:
        """Numbers that one token's K (or V) has in one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def delta_layers(self) -> tuple[int, ...]:
        return () if self.delta is None else self.delta.layers

    @property
    def state_bytes(self) -> int:
        """What a sequence carries besides keys and values, whatever its length: the states of its DeltaNet layers."""
        return 0 if self.delta is None else len(self.delta.layers) * self.delta.state_bytes

    @property
    def recurrence_flops(self) -> int:
        """Of one token, in all DeltaNet layers."""
        return 0 if self.delta is None else len(self.delta.layers) * self.delta.recurrence_flops

    @property
    def linear_weights(self) -> int:
        """Weights of all matrices that every token passes, without embeddings and head."""
        of_heads = (3 if self.output_gate else 2) * self.num_heads + 2 * self.num_kv_heads
        attention = len(self.windows) * self.hidden_size * self.head_dim * of_heads
        delta = 0 if self.delta is None else len(self.delta.layers) * self.delta.weights(self.hidden_size)
        mlp = self.hidden_size * self.intermediate_size * (3 if self.gated_mlp else 2)
        return attention + delta + self.num_layers * mlp

    @property
    def head_weights(self) -> int:
        return self.vocab_size * self.hidden_size


# ---- Hugging Face config.json -----------------------------------------------------------------------------------


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """A ModelConfig from a Hugging Face `config.json`, in the key layout of transformers 4 or 5.

    Raises UnsupportedModel for an architecture or a setting that heedful does not compute.
    """
    if "text_config" in hf:
        outer = {key: hf[key] for key in ("tie_word_embeddings",) if key in hf}
        hf = {**outer, **hf["text_config"]}
    model_type = str(hf.get("model_type", "")).removesuffix("_text")
    if model_type not in DECODER_FAMILIES:
        raise UnsupportedModel(f"config.json has model_type {model_type!r}", _SUPPORTED)
    try:
        if model_type == "gpt2":
            return _gpt2_from_hf(hf)
        return _qwen3_5_from_hf(hf) if model_type == "qwen3_5" else _llama_like_from_hf(model_type, hf)
    except KeyError as missing:
        raise UnsupportedModel(
            f"config.json of this {model_type} model lacks {missing}", "The file is incomplete."
        ) from None


def _llama_like_from_hf(family: str, hf: Mapping[str, Any]) -> ModelConfig:
    heads = _size("num_attention_heads", hf["num_attention_heads"])
    layers = _size("num_hidden_layers", hf["num_hidden_layers"], _MOST_LAYERS)
    head_dim = int(hf.get("head_dim") or hf["hidden_size"] // heads)
    gemma = family == "gemma3"
    rope, rope_local = _ropes_from_hf(hf, head_dim, gemma)
    attention_bias = bool(hf.get("attention_bias", False))
    return ModelConfig(
        family=family,
        vocab_size=int(hf["vocab_size"]),
        hidden_size=int(hf["hidden_size"]),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(hf.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        intermediate_size=int(hf["intermediate_size"]),
        context_len=int(hf["max_position_embeddings"]),
        windows=_windows_from_hf(family, hf, layers),
        rope=rope,
        rope_local=rope_local,
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        activation=_activation(hf.get("hidden_act") or hf.get("hidden_activation") or "silu"),
        qk_norm=family in ("qwen3", "gemma3"),
        sandwich_norm=gemma,
        qkv_bias=attention_bias or family == "qwen2",
        out_bias=attention_bias,
        mlp_bias=bool(hf.get("mlp_bias", False)),
        tied_head=bool(hf.get("tie_word_embeddings", gemma)),
        embedding_scale=float(hf["hidden_size"]) ** 0.5 if gemma else 1.0,
        query_scale=float(hf["query_pre_attn_scalar"]) ** -0.5 if "query_pre_attn_scalar" in hf else 0.0,
        attention_softcap=_cap(hf.get("attn_logit_softcapping")),
        logit_softcap=_cap(hf.get("final_logit_softcapping")),
    )


def _qwen3_5_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The hybrid of gated DeltaNet and gated full attention; what is said of images changes nothing for text."""
    layers = _size("num_hidden_layers", hf["num_hidden_layers"], _MOST_LAYERS)
    head_dim = _size("head_dim", hf.get("head_dim") or 256)
    if hf.get("attention_bias") or not hf.get("attn_output_gate", True) or hf.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel("this qwen3_5 model has biases, no output gates or another activation than silu", "")
    delta = DeltaNet(
        layers=_linear_layers(hf, layers),
        key_heads=hf["linear_num_key_heads"],
        value_heads=hf["linear_num_value_heads"],
        key_dim=hf["linear_key_head_dim"],
        value_dim=hf["linear_value_head_dim"],
        conv_len=hf["linear_conv_kernel_dim"],
    )
    rope, _ = _ropes_from_hf({"partial_rotary_factor": 0.25, **hf}, head_dim, gemma=False)
    return ModelConfig(
        family="qwen3_5",
        vocab_size=int(hf["vocab_size"]),
        hidden_size=int(hf["hidden_size"]),
        num_layers=layers,
        num_heads=int(hf["num_attention_heads"]),
        num_kv_heads=int(hf["num_key_value_heads"]),
        head_dim=head_dim,
        intermediate_size=int(hf["intermediate_size"]),
        context_len=int(hf["max_position_embeddings"]),
        windows=(None,) * (layers - len(delta.layers)),
        rope=rope,
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        qk_norm=True,
        tied_head=bool(hf.get("tie_word_embeddings", False)),
        output_gate=True,
        delta=delta,
    )


def _linear_layers(hf: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Numbers of the layers that are linear attention, from their kinds or from how often a full one comes."""
    kinds = hf.get("layer_types")
    if kinds is None:
        interval = _size("full_attention_interval", hf.get("full_attention_interval", 4))
        return tuple(layer for layer in range(layers) if (layer + 1) % interval)
    if len(kinds) != layers or not set(kinds) <= {"linear_attention", "full_attention"}:
        raise UnsupportedModel(
            f"layer_types {str(kinds)[:120]} do not fit {layers} layers", "Known: linear_attention, full_attention."
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")


def _gpt2_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    if hf.get("scale_attn_by_inverse_layer_idx") or not hf.get("scale_attn_weights", True):
        raise UnsupportedModel("this GPT-2 scales attention per layer or not at all", _SUPPORTED)
    layers = _size("n_layer", hf["n_layer"], _MOST_LAYERS)
    return ModelConfig(
        family="gpt2",
        vocab_size=int(hf["vocab_size"]),
        hidden_size=int(hf["n_embd"]),
        num_layers=layers,
        num_heads=int(hf["n_head"]),
        num_kv_heads=int(hf["n_head"]),
        head_dim=int(hf["n_embd"]) // int(hf["n_head"]),
        intermediate_size=int(hf.get("n_inner") or 4 * int(hf["n_embd"])),
        context_len=int(hf["n_positions"]),
        windows=(None,) * layers,
        rope=None,
        norm="layer",
        norm_eps=float(hf["layer_norm_epsilon"]),
        activation=_activation(hf.get("activation_function", "gelu_new")),
        gated_mlp=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied_head=bool(hf.get("tie_word_embeddings", True)),
    )


def _cap(value: Any) -> float | None:
    return float(value) if value else None


def _activation(name: str) -> str:
    known = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu"}
    if name not in known:
        raise UnsupportedModel(f"activation {name!r} is not known", "Known: " + ", ".join(known) + ".")
    return known[name]


def _windows_from_hf(family: str, hf: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = hf.get("sliding_window")
    if not window or not hf.get("use_sliding_window", True):
        return (None,) * layers
    if hf.get("layer_types"):
        return tuple(int(window) if kind == "sliding_attention" else None for kind in hf["layer_types"])
    if family == "gemma3":
        pattern = int(hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6)
        return tuple(None if (i + 1) % pattern == 0 else int(window) for i in range(layers))
    first = int(hf.get("max_window_layers", 0)) if family in ("qwen2", "qwen3") else 0
    return tuple(int(window) if i >= first else None for i in range(layers))


def _ropes_from_hf(hf: Mapping[str, Any], head_dim: int, gemma: bool) -> tuple[Rope, Rope | None]:
    """(full layers, windowed layers or None), from `rope_parameters` (v5) or `rope_theta` + `rope_scaling` (v4)."""
    parameters = hf.get("rope_parameters")
    if parameters and "full_attention" in parameters:
        local = parameters.get("sliding_attention")
        return (
            _rope_from_hf(parameters["full_attention"], hf, head_dim),
            _rope_from_hf(local, hf, head_dim) if local else None,
        )
    if parameters:
        return _rope_from_hf(parameters, hf, head_dim), None
    scaling = {"rope_theta": hf.get("rope_theta", 10000.0), **(hf.get("rope_scaling") or {})}
    rope = _rope_from_hf(scaling, hf, head_dim)
    local_theta = hf.get("rope_local_base_freq", 10000.0 if gemma else None)
    return rope, Rope(rope.rotary_dim, float(local_theta)) if local_theta else None


def _rope_from_hf(p: Mapping[str, Any], hf: Mapping[str, Any], head_dim: int) -> Rope:
    kind = str(p.get("rope_type") or p.get("type") or "default")
    rotary_share = float(p.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0)
    rope = Rope(rotary_dim=int(head_dim * rotary_share), theta=float(p["rope_theta"]))
    if kind == "default":
        return rope
    if kind not in ("linear", "llama3", "yarn"):
        raise UnsupportedModel(f"rope scaling {kind!r} is not known", "Known: default, linear, llama3, yarn.")
    original = p.get("original_max_position_embeddings") or hf.get("original_max_position_embeddings")
    rope = replace(
        rope,
        scaling=kind,
        factor=float(p["factor"]),
        original_context_len=int(original or hf["max_position_embeddings"]),
    )
    if kind == "llama3":
        return replace(rope, low_freq_factor=float(p["low_freq_factor"]), high_freq_factor=float(p["high_freq_factor"]))
    if p.get("mscale") or p.get("mscale_all_dim"):
        raise UnsupportedModel("yarn with mscale is not known", "Plain yarn is.")
    attention = p.get("attention_factor")
    return replace(
        rope,
        beta_fast=float(p.get("beta_fast") or 32.0),
        beta_slow=float(p.get("beta_slow") or 1.0),
        truncate=bool(p.get("truncate", True)),
        attention_factor=float(attention) if attention is not None else None,
    )


# ---- GGUF metadata ----------------------------------------------------------------------------------------------


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """A ModelConfig from GGUF metadata. Facts that the format leaves to its reader (Gemma's pattern) are filled in.

    Raises UnsupportedModel when the architecture is unknown or a needed key is missing, naming it.
    """
    family = str(metadata.get("general.architecture", ""))
    if family not in ("llama", "qwen2", "qwen3", "gemma3", "phi3"):
        raise UnsupportedModel(f"general.architecture is {family!r}", _SUPPORTED)
    gemma = family == "gemma3"

    def get(key: str, *default: Any) -> Any:
        full = f"{family}.{key}"
        if full not in metadata and not default:
            raise UnsupportedModel(f"the GGUF metadata lacks {full!r}", "The file is incomplete.")
        return metadata.get(full, *default)

    if "token_embd.weight" not in shapes:
        raise UnsupportedModel("the GGUF file has no tensor token_embd.weight", "The file is incomplete.")
    if any(name.startswith("rope_factors_") for name in shapes):
        raise UnsupportedModel("rope scaling 'longrope' is not known", "Known: default, linear, llama3, yarn.")
    if get("expert_count", 0):
        raise UnsupportedModel("mixture-of-experts models are not known", _SUPPORTED)
    heads, hidden = _size("head_count", get("attention.head_count")), _size("embedding_length", get("embedding_length"))
    layers = _size("block_count", get("block_count"), _MOST_LAYERS)
    head_dim = int(get("attention.key_length", hidden // heads))
    rope = _rope_from_gguf(get, head_dim)
    return ModelConfig(
        family=family,
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_size("head_count_kv", get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        intermediate_size=int(get("feed_forward_length")),
        context_len=int(get("context_length")),
        windows=_windows_from_gguf(get, gemma, layers),
        rope=rope,
        rope_local=Rope(rope.rotary_dim, float(get("rope.freq_base_swa", 10000.0))) if gemma else None,
        norm_eps=float(get("attention.layer_norm_rms_epsilon")),
        activation="gelu_tanh" if gemma else "silu",
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
        sandwich_norm=gemma,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        out_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_down.bias" in shapes,
        tied_head="output.weight" not in shapes,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        # the 27B model alone scales by hidden / heads; the format does not store it
        query_scale=(hidden / heads) ** -0.5 if gemma and layers == 62 else 0.0,
        attention_softcap=_cap(get("attn_logit_softcapping", None)),
        logit_softcap=_cap(get("final_logit_softcapping", None)),
    )


def _windows_from_gguf(get: Any, gemma: bool, layers: int) -> tuple[int | None, ...]:
    window = int(get("attention.sliding_window", 0))
    if not window:
        return (None,) * layers
    pattern = get("attention.sliding_window_pattern", 6 if gemma else 0)
    if not isinstance(pattern, int):
        return tuple(window if local else None for local in pattern)
    return tuple(None if pattern and (i + 1) % pattern == 0 else window for i in range(layers))


def _rope_from_gguf(get: Any, head_dim: int) -> Rope:
    kind = str(get("rope.scaling.type", "none"))
    factor = float(get("rope.scaling.factor", 1.0))
    rope = Rope(int(get("rope.dimension_count", head_dim)), float(get("rope.freq_base", 10000.0)))
    if kind == "none" or factor == 1.0:
        return rope
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"rope scaling {kind!r} is not known in GGUF", "Known: none, linear, yarn.")
    return replace(
        rope,
        scaling=kind,
        factor=factor,
        original_context_len=int(get("rope.scaling.original_context_length", 0)) or int(get("context_length")),
    )
