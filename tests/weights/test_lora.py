"""LoRA adapters: the sum worked out in float64, foreign layouts, and everything that such a sum cannot say refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from heedful.errors import HeedfulError, SourceError, UnsupportedModel
from heedful.models.config import ModelConfig, config_from_hf
from heedful.weights.lora import read_lora

GOLDEN = Path(__file__).parent.parent / "golden" / "decisions" / "kev"
CONFIG = config_from_hf(json.loads((GOLDEN / "base" / "config.json").read_text()))
PREFIX = "base_model.model.layers.1.self_attn.q_proj"


@dataclass
class Adapter:
    """What is written to a folder, to be spoilt before."""

    settings: dict[str, Any]
    tensors: dict[str, np.ndarray]

    def write(self, folder: Path) -> Path:
        (folder / "adapter_config.json").write_text(json.dumps(self.settings))
        save_file(self.tensors, folder / "adapter_model.safetensors")
        return folder


@pytest.fixture
def adapter() -> Adapter:
    folder = GOLDEN / "adapter"
    return Adapter(
        json.loads((folder / "adapter_config.json").read_text()), load_file(folder / "adapter_model.safetensors")
    )


def slots_of(config: ModelConfig) -> dict[str, np.ndarray]:
    """Zero matrices by our names, with the shapes that the config implies."""
    d, heads, kv = config.hidden_size, config.num_heads * config.head_dim, config.kv_channels
    wide = config.intermediate_size
    shapes = {"attn.q": (heads, d), "attn.k": (kv, d), "attn.v": (kv, d), "attn.out": (d, heads)}
    shapes |= {"mlp.gate": (wide, d), "mlp.up": (wide, d), "mlp.down": (d, wide)}
    layers = range(config.num_layers)
    return {f"layers.{i}.{name}.weight": np.zeros(s, np.float32) for i in layers for name, s in shapes.items()}


def test_every_matrix_gets_scale_times_b_times_a(adapter: Adapter, tmp_path: Path) -> None:
    """alpha / r = 8 / 4; products in float64."""
    slots = slots_of(CONFIG)
    slots["layers.1.attn.q.weight"] += 3
    read_lora(adapter.write(tmp_path), CONFIG).merge_into(slots.items())
    theirs = {"attn.q": "self_attn.q_proj", "mlp.down": "mlp.down_proj", "attn.v": "self_attn.v_proj"}
    for ours, name in theirs.items():
        of_layer = f"base_model.model.layers.1.{name}"
        a, b = (adapter.tensors[f"{of_layer}.lora_{side}.weight"].astype(np.float64) for side in "AB")
        expected = 2.0 * np.einsum("or,ri->oi", b, a) + (3 if ours == "attn.q" else 0)
        assert np.abs(slots[f"layers.1.{ours}.weight"] - expected).max() < 1e-6
        assert np.abs(expected).max() > 0.05
    assert all(np.abs(slot).max() > 0 for slot in slots.values())


def test_an_adapter_of_the_whole_language_model_is_read_too(adapter: Adapter, tmp_path: Path) -> None:
    inner = read_lora(GOLDEN / "adapter", CONFIG)
    adapter.tensors = {name.replace("model.layers", "model.model.layers"): t for name, t in adapter.tensors.items()}
    whole = read_lora(adapter.write(tmp_path), CONFIG)
    assert {n: u.shape for n, u in whole.updates.items()} == {n: u.shape for n, u in inner.updates.items()}


def test_the_update_of_a_fused_matrix_is_split_as_the_matrix_is(adapter: Adapter, tmp_path: Path) -> None:
    """Phi-3 has q, k and v in one, of 64 + 32 + 32 rows here."""
    config = replace(CONFIG, family="phi3")
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(4, 64)).astype(np.float32), rng.normal(size=(128, 4)).astype(np.float32)
    fused = "base_model.model.model.layers.0.self_attn.qkv_proj"
    adapter.tensors = {f"{fused}.lora_A.weight": a, f"{fused}.lora_B.weight": b}
    slots = slots_of(config)
    read_lora(adapter.write(tmp_path), config).merge_into(slots.items())
    parts = [slots[f"layers.0.attn.{name}.weight"] for name in "qkv"]
    assert np.abs(np.concatenate(parts) - 2 * b.astype(np.float64) @ a).max() < 1e-5


def _set(**values: Any) -> Callable[[Adapter], None]:
    return lambda adapter: adapter.settings.update(values)


def _put(name: str, array: Any) -> Callable[[Adapter], None]:
    return lambda adapter: adapter.tensors.update({name: np.asarray(array)})


def _drop(name: str) -> Callable[[Adapter], None]:
    return lambda adapter: adapter.tensors.__delitem__(name)


F32 = np.float32
SPOILT: dict[str, tuple[Callable[[Adapter], None], str]] = {
    "another kind": (_set(peft_type="LOHA"), "of the kind 'LOHA'"),
    "dora": (_set(use_dora=True), "use_dora"),
    "one that comes later": (_set(use_nextlora=True), "use_nextlora"),
    "its settings": (_set(nextlora_config={"depth": 2}), "nextlora_config"),
    "bias": (_set(bias="all"), "bias 'all'"),
    "bias of B": (_set(lora_bias=True), "lora_bias"),
    "another rank by layer": (_set(rank_pattern={"q_proj": 8}), r"shapes \(4, 64\) and \(64, 4\), of rank 8"),
    "no rank by layer": (_set(rank_pattern={"q_proj": "8"}), "r '8', which is no rank"),
    "no alpha by layer": (_set(alpha_pattern={"q_proj": None}), "lora_alpha is None"),
    "layers by an expression": (_set(alpha_pattern={"(a+)+q_proj": 8}), r"'\(a\+\)\+q_proj', which is no name"),
    "ranks in a list": (_set(rank_pattern=[8]), r"rank_pattern \[8\]"),
    "whole modules": (_set(modules_to_save=["norm"]), "modules_to_save"),
    "tokens": (_set(trainable_token_indices=[1]), "trainable_token_indices"),
    "turned matrices": (_set(fan_in_fan_out=True), "fan_in_fan_out"),
    "a changed base": (_set(init_lora_weights="pissa"), "'pissa', which changes the base"),
    "a list for a name": (_set(init_lora_weights=[]), "init_lora_weights"),
    "rank 0": (_set(r=0), "r 0"),
    "no rank": (_set(r=None), "r None"),
    "another rank": (_set(r=8), r"shapes \(4, 64\) and \(64, 4\), of rank 8"),
    "a rank beyond any float": (_set(r=10**400), "which is no rank"),
    "no alpha": (_set(lora_alpha="8"), "lora_alpha is '8'"),
    "endless alpha": (_set(lora_alpha=float("inf")), "lora_alpha is inf"),
    "an alpha that is no number": (_set(lora_alpha=float("nan")), "lora_alpha is nan"),
    "an alpha beyond any float": (_set(lora_alpha=10**400), "lora_alpha is 1000"),
    "half of a pair": (_drop(f"{PREFIX}.lora_B.weight"), "one of two matrices for layers.1.self_attn.q_proj"),
    "a vector": (_put(f"{PREFIX}.lora_A.weight", np.zeros(4, F32)), r"shapes \(4,\)"),
    "whole numbers": (_put(f"{PREFIX}.lora_A.weight", np.zeros((4, 64), np.int32)), "stored as I32"),
    "a magnitude": (_put(f"{PREFIX}.lora_magnitude_vector", np.zeros(64, F32)), "lora_magnitude_vector"),
    "an embedding": (_put("base_model.model.embed_tokens.lora_embedding_A", np.zeros((4, 9), F32)), "embedding_A"),
    "nothing": (lambda adapter: adapter.tensors.clear(), "updates nothing"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_what_is_no_plain_adapter_is_refused_by_name(adapter: Adapter, tmp_path: Path, how: str) -> None:
    spoil, problem = SPOILT[how]
    spoil(adapter)
    with pytest.raises(UnsupportedModel, match=problem) as refused:
        read_lora(adapter.write(tmp_path), CONFIG)
    assert refused.value.remedy


def test_a_layer_that_nobody_knows_is_refused(adapter: Adapter, tmp_path: Path) -> None:
    for side, shape in (("A", (4, 64)), ("B", (64, 4))):
        adapter.tensors[f"base_model.model.layers.0.router.lora_{side}.weight"] = np.zeros(shape, F32)
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.router"):
        read_lora(adapter.write(tmp_path), CONFIG)


def test_an_update_of_a_head_that_is_the_embedding_is_refused(adapter: Adapter, tmp_path: Path) -> None:
    for side, shape in (("A", (4, 64)), ("B", (411, 4))):
        adapter.tensors[f"base_model.model.lm_head.lora_{side}.weight"] = np.zeros(shape, F32)
    with pytest.raises(UnsupportedModel, match="updates lm_head"):
        read_lora(adapter.write(tmp_path), CONFIG)


@pytest.mark.parametrize("shape", [(64, 65), (63, 64), (64,)])
def test_a_base_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    slots = slots_of(CONFIG) | {"layers.1.attn.q.weight": np.zeros(shape, F32)}
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.attn\.q\.weight has shape \(64, 64\)"):
        read_lora(GOLDEN / "adapter", CONFIG).merge_into(slots.items())


def test_a_base_with_fewer_layers_is_refused() -> None:
    slots = {name: slot for name, slot in slots_of(CONFIG).items() if ".0." in name}
    with pytest.raises(UnsupportedModel, match=r"no matrices layers\.1\."):
        read_lora(GOLDEN / "adapter", CONFIG).merge_into(slots.items())


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_named(adapter: Adapter, tmp_path: Path, missing: str) -> None:
    (adapter.write(tmp_path) / missing).unlink()
    with pytest.raises(HeedfulError, match=missing):
        read_lora(tmp_path, CONFIG)


def test_settings_that_are_no_json_are_refused(adapter: Adapter, tmp_path: Path) -> None:
    (adapter.write(tmp_path) / "adapter_config.json").write_text("{")
    with pytest.raises(SourceError, match="cannot be read as JSON"):
        read_lora(tmp_path, CONFIG)
