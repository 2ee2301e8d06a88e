"""Configs of strangers: what does not fit is an UnsupportedModel that names it, before anything is built."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from heedful import LLM
from heedful.errors import HeedfulError, UnsupportedModel
from heedful.models.config import ModelConfig, config_from_gguf, config_from_hf
from heedful.testing import make_tiny_model

LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}


def changed(**fields: Any) -> ModelConfig:
    return config_from_hf({**LLAMA, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"hidden_size": -64}, "hidden_size|head_dim"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"head_dim": 2**40}, "head_dim"),
        ({"partial_rotary_factor": 4.0}, "64 rotary channels do not fit heads of 16"),
        ({"head_dim": 9}, "9 rotary channels do not fit heads of 9"),
        ({"rope_theta": 0}, "rotary base"),
        ({"rope_theta": float("nan")}, "rotary base"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -1}}, "factor"),
        ({"hidden_act": "relu6"}, "relu6"),
        ({"rms_norm_eps": -1e-5}, "norm eps"),
        ({"attn_logit_softcapping": float("inf")}, "caps"),
        ({"sliding_window": 8, "layer_types": ["sliding_attention"]}, "do not fit 2 layers"),
    ],
)
def test_values_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        changed(**fields)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(UnsupportedModel, match="intermediate_size"):
        config_from_hf({k: v for k, v in LLAMA.items() if k != "intermediate_size"})


@pytest.mark.parametrize("value", ["x", None, [], {}, [1, 2], 1e400, float("nan"), -1, 0, True, 2**70, "32"])
@pytest.mark.parametrize("key", [*LLAMA, "rope_theta", "rope_scaling", "sliding_window", "layer_types", "head_dim"])
def test_no_value_of_any_key_leads_to_anything_but_an_answer_or_a_named_error(
    tmp_path: Path, key: str, value: Any
) -> None:
    folder = make_tiny_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    with suppress(HeedfulError):
        assert len(LLM(str(folder)).generate("hello", max_tokens=2).token_ids) <= 2


def test_a_window_as_wide_as_the_context_is_none() -> None:
    assert changed(model_type="mistral", sliding_window=255).windows == (255, 255)
    assert changed(model_type="mistral", sliding_window=256).windows == (None, None)
    assert changed(model_type="mistral", sliding_window=2**31 - 1).windows == (None, None)


def test_a_soft_cap_of_zero_is_none() -> None:
    assert changed(attn_logit_softcapping=0.0).attention_softcap is None


def test_gguf_yarn_without_its_original_length_takes_the_context_as_that() -> None:
    metadata = {
        "general.architecture": "qwen2",
        "qwen2.block_count": 1,
        "qwen2.context_length": 128,
        "qwen2.embedding_length": 32,
        "qwen2.feed_forward_length": 64,
        "qwen2.attention.head_count": 2,
        "qwen2.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
    }
    rope = config_from_gguf(metadata, {"token_embd.weight": (96, 32)}).rope
    assert rope is not None
    assert rope.original_context_len == 128
    assert rope.inv_freq().shape == (8,)
