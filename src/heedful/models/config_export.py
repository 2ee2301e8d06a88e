"""A ModelConfig as others write it: Hugging Face's config.json, and the keys of a GGUF file.

What such a file cannot say is refused by name, twice: by what is known of its readers, and by reading what was written
with config.py and comparing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from math import isclose
from typing import Any

import numpy as np

from heedful.errors import CannotExport
from heedful.models.config import ModelConfig, config_from_gguf, config_from_hf
from heedful.models.rope import Rope

HF_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
GGUF_ARCHITECTURES = {family: family for family in HF_CLASSES} | {"mistral": "llama"}
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu"}
_GEMMA_PERIOD = 6
"""Where no pattern is written, llama.cpp gives every sixth layer of Gemma 3 the whole context."""
_LLAMA3 = Rope(128, scaling="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_context_len=8192)
"""Of Llama 3.1 to 3.3; size, base and factor are a model's own."""


# ---- Hugging Face


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """config.json for transformers 4 and 5, without dtype and token ids. Raises CannotExport."""
    where = "config.json"
    if config.family not in HF_CLASSES:
        raise CannotExport(f"models of the family {config.family} are not written", _known(HF_CLASSES))
    if config.family == "llama" and any(config.windows):
        raise _refusal(where, "llama", "windows", config.windows)
    written = {
        "architectures": [HF_CLASSES[config.family]],
        "model_type": "gemma3_text" if config.family == "gemma3" else config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.context_len,
        "rms_norm_eps": float(str(np.float32(config.norm_eps))),  # 1e-06, also where a GGUF file had it in 32 bits
        "hidden_act": _ACTIVATIONS[config.activation],
        "attention_bias": config.out_bias,
        "tie_word_embeddings": config.tied_head,
        **_hf_windows(config),
        **_hf_rope(config),
        **_hf_of_family(config),
    }
    _compare(where, config, config_from_hf(written))
    return written


def _hf_of_family(config: ModelConfig) -> dict[str, Any]:
    if config.family == "gemma3":
        scalar = config.query_scale**-2
        return {
            "hidden_activation": _ACTIVATIONS[config.activation],
            "query_pre_attn_scalar": round(scalar) if isclose(scalar, round(scalar), rel_tol=1e-9) else scalar,
            "attn_logit_softcapping": config.attention_softcap,
            "final_logit_softcapping": config.logit_softcap,
        }
    if config.family == "phi3":
        return {"original_max_position_embeddings": _original_context_len(config)}
    return {"mlp_bias": config.mlp_bias} if config.family == "llama" else {}


def _original_context_len(config: ModelConfig) -> int:
    return (config.rope.original_context_len if config.rope else 0) or config.context_len


