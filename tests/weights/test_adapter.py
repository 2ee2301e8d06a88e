"""An adapter and its base: what fits, what is refused when it is loaded, and what tells two of them apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from heedful.errors import SafetensorsError, SourceError, UnsupportedModel
from heedful.models.config import ModelConfig, config_from_hf
from heedful.weights import names
from heedful.weights.adapter import load_adapter, merged_weights
from heedful.weights.names import Weights
from heedful.weights.safetensors_file import read_safetensors

GOLDEN = Path(__file__).parent.parent / "golden"
LAYER = "base_model.model.model.layers.1.self_attn.q_proj"


@cache
def base(family: str = "llama_gqa") -> tuple[ModelConfig, Weights]:
    folder = GOLDEN / "tiny_decoders" / family
    config = config_from_hf(json.loads((folder / "config.json").read_text()))
    return config, names.from_hf(read_safetensors(folder), config)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copytree(GOLDEN / "adapters" / "llama_all", tmp_path / "it")


def change(folder: Path, edit: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


def test_the_scale_is_in_b(folder: Path) -> None:
    """alpha / r = 8 / 4."""
    adapter = load_adapter(str(folder), *base())
    stored = load_file(folder / "adapter_model.safetensors")
    update = adapter.updates["layers.1.attn.q.weight"]
    assert np.array_equal(update.a, stored[f"{LAYER}.lora_A.weight"])
    assert np.array_equal(update.b, 2 * stored[f"{LAYER}.lora_B.weight"])
    assert (update.scale, update.rank, update.shape) == (1.0, 4, (128, 64))


def test_its_files_stand_for_their_folder(folder: Path) -> None:
    whole = load_adapter(str(folder), *base())
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert load_adapter(str(folder / name), *base()).sha256 == whole.sha256


def test_any_number_and_any_scale_make_it_another_one(folder: Path) -> None:
    first = load_adapter(str(folder), *base()).sha256
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "lora_alpha": 9}))
    scaled = load_adapter(str(folder), *base()).sha256
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "lora_dropout": 0.5}))
    assert load_adapter(str(folder), *base()).sha256 == first
    change(folder, lambda tensors: tensors[f"{LAYER}.lora_A.weight"].__setitem__((3, 63), 0.125))
    moved = load_adapter(str(folder), *base()).sha256
    assert len({first, scaled, moved}) == 3


@pytest.mark.parametrize("family", ["mistral_swa16", "qwen3_qknorm", "phi3_fused", "gpt2_mha"])
def test_an_adapter_of_another_base_is_refused(folder: Path, family: str) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        load_adapter(str(folder), *base(family))
    assert refused.value.remedy


def test_layers_that_the_base_has_not_are_named(folder: Path) -> None:
    def deeper(tensors: dict[str, np.ndarray]) -> None:
        for side in "AB":
            name = f"{LAYER}.lora_{side}.weight"
            tensors[name.replace("layers.1", "layers.7")] = tensors.pop(name)

    change(folder, deeper)
    with pytest.raises(UnsupportedModel, match=r"no matrices layers\.7\.attn\.q\.weight"):
        load_adapter(str(folder), *base())


def test_an_embedding_is_no_product(folder: Path) -> None:
    def embedding(tensors: dict[str, np.ndarray]) -> None:
        stem = "base_model.model.model.embed_tokens"
        tensors[f"{stem}.lora_A.weight"] = np.zeros((4, 64), np.float32)
        tensors[f"{stem}.lora_B.weight"] = np.zeros((96, 4), np.float32)

    change(folder, embedding)
    with pytest.raises(UnsupportedModel, match=r"updates embed\.weight"):
        load_adapter(str(folder), *base())


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_that_are_none_are_refused(folder: Path, number: float) -> None:
    change(folder, lambda tensors: tensors[f"{LAYER}.lora_B.weight"].__setitem__((3, 2), number))
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.attn\.q\.weight has numbers that are not finite"):
        load_adapter(str(folder), *base())


def test_a_copy_of_a_base_matrix_is_named(folder: Path) -> None:
    name = "base_model.model.lm_head.base_layer.weight"
    change(folder, lambda tensors: tensors.update({name: np.zeros((96, 64), np.float32)}))
    with pytest.raises(UnsupportedModel, match="base_layer") as refused:
        load_adapter(str(folder), *base())
    assert "save_embedding_layers=False" in refused.value.remedy


def test_what_is_no_adapter_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no adapter is at 'nowhere'"):
        load_adapter("nowhere", *base())
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(SourceError, match=r"has no adapter_model\.safetensors") as refused:
        load_adapter(str(folder), *base())
    assert "pickled" in refused.value.remedy
    (folder / "adapter_config.json").unlink()
    with pytest.raises(SourceError, match=r"has no adapter_config\.json"):
        load_adapter(str(folder), *base())


def test_a_cut_file_is_damaged(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SafetensorsError):
        load_adapter(str(folder), *base())


def test_merging_adds_up_in_float64_too() -> None:
    config, weights = base()
    adapter = load_adapter(str(GOLDEN / "adapters" / "llama_patterns"), config, weights)
    merged = merged_weights(weights, adapter)
    for name, update in adapter.updates.items():
        expected = weights[name].to_float32().astype(np.float64) + update.b.astype(np.float64) @ update.a
        assert np.abs(merged[name].to_float32() - expected).max() < 1e-5
        assert merged[name].format_name == "F32"


def test_weights_of_another_base_are_not_merged() -> None:
    adapter = load_adapter(str(GOLDEN / "adapters" / "llama_all"), *base())
    with pytest.raises(UnsupportedModel, match=r"no matrices head\.weight"):
        merged_weights(base("qwen3_qknorm")[1], adapter)
