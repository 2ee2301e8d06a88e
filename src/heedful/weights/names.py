"""Foreign weight names to ours, once, at the border. Pure string and row bookkeeping on StoredTensors.

Our names: embed, position_embed, layers.N.{attn_norm, attn.q, attn.k, attn.v, attn.out, attn.q_norm, attn.k_norm,
attn_post_norm, mlp_norm, mlp.gate, mlp.up, mlp.down, mlp_post_norm}, norm, head; each with .weight or .bias. Qwen3.5
has attn.gate too, and in its linear layers, instead of attn, delta.{qkv, z, b, a, conv, a_log, dt_bias, norm, out}.
Matrices are (out, in). Rotary channels are in half-split order, and norm weights multiply as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from heedful.errors import UnsupportedModel
from heedful.models.config import ModelConfig
from heedful.weights.quantize import Floats
from heedful.weights.tensor import StoredTensor, fold

Weights = dict[str, StoredTensor]

_HF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.qkv_proj": "attn.qkv",
    "self_attn.o_proj": "attn.out",
    "self_attn.q_norm": "attn.q_norm",
    "self_attn.k_norm": "attn.k_norm",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.gate_up_proj": "mlp.gate_up",
    "mlp.down_proj": "mlp.down",
}
_GEMMA_LAYER = {
    **_HF_LAYER,
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}
_GPT2_LAYER = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn.qkv",
    "attn.c_proj": "attn.out",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}
_QWEN35_LAYER = {
    **_HF_LAYER,
    "linear_attn.in_proj_qkv": "delta.qkv",
    "linear_attn.in_proj_z": "delta.z",
    "linear_attn.in_proj_b": "delta.b",
    "linear_attn.in_proj_a": "delta.a",
    "linear_attn.conv1d": "delta.conv",
    "linear_attn.A_log": "delta.a_log",
    "linear_attn.dt_bias": "delta.dt_bias",
    "linear_attn.norm": "delta.norm",
    "linear_attn.out_proj": "delta.out",
}
_HF_TOP = {"embed_tokens": "embed", "norm": "norm", "lm_head": "head", "wte": "embed", "wpe": "position_embed"}
_HF_TOP["ln_f"] = "norm"
_TO_HF_LAYER = {
    family: {ours: theirs for theirs, ours in layer.items()}
    for family, layer in (("gemma3", _GEMMA_LAYER), ("", _HF_LAYER))
}
_TO_HF_TOP = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_NOT_TEXT = ("model.visual.", "mtp.")  # Qwen3.5's image tower, and its guesses at further tokens
_HF_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # saved by old versions, computed here

ROTARY = tuple(f".attn.{part}.{kind}" for part in "qk" for kind in ("weight", "bias"))
"""Ends of the names of what makes the channels that turn."""

_GGUF_LAYER = {
    "attn_norm": "attn_norm",
    "attn_q": "attn.q",
    "attn_k": "attn.k",
    "attn_v": "attn.v",
    "attn_qkv": "attn.qkv",
    "attn_output": "attn.out",
    "attn_q_norm": "attn.q_norm",
    "attn_k_norm": "attn.k_norm",
    "post_attention_norm": "attn_post_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
    "post_ffw_norm": "mlp_post_norm",
}
_GGUF_TOP = {"token_embd": "embed", "output_norm": "norm", "output": "head"}
_TO_GGUF_LAYER = {ours: theirs for theirs, ours in _GGUF_LAYER.items()} | {"mlp.gate_up": "ffn_up"}
_TO_GGUF_TOP = {ours: theirs for theirs, ours in _GGUF_TOP.items()}
_GGUF_BUFFERS = ("rope_freqs",)


def from_hf(stored: Mapping[str, StoredTensor], config: ModelConfig) -> Weights:
    """Weights by our names from a Hugging Face checkpoint. Raises UnsupportedModel for a name nobody knows."""
    families = {"gemma3": _GEMMA_LAYER, "gpt2": _GPT2_LAYER, "qwen3_5": _QWEN35_LAYER}
    layer_names = families.get(config.family, _HF_LAYER)
    ignored = _NOT_TEXT if config.family == "qwen3_5" else ()
    weights: Weights = {}
    for name, tensor in stored.items():
        if not (name.endswith(_HF_BUFFERS) or name.startswith(ignored)):
            bare = re.sub(r"^(model\.language_model\.|language_model\.model\.|model\.|transformer\.)", "", name)
            weights[_ours(name, bare, r"(?:layers|h)\.(\d+)\.(.+)", layer_names, _HF_TOP)] = tensor
    if config.tied_head:
        weights.pop("head.weight", None)
    if config.family == "gpt2":
        matrices = (".qkv.weight", ".out.weight", ".up.weight", ".down.weight")
        _each(weights, lambda name: name.endswith(matrices), _transpose)
    if config.family in ("gemma3", "qwen3_5"):  # stored as weight - 1, but for DeltaNet's own
        _each(weights, lambda n: n.endswith("norm.weight") and not n.endswith("delta.norm.weight"), _plus_one)
    _split_fused(weights, config)
    if config.output_gate:
        _split_gates(weights, config)
    _each(weights, lambda name: name.endswith("delta.conv.weight"), _without_middle)
    return weights


def hf_name(name: str, family: str = "llama") -> str:
    """What a checkpoint of a Llama-like family, or of Gemma 3, calls one of our weights."""
    stem, _, kind = name.rpartition(".")
    if found := re.fullmatch(r"layers\.(\d+)\.(.+)", stem):
        return f"model.layers.{found[1]}.{_TO_HF_LAYER.get(family, _TO_HF_LAYER[''])[found[2]]}.{kind}"
    return f"{_TO_HF_TOP[stem]}.{kind}"


def gguf_name(name: str) -> str:
    """What a GGUF file calls one of our weights."""
    stem, _, kind = name.rpartition(".")
    if found := re.fullmatch(r"layers\.(\d+)\.(.+)", stem):
        return f"blk.{found[1]}.{_TO_GGUF_LAYER[found[2]]}.{kind}"
    return f"{_TO_GGUF_TOP[stem]}.{kind}"


def from_gguf(stored: Mapping[str, StoredTensor], config: ModelConfig) -> Weights:
    """Weights by our names from a GGUF file; the quantized blocks stay as they are, rows may change places."""
    weights: Weights = {}
    for name, tensor in stored.items():
        if not name.startswith(_GGUF_BUFFERS):
            weights[_ours(name, name, r"blk\.(\d+)\.(.+)", _GGUF_LAYER, _GGUF_TOP)] = tensor
    if config.family == "phi3":  # gate and up are one tensor under the name of up
        _each(weights, lambda name: name.endswith("mlp.up.weight"), lambda t: t, rename=("mlp.up", "mlp.gate_up"))
    _split_fused(weights, config)
    if config.family == "llama":
        _unpermute_rotary(weights, config)
    return weights


def _ours(name: str, bare: str, layer_pattern: str, layer_names: Mapping[str, str], top: Mapping[str, str]) -> str:
    stem, _, kind = bare.rpartition(".")
    if kind in ("A_log", "dt_bias"):  # vectors without a layer of their own
        stem, kind = bare, "weight"
    if found := re.fullmatch(layer_pattern, stem):
        if found[2] in layer_names and kind in ("weight", "bias"):
            return f"layers.{int(found[1])}.{layer_names[found[2]]}.{kind}"
    elif stem in top and kind in ("weight", "bias"):
        return f"{top[stem]}.{kind}"
    raise UnsupportedModel(f"weight {name!r} has no place in this model", "The file holds another architecture.")


def _each(
    weights: Weights,
    chosen: Callable[[str], bool],
    change: Callable[[StoredTensor], StoredTensor],
    rename: tuple[str, str] | None = None,
) -> None:
    for name in [name for name in weights if chosen(name)]:
        weights[name.replace(*rename) if rename else name] = change(weights.pop(name))


def _split_fused(weights: Weights, config: ModelConfig) -> None:
    kv = config.kv_channels
    sizes = {
        "attn.qkv": (("attn.q", config.num_heads * config.head_dim), ("attn.k", kv), ("attn.v", kv)),
        "mlp.gate_up": (("mlp.gate", config.intermediate_size), ("mlp.up", config.intermediate_size)),
    }
    for fused, parts in sizes.items():
        for name in [name for name in weights if f".{fused}." in name]:
            tensor, first = weights.pop(name), 0
            for part, rows in parts:
                weights[name.replace(fused, part)] = tensor.take_rows(slice(first, first + rows))
                first += rows
            if tensor.shape[:1] != (first,):
                raise UnsupportedModel(f"{tensor.name} has shape {tensor.shape}, {first} rows are needed", "")


def _split_gates(weights: Weights, config: ModelConfig) -> None:
    """Qwen3.5's q_proj has for each head the query's rows, then those of its output gate: two matrices."""
    rows = np.arange(2 * config.num_heads * config.head_dim).reshape(config.num_heads, 2, config.head_dim)
    for name in [name for name in weights if name.endswith(".attn.q.weight")]:
        tensor = weights.pop(name)
        if tensor.shape[:1] != (rows.size,):
            raise UnsupportedModel(f"{tensor.name} has shape {tensor.shape}, {rows.size} rows are needed", "")
        weights[name] = tensor.take_rows(rows[:, 0].ravel())
        weights[name.replace("attn.q", "attn.gate")] = tensor.take_rows(rows[:, 1].ravel())


def _unpermute_rotary(weights: Weights, config: ModelConfig) -> None:
    """GGUF stores Llama's q and k rows with the two of a rotary pair side by side; put them half a head apart."""
    half = config.head_dim // 2
    for name, tensor in list(weights.items()):
        if name.endswith(ROTARY):
            if not tensor.shape or tensor.shape[0] % config.head_dim or config.head_dim % 2:
                raise UnsupportedModel(f"{tensor.name} has shape {tensor.shape}, heads {config.head_dim} channels", "")
            rows = np.arange(tensor.shape[0]).reshape(-1, half, 2).transpose(0, 2, 1).reshape(-1)
            weights[name] = tensor.take_rows(rows)


