"""Files of Qwen3.5 models: both layouts of config and names, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from heedful.engine.torch_runner import build_hybrid
from heedful.errors import UnsupportedModel
from heedful.models.carried import Carried
from heedful.models.config import DeltaNet, ModelConfig, config_from_hf
from heedful.weights import names
from heedful.weights.safetensors_file import read_safetensors

GOLDEN = Path(__file__).parent.parent / "golden" / "qwen3_5" / "lm"
CONFIG = json.loads((GOLDEN / "config.json").read_text())


def logits_of(folder: Path, config: ModelConfig) -> torch.Tensor:
    decoder = build_hybrid(config, names.from_hf(read_safetensors(folder), config))
    ids = torch.from_numpy(load_file(GOLDEN / "golden.safetensors")["input_ids_64"][0]).long()
    carried = Carried(config)
    with torch.inference_mode():
        return decoder.logits(decoder(ids, torch.arange(64), carried, carried))


def test_the_released_layout(tmp_path: Path) -> None:
    """Text keys nested, tensors with a prefix, others' towers beside them; the outer config ties the head."""
    inner = {key: value for key, value in CONFIG.items() if key != "tie_word_embeddings"}
    config = config_from_hf({"model_type": "qwen3_5", "text_config": inner, "tie_word_embeddings": True})
    assert config == config_from_hf(CONFIG)
    tensors = load_file(GOLDEN / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model."): x for name, x in tensors.items()}
    others = {
        name: np.ones(3, dtype=np.float32) for name in ("model.visual.merger.norm.bias", "mtp.layers.0.fc.weight")
    }
    save_file({**renamed, **others}, tmp_path / "model.safetensors")
    recorded = torch.from_numpy(load_file(GOLDEN / "golden.safetensors")["logits_64"][0])
    assert (logits_of(tmp_path, config) - recorded).abs().max() < 2e-4


def test_a_head_of_its_own(tmp_path: Path) -> None:
    config = config_from_hf({**CONFIG, "tie_word_embeddings": False})
    tensors = load_file(GOLDEN / "model.safetensors")
    save_file({**tensors, "lm_head.weight": -tensors["model.embed_tokens.weight"]}, tmp_path / "model.safetensors")
    recorded = torch.from_numpy(load_file(GOLDEN / "golden.safetensors")["logits_64"][0])
    assert (logits_of(tmp_path, config) + recorded).abs().max() < 2e-4


def test_sizes_as_numbers() -> None:
    config = config_from_hf(CONFIG)
    assert config.delta == DeltaNet((0, 1, 2), key_heads=2, value_heads=4, key_dim=16, value_dim=24, conv_len=4)
    assert (config.num_layers, config.windows, config.delta_layers) == (4, (None,), (0, 1, 2))
    assert config.rope is not None
    assert config.rope.rotary_dim == 8
    assert config.state_bytes == 4 * 3 * (3 * 160 + 4 * 16 * 24)  # rows and S of three layers
    matrices = {n: x for n, x in load_file(GOLDEN / "model.safetensors").items() if x.ndim > 1 and "embed" not in n}
    assert config.linear_weights == sum(x.size for x in matrices.values())


def test_older_files_have_rotary_keys_beside_each_other() -> None:
    flat = {key: value for key, value in CONFIG.items() if key != "rope_parameters"}
    assert config_from_hf({**flat, "rope_theta": 10000.0}) == config_from_hf(CONFIG)  # a quarter is the default
    whole = config_from_hf({**flat, "rope_theta": 10000.0, "partial_rotary_factor": 1.0}).rope
    assert whole is not None
    assert whole.rotary_dim == 32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "do not fit 4 layers"),
        ({"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}, "sliding_attention"),
        ({"layer_types": ["linear_attention"] * 4}, "no layer of this model is attention"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval"),
        ({"linear_num_value_heads": 3}, "3 value heads cannot share 2"),
        ({"linear_num_key_heads": 0}, "key_heads"),
        ({"linear_key_head_dim": 2**31}, "key_dim"),
        ({"linear_value_head_dim": "24"}, "value_dim"),
        ({"linear_conv_kernel_dim": True}, "conv_len"),
        ({"attention_bias": True}, "biases"),
        ({"attn_output_gate": False}, "output gates"),
        ({"hidden_act": "gelu"}, "silu"),
        ({"head_dim": 30}, "7 rotary channels"),
    ],
)
def test_values_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        config_from_hf({**CONFIG, **fields})


@pytest.mark.parametrize("key", ["linear_num_key_heads", "linear_conv_kernel_dim", "intermediate_size"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(UnsupportedModel, match=key):
        config_from_hf({k: v for k, v in CONFIG.items() if k != key})


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.layers.3.self_attn.q_proj.weight", (128, 64), "256 rows are needed"),
        ("model.layers.0.linear_attn.conv1d.weight", (160, 4, 1), "conv1d"),
        ("model.layers.0.linear_attn.A_log", (2,), "A_log"),
        ("model.layers.0.linear_attn.norm.weight", (64,), "norm"),
        ("model.layers.0.self_attn.k_proj.weight", (64, 64), "nothing uses"),
        ("model.layers.0.linear_attn.in_proj.weight", (4, 4), "has no place"),
    ],
)
def test_weights_that_do_not_fit(tmp_path: Path, name: str, shape: tuple[int, ...], message: str) -> None:
    tensors = load_file(GOLDEN / "model.safetensors")
    save_file({**tensors, name: np.zeros(shape, dtype=np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=message):
        logits_of(tmp_path, config_from_hf(CONFIG))


def test_other_families_do_not_ignore_what_only_this_one_has(tmp_path: Path) -> None:
    llama = config_from_hf({**CONFIG, "model_type": "llama"})
    save_file({"mtp.fc.weight": np.zeros((2, 2), dtype=np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="mtp"):
        names.from_hf(read_safetensors(tmp_path), llama)
