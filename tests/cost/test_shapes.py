"""The table of known models against published parameter counts and the real files; windows spread over layers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from heedful.cost.formulas import Shape
from heedful.cost.shapes import KNOWN, Dimensions, local_global
from heedful.models.config import config_from_hf
from heedful.weights.load import load_config
from heedful.weights.source_names import ALIASES


def test_every_alias_is_known() -> None:
    assert set(KNOWN) == set(ALIASES)


def weights(alias: str) -> int:
    shape = KNOWN[alias].shape()
    assert shape.linear_weights is not None
    assert shape.head_weights is not None
    return shape.linear_weights + shape.head_weights


def test_published_parameter_counts() -> None:
    """All parameters as the model cards' safetensors headers say, less those that are no matrices of every token."""
    assert weights("smollm2") == 134_515_008 - 61 * 576  # norms: two a layer and the last
    assert weights("gemma3-270m") == 268_098_176 - 18 * (4 * 640 + 2 * 256) - 640  # norms, and those of q and k
    embeddings = (30_522 + 512 + 2) * 384 + 2 * 384
    biases_and_norms = 6 * (4 * 384 + 1536 + 384 + 4 * 384)
    pooler = 384 * 384 + 384
    assert weights("minilm") == 22_713_216 - embeddings - biases_and_norms - pooler


def test_smollm2_is_as_its_file_says(smollm2_path: Path) -> None:
    assert KNOWN["smollm2"].shape() == Shape.from_config(load_config(smollm2_path))
    assert KNOWN["smollm2"].context_len == load_config(smollm2_path).context_len


def test_gemma_is_as_its_file_says(gemma_path: Path) -> None:
    assert KNOWN["gemma3-270m"].shape() == Shape.from_config(load_config(gemma_path))
    assert KNOWN["gemma3-270m"].context_len == load_config(gemma_path).context_len


@pytest.mark.parametrize("name", ["gemma3_text", "gpt2_mha", "llama_gqa", "mistral_swa16", "qwen3_qknorm"])
def test_dimensions_and_config_give_the_same_shape(golden: Path, name: str) -> None:
    config = config_from_hf(json.loads((golden / f"tiny_decoders/{name}/config.json").read_text()))
    assert Dimensions.from_config(config).shape() == Shape.from_config(config)


def test_local_and_global_layers() -> None:
    decoder = Dimensions(layers=20, heads=4, windows=local_global(512, 5, causal=True))
    assert dict(decoder.shape().windows) == {512: 17, None: 3}  # layers 6, 12 and 18 are global
    encoder = Dimensions(layers=22, heads=12, windows=local_global(128, 2, causal=False), causal=False)
    assert dict(encoder.shape().windows) == {None: 8, 128: 14}  # ModernBERT base: layers 0, 3, ... 21 are global
    huge = Dimensions(layers=10**18, heads=1, windows=local_global(512, 10**17 - 1, causal=True))
    assert dict(huge.shape().windows) == {512: 10**18 - 10, None: 10}


def test_unknown_numbers_leave_unknown_weights() -> None:
    known = KNOWN["smollm2"]
    assert replace(known, intermediate=None).shape().linear_weights is None
    assert replace(known, vocab=None).shape().head_weights is None
    assert Dimensions(layers=2, heads=2).shape() == Shape(2, 2, windows=((None, 2),))