def _hf_windows(config: ModelConfig) -> dict[str, Any]:
    window = _one_window("config.json", config)
    kinds = ["full_attention" if one is None else "sliding_attention" for one in config.windows]
    if config.family in ("mistral", "phi3"):
        if window is not None and None in config.windows:
            raise _refusal("config.json", config.family, "windows in some layers", config.windows)
        return {"sliding_window": window}
    if config.family == "gemma3":
        return {"sliding_window": window or config.context_len, "layer_types": kinds}
    if config.family in ("qwen2", "qwen3"):
        used = {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": kinds}
        return {**used, "max_window_layers": kinds.count("full_attention") if window is None else 0}
    return {}


def _hf_rope(config: ModelConfig) -> dict[str, Any]:
    rope = config.rope
    assert rope is not None, config
    if rope.rotary_dim != config.head_dim and config.family != "phi3":
        raise _refusal("config.json", config.family, "rotary channels", rope.rotary_dim)
    full = _rope_parameters(_named(rope), config)
    scaling = {} if full["rope_type"] == "default" else {"rope_scaling": full}
    as_before = {"rope_theta": rope.theta, **scaling}  # transformers 4
    if config.family == "phi3":
        as_before["partial_rotary_factor"] = full["partial_rotary_factor"]
    if config.family != "gemma3":
        return {"rope_parameters": full, **as_before}
    local = config.rope_local or rope
    parameters = {"full_attention": full, "sliding_attention": _rope_parameters(local, config)}
    return {"rope_parameters": parameters, **as_before, "rope_local_base_freq": local.theta}


def _rope_parameters(rope: Rope, config: ModelConfig) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": rope.scaling, "rope_theta": rope.theta}
    if config.family == "phi3":
        found["partial_rotary_factor"] = rope.rotary_dim / config.head_dim
    if rope.scaling == "default":
        return found
    found["factor"] = rope.factor
    if rope.scaling == "linear":
        return found
    found["original_max_position_embeddings"] = rope.original_context_len
    if rope.scaling == "llama3":
        return {**found, "low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    more = {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
    return {**found, **more, **({} if rope.attention_factor is None else {"attention_factor": rope.attention_factor})}


def _named(rope: Rope) -> Rope:
    """With a kind of scaling that has a name, where a GGUF file has given a divisor for each frequency."""
    if not rope.freq_divisors:
        return rope
    plain = replace(rope, freq_divisors=())
    named = replace(_LLAMA3, rotary_dim=rope.rotary_dim, theta=rope.theta, factor=max(rope.freq_divisors))
    for candidate in (plain, named):
        if np.allclose(candidate.inv_freq(), rope.inv_freq(), rtol=1e-5, atol=0):
            return candidate
    raise CannotExport(
        "config.json cannot say by what this model divides its rotary frequencies: it is not Llama 3's way",
        "Export it as GGUF.",
    )


# ---- GGUF


def gguf_keys(config: ModelConfig) -> dict[str, Any]:
    """The keys of a GGUF file that llama.cpp builds the model from. Raises CannotExport for what llama.cpp does not
    compute, even where it would load the file.
    """
    arch = GGUF_ARCHITECTURES.get(config.family)
    if arch is None:
        raise CannotExport(f"models of the family {config.family} are not written", _known(GGUF_ARCHITECTURES))
    _require_of_llama_cpp(config, arch)
    rope = config.rope
    assert rope is not None, config
    of_model = {
        "vocab_size": config.vocab_size,
        "context_length": config.context_len,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.dimension_count": rope.rotary_dim,
        "rope.freq_base": rope.theta,
        **_gguf_scaling(rope),
        **(_gguf_windows(config) if arch == "gemma3" else {}),
    }
    if arch == "phi3":
        of_model["rope.scaling.original_context_length"] = _original_context_len(config)
    if config.logit_softcap is not None:
        of_model["final_logit_softcapping"] = config.logit_softcap
    keys = {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in of_model.items()}}
    read = replace(config_from_gguf(keys, _gguf_shapes(config)), family=config.family)
    if (divisors := freq_divisors(config)) is not None:  # in a tensor
        read = replace(read, rope=replace(Rope(rope.rotary_dim, rope.theta), freq_divisors=tuple(divisors.tolist())))
    _compare("a GGUF file", config, read)
    return keys


def freq_divisors(config: ModelConfig) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    """What GGUF's tensor rope_freqs.weight holds: how Llama 3's scaling is stored there. (rotary_dim / 2,)."""
    rope = config.rope
    if rope is None or not (rope.freq_divisors or rope.scaling == "llama3"):
        return None
    plain = replace(rope, scaling="default", freq_divisors=())
    return (plain.inv_freq() / rope.inv_freq()).astype(np.float32)


def _require_of_llama_cpp(config: ModelConfig, arch: str) -> None:
    where, rope, default_scale = "a GGUF file", config.rope, config.head_dim**-0.5
    assert rope is not None, config
    largest_gemma = arch == "gemma3" and config.num_layers == 62
    scale = (config.hidden_size / config.num_heads) ** -0.5 if largest_gemma else default_scale
    yarn = (rope.beta_fast, rope.beta_slow, rope.truncate, rope.attention_factor)
    wrong = {
        "windows": any(config.windows) and arch != "gemma3" and config.windows,
        "query scale": not isclose(config.query_scale, scale, rel_tol=1e-6) and config.query_scale,
        "attention's soft cap": config.attention_softcap,
        "logits' soft cap": arch != "gemma3" and config.logit_softcap,
        "rotary channels": rope.rotary_dim != config.head_dim and arch != "phi3" and rope.rotary_dim,
        "Llama 3's rotary scaling": freq_divisors(config) is not None and arch != "llama" and rope.scaling,
        "yarn with settings of its own": rope.scaling == "yarn" and yarn != (32.0, 1.0, True, None) and yarn,
        "biases": (config.out_bias or config.mlp_bias or config.qkv_bias)
        and arch not in ("llama", *(["qwen2"] if not config.out_bias else [])),
        "head channels": arch == "qwen2"
        and config.num_heads * config.head_dim != config.hidden_size
        and config.head_dim,
    }
    for what, value in wrong.items():
        if value:
            raise _refusal(where, arch, what, value)


def _gguf_scaling(rope: Rope) -> dict[str, Any]:
    if rope.scaling not in ("linear", "yarn"):
        return {}
    found = {"rope.scaling.type": rope.scaling, "rope.scaling.factor": rope.factor}
    if rope.scaling == "yarn":
        found["rope.scaling.original_context_length"] = rope.original_context_len
    return found


def _gguf_windows(config: ModelConfig) -> dict[str, Any]:
    window = _one_window("a GGUF file", config)
    local = config.rope_local or config.rope
    assert local is not None, config
    keys: dict[str, Any] = {"rope.freq_base_swa": local.theta}
    if window is None:
        return keys
    keys["attention.sliding_window"] = window
    usual = tuple(None if (layer + 1) % _GEMMA_PERIOD == 0 else window for layer in range(config.num_layers))
    if config.windows != usual:
        keys["attention.sliding_window_pattern"] = np.array([one is not None for one in config.windows])
    return keys


def _gguf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Those that config_from_gguf looks at."""
    there = {
        "token_embd.weight": True,
        "output.weight": not config.tied_head,
        "blk.0.attn_q_norm.weight": config.qk_norm,
        "blk.0.attn_q.bias": config.qkv_bias,
        "blk.0.attn_output.bias": config.out_bias,
        "blk.0.ffn_down.bias": config.mlp_bias,
    }
    return {name: (config.vocab_size, config.hidden_size) for name, is_there in there.items() if is_there}


# ---- both


def _one_window(where: str, config: ModelConfig) -> int | None:
    widths = {window for window in config.windows if window is not None}
    if len(widths) > 1:
        raise _refusal(where, config.family, "windows of several widths", sorted(widths))
    return max(widths, default=None)


def _compare(where: str, wanted: ModelConfig, found: ModelConfig) -> None:
    """Raises CannotExport, naming the first thing that would be read otherwise."""
    for field in fields(ModelConfig):
        if field.name in ("rope", "rope_local"):
            continue
        ours, theirs = getattr(wanted, field.name), getattr(found, field.name)
        same = isclose(ours, theirs, rel_tol=1e-6) if isinstance(ours, float) and theirs is not None else ours == theirs
        if not same:
            raise _refusal(where, wanted.family, field.name, ours)
    for layer in range(len(wanted.windows)):
        ours, theirs = wanted.rope_of(layer), found.rope_of(layer)
        if ours is None or theirs is None or not _turn_alike(ours, theirs):
            raise _refusal(where, wanted.family, f"rotary positions of layer {layer}", ours)


def _turn_alike(a: Rope, b: Rope) -> bool:
    same_size = a.rotary_dim == b.rotary_dim and isclose(a.attention_scaling, b.attention_scaling, rel_tol=1e-6)
    return same_size and np.allclose(a.inv_freq(), b.inv_freq(), rtol=1e-5, atol=0)


def _refusal(where: str, family: str, what: str, value: Any) -> CannotExport:
    other = "gguf" if where == "config.json" else "hf"
    return CannotExport(
        f"{where} of a {family} model has no place for its {what} ({str(value)[:100]})", f"Try --to {other}."
    )


def _known(families: Mapping[str, str]) -> str:
    return "Those that are: " + ", ".join(families) + "."
