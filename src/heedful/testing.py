"""A tiny model for tests: random weights and a byte tokenizer, written as files that the ordinary path loads.

    make_tiny_model(tmp_path)
    LLM(str(tmp_path)).generate("hello", max_tokens=5)
    make_tiny_adapter(tmp_path / "adapter")         # of that model

It answers nonsense, but always the same nonsense for the same seed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from heedful.cache.pages import KVCache, plain_layout
from heedful.request import KV_ROW_BYTES, KVFormat

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def plain_cache(
    windows: tuple[int | None, ...], kv_heads: int, head_dim: int, *, capacity_tokens: int, default: str = "f32"
) -> KVCache:
    """A cache for a fake runner: every number format, rows one after another."""
    return KVCache(
        windows,
        kv_heads,
        head_dim,
        lambda form: plain_layout(form, kv_heads, head_dim),
        default=KVFormat.parse(default),
        numbers=tuple(KV_ROW_BYTES),
        capacity_tokens=capacity_tokens,
    )


def make_tiny_model(
    folder: Path, *, seed: int = 0, context_len: int = 512, sliding_window: int | None = None, chat: bool = True
) -> Path:
    """Write config.json, model.safetensors and tokenizer files of a two-layer Mistral into `folder`; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "mistral",
        "vocab_size": 256 + len(SPECIAL_TOKENS),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": context_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": sliding_window,
        "tie_word_embeddings": True,
        "eos_token_id": 256 + SPECIAL_TOKENS.index("<|im_end|>"),
    }
    _write_json(folder / "config.json", config)
    _write_weights(folder / "model.safetensors", config, np.random.default_rng(seed))
    _write_tokenizer(folder, CHAT_TEMPLATE if chat else None)
    return folder


def make_tiny_adapter(folder: Path, *, seed: int = 1, rank: int = 4) -> Path:
    """Write a LoRA adapter of the tiny model into `folder`, in PEFT's layout; returns it. With it the model answers
    something else."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(2):
        for name, (out, width) in {"self_attn.q_proj": (32, 32), "mlp.down_proj": (32, 64)}.items():
            stem = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{stem}.lora_A.weight"] = rng.normal(0, 0.5, (rank, width)).astype("<f4")
            tensors[f"{stem}.lora_B.weight"] = rng.normal(0, 0.5, (out, rank)).astype("<f4")
    (folder / "adapter_model.safetensors").write_bytes(_safetensors(tensors))
    targets = ["q_proj", "down_proj"]
    _write_json(
        folder / "adapter_config.json",
        {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "target_modules": targets},
    )
    return folder


def _write_weights(path: Path, config: dict[str, Any], rng: np.random.Generator) -> None:
    hidden, mlp, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        shapes.update({f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()})
    # wide enough that logits and attention are far from uniform
    tensors = {
        name: rng.normal(0, 2 / shape[-1] ** 0.5, shape).astype("<f4") if len(shape) == 2 else np.ones(shape, "<f4")
        for name, shape in shapes.items()
    }
    path.write_bytes(_safetensors(tensors))


def _safetensors(tensors: dict[str, Any]) -> bytes:
    header, end = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [end, end + values.nbytes]}
        end += values.nbytes
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(values.tobytes() for values in tensors.values())


def _write_tokenizer(folder: Path, chat_template: str | None) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "add_bos_token": False}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