def pairs_side_by_side(tensor: StoredTensor, head_dim: int) -> StoredTensor:
    """A q or k (weights or bias) of ours with its rows as GGUF stores Llama's."""
    rows = np.arange(tensor.shape[0]).reshape(-1, 2, head_dim // 2).transpose(0, 2, 1).reshape(-1)
    return tensor.take_rows(rows)


def _plus_one(tensor: StoredTensor) -> StoredTensor:
    return dense(tensor, tensor.to_float32() + np.float32(1))


def _transpose(tensor: StoredTensor) -> StoredTensor:
    return dense(tensor, np.ascontiguousarray(tensor.to_float32().T))


def _without_middle(tensor: StoredTensor) -> StoredTensor:
    """A depthwise convolution's (channels, 1, taps) → (channels, taps)."""
    fits = len(tensor.shape) == 3 and tensor.shape[1] == 1
    return replace(tensor, shape=(tensor.shape[0], tensor.shape[2])) if fits else tensor


def dense(tensor: StoredTensor, values: Floats) -> StoredTensor:
    """The same tensor with other values, held in memory as float32."""
    rows, columns = fold(values.shape)
    return StoredTensor(tensor.name, "F32", values.shape, values.view(np.uint8).reshape(rows, 4 * columns))


class WeightsToPlace:
    """Weights that are still to be used; every one must be, and must have the shape that the config implies."""

    def __init__(self, weights: Mapping[str, StoredTensor]) -> None:
        self._left = dict(weights)

    def take(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        if name not in self._left:
            raise UnsupportedModel(f"the file has no weight for {name}", "It is incomplete, or another architecture.")
        stored = self._left.pop(name)
        if stored.shape != shape:
            raise UnsupportedModel(
                f"{stored.name} has shape {stored.shape}, {shape} is needed for {name}",
                "Config and weights do not belong together.",
            )
        return stored

    def require_none_left(self) -> None:
        if self._left:
            raise UnsupportedModel(
                f"nothing uses the weights {', '.join(list(self._left)[:5])}", "It is another architecture."
            )
