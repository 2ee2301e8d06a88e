"""Laya's files: what is refused, the small layout that stands on an encoder by its alias, the built-in decider."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from torch import nn

from heedful.decide import Choice, load
from heedful.decide.laya import Laya
from heedful.engine.torch_embed import build_encoder, run_trunk
from heedful.errors import FileFormatError, HeedfulError, SourceError, UnsupportedModel
from heedful.weights.load_encoder import load_encoder
from heedful.weights.load_laya import load_laya

GOLDEN = Path(__file__).parent.parent / "golden" / "decisions" / "laya"
TEAM = Choice("team", {"billing": "owns invoices", "returns": None}, "Who owns this?")
STATE = "I was charged twice for order 88."
Tensors = dict[str, NDArray[Any]]


def copy_of(layout: str, to: Path) -> Path:
    shutil.copytree(GOLDEN / layout, to / layout)
    return to / layout


def change_json(path: Path, **changes: Any) -> None:
    """None takes a field away."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


# ---- refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"head_layers": None}, "head_layers is None"),
        ({"head_layers": 0}, "head_layers is 0"),
        ({"head_layers": True}, "head_layers is True"),
        ({"head_layers": 2}, "the file has no weight for layers.1"),
        ({"max_len": "512"}, "max_len is '512'"),
        ({"max_len": -1}, "max_len is -1"),
        ({"head_max_len": 1.5}, "head_max_len is 1.5"),
        ({"option_layout": "circular"}, "option_layout is 'circular'"),
        ({"option_layout": ["parallel"]}, "option_layout is"),
        ({"act_costs": 7}, "act_costs is 7"),
        ({"act_costs": {"escalate": 0.5, "ask": 1.0}}, r"act_head.2.weight has shape \(2, 256\)"),
        ({"temperature": [1.0, 1.0]}, "must hold temperature"),
        ({"temperature_by_options": 3}, "must hold temperature"),
        ({"trunk": "alias"}, "stands on 'tiny-modernbert'"),
        ({"trunk": "alias", "encoder": "smollm2"}, "stands on 'smollm2'"),
        ({"trunk": "alias", "encoder": "hf:somebody/model"}, "stands on 'hf:somebody/model'"),
        ({"trunk": "alias", "encoder": ["minilm"]}, "stands on"),
        (
            {"trunk": "alias", "encoder": "minilm"},
            r"the file has a weight 'embeddings.+' of its own",
        ),
    ],
)
def test_configs_that_are_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = copy_of("sequential", tmp_path)
    change_json(folder / "rl_agent_config.json", **change)
    with pytest.raises(UnsupportedModel, match=said):
        Laya.load(str(folder), threads=1)


def test_temperatures_that_are_no_numbers_count_as_one(tmp_path: Path) -> None:
    folder = copy_of("sequential", tmp_path)
    change_json(folder / "rl_agent_config.json", temperature=["x", None, True], temperature_by_options=None)
    calibration = Laya.load(str(folder), threads=1).calibration
    assert [calibration.temperature(kind, 3) for kind in ("choice", "score", "noul")] == [1.0] * 3


def without(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def with_one(name: str, shape: tuple[int, ...]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = np.zeros(shape, np.float16)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without("scorer.3.bias"), "no weight for scorer.out.bias"),
        (without("encoder.layers.1.attn.Wo.weight"), "no weight for layers.1.attn.out.weight"),
        (without("act_head.0.weight"), "no weight for act.dense.weight"),
        (with_one("type_emb.weight", (4, 128)), r"type_emb.weight has shape \(4, 128\)"),
        (with_one("head.layers.1.norm1.weight", (128,)), "nothing uses the weights layers.1"),
        (with_one("encoder.layers.0.attn_norm.weight", (128,)), "nothing uses the weights layers.0.attn_norm"),
        (with_one("encoder.head.dense.weight", (128, 128)), "another head on it: head.dense.weight"),
        (with_one("value_head.weight", (1,)), "weight 'value_head.weight' has no place"),
        (
            with_one("encoder.layers.1.attn.Wo.lora_A", (4, 128)),
            "one of two matrices of the update of layers.1.attn.Wo",
        ),
    ],
)
def test_weights_that_are_refused(change: Callable[[Tensors], None], said: str, tmp_path: Path) -> None:
    folder = copy_of("sequential", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=said):
        Laya.load(str(folder), threads=1)


@pytest.mark.parametrize(
    "name",
    ["rl_agent_config.json", "model.safetensors", "encoder/config.json", "tokenizer/tokenizer.json"],
)
@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b'{"model_type": "modernbert"}'])
def test_files_that_are_missing_or_damaged(name: str, content: bytes | None, tmp_path: Path) -> None:
    folder = copy_of("sequential", tmp_path)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises((SourceError, FileFormatError, UnsupportedModel)):
        Laya.load(str(folder), threads=1)


@pytest.mark.parametrize("token", ["cls_token", "sep_token", "mask_token"])
@pytest.mark.parametrize("value", [None, "", 7, {"content": "[MASKED]"}, "[NOT THERE]"])
def test_tokenizers_without_a_mark_are_refused(token: str, value: Any, tmp_path: Path) -> None:
    folder = copy_of("parallel", tmp_path)
    change_json(folder / "tokenizer" / "tokenizer_config.json", **{token: value})
    with pytest.raises(UnsupportedModel, match="tokenizer has no"):
        load_laya(folder)


def test_marks_may_be_named_by_an_object_or_by_the_other_file(tmp_path: Path) -> None:
    folder = copy_of("parallel", tmp_path)
    config = folder / "tokenizer" / "tokenizer_config.json"
    change_json(config, cls_token={"content": "[CLS]"}, mask_token=None, tokenizer_class="TokenizersBackend")
    change_json(config, extra_special_tokens=["<image>"])
    (folder / "tokenizer" / "special_tokens_map.json").write_text(json.dumps({"mask_token": {"content": "[MASK]"}}))
    assert load_laya(folder).marks == load_laya(GOLDEN / "parallel").marks


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = copy_of("parallel", tmp_path)
    shutil.copytree(GOLDEN / "sequential" / "tokenizer", folder / "tokenizer", dirs_exist_ok=True)
    with pytest.raises(UnsupportedModel, match="the tokenizer has 600 tokens, the trunk 500"):
        load_laya(folder)


def test_a_name_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no Laya checkpoint"):
        Laya.load("http://127.0.0.1:1", threads=1)
    with pytest.raises(HeedfulError):
        Laya.load(str(tmp_path), threads=1)


# ---- on an alias ------------------------------------------------------------------------------------------------

WIDTH, RANK, ALPHA = 384, 3, 7.0
UPDATED = ("encoder.layer.0.attention.self.query", "encoder.layer.2.attention.self.value",
           "encoder.layer.5.intermediate.dense", "encoder.layer.5.output.dense")  # fmt: skip
OURS = ("layers.0.attn.q.weight", "layers.2.attn.v.weight", "layers.5.mlp.up.weight", "layers.5.mlp.down.weight")


class Head(nn.Module):
    """What stands on the trunk, written with PyTorch's own layers and the published names."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, WIDTH // 64, 4 * WIDTH, batch_first=True, norm_first=True)
        self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.type_emb = nn.Embedding(3, WIDTH)
        self.scorer = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))

    def forward(self, hidden: torch.Tensor, kind: int, markers: list[int]) -> torch.Tensor:
        x = self.head((hidden + self.type_emb.weight[kind])[None])[0]
        return self.scorer(x[markers]).squeeze(-1)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def small(minilm_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Head, Tensors]:
    """(folder, its head in float32, its low-rank matrices)."""
    del minilm_dir  # fetched
    torch.manual_seed(0)
    head = Head().eval()
    head.scorer[3].weight.data *= 20
    tensors = {name: weight.numpy().astype(np.float16) for name, weight in head.state_dict().items()}
    head.load_state_dict({name: torch.from_numpy(half.astype(np.float32)) for name, half in tensors.items()})
    generator = np.random.default_rng(0)
    pairs: Tensors = {}
    for layer in UPDATED:
        wide_in = 4 * WIDTH if layer.endswith("5.output.dense") else WIDTH
        wide_out = 4 * WIDTH if "intermediate" in layer else WIDTH
        pairs[f"{layer}.lora_A"] = generator.normal(0, 0.05, (RANK, wide_in)).astype(np.float16)
        pairs[f"{layer}.lora_B"] = generator.normal(0, 0.05, (wide_out, RANK)).astype(np.float16)
    folder = tmp_path_factory.mktemp("small")
    save_file({**tensors, **{f"encoder.{name}": pair for name, pair in pairs.items()}}, folder / "model.safetensors")
    config = {"encoder": "minilm", "trunk": "alias", "head_layers": 1, "act_costs": {}, "max_len": 1024,
              "head_max_len": 512, "option_layout": "parallel", "lora_r": RANK, "lora_alpha": ALPHA}  # fmt: skip
    (folder / "rl_agent_config.json").write_text(json.dumps(config))
    return folder, head, pairs


def test_updates_are_added_to_the_aliased_trunk(small: tuple[Path, Head, Tensors]) -> None:
    folder, head, pairs = small
    decider = Laya.load(str(folder), threads=1)
    base = load_encoder("minilm")
    trunk = build_encoder(base.config, base.weights)
    slots = dict(trunk.weight_slots())
    for layer, ours in zip(UPDATED, OURS, strict=True):
        a, b = (pairs[f"{layer}.lora_{side}"].astype(np.float32) for side in "AB")
        slots[ours] += torch.from_numpy(np.float32(ALPHA / RANK) * (b @ a))
    one = Choice("one", {"billing": "owns invoices"}, "Who owns this?")  # alone, it sees and is seen by all
    sequence = decider.packed(STATE, [one])["one"].sequence
    ids, length = torch.tensor(sequence.ids), len(sequence.ids)
    assert list(sequence.positions or ()) == list(range(length))
    with torch.inference_mode():
        hidden = run_trunk(trunk, ids, torch.arange(length), torch.zeros_like(ids), [length])
        expected = head(hidden, 0, list(sequence.markers))
    assert abs(decider.logits(STATE, [one])[0][0] - float(expected)) < 1e-4
    untouched = build_encoder(base.config, base.weights)
    with torch.inference_mode():
        hidden = run_trunk(untouched, ids, torch.arange(length), torch.zeros_like(ids), [length])
        assert abs(float(expected) - float(head(hidden, 0, list(sequence.markers)))) > 0.01


def test_positions_of_the_trunk_bound_what_options_side_by_side_do_not(small: tuple[Path, Head, Tensors]) -> None:
    """MiniLM has 512 positions; more tokens than that fit where options share them, a longer state does not."""
    folder, _, _ = small
    wide = Laya.load(str(folder), max_len=4096, head_max_len=3000, threads=1)
    names = [f"option number {i}" for i in range(255)]
    sequence = wide.packed(STATE, [Choice("which", names, "Which?")])["which"].sequence
    assert len(sequence.ids) > 1000
    assert max(sequence.positions or ()) < 60
    answer = wide.decide(STATE, [Choice("which", names, "Which?")])["which"]
    assert list(answer.to_dict()["probabilities"]) == names
    with pytest.raises(HeedfulError, match="tokens of the state do not fit"):
        wide.decide("word " * 600, [TEAM])
    with pytest.raises(HeedfulError, match="longest option do not fit into 512 positions"):
        wide.decide(STATE, [Choice("which", ["a", "b"], "word " * 600)])
    cutting = Laya.load(str(folder), truncate=True, threads=1).packed("word " * 600, [TEAM])["team"]
    assert max(cutting.sequence.positions or ()) == 511


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora_r": None}, "lora_r is None"),
        ({"lora_r": RANK + 1}, f"of rank {RANK + 1}"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
        ({"lora_alpha": True}, "lora_alpha is True"),
    ],
)
def test_scales_of_updates_that_are_refused(
    changes: dict[str, Any], said: str, small: tuple[Path, Head, Tensors], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(small[0], tmp_path / "copy"))
    change_json(folder / "rl_agent_config.json", **changes)
    with pytest.raises(UnsupportedModel, match=said):
        Laya.load(str(folder), threads=1)


@pytest.mark.parametrize(
    ("layer", "shapes", "said"),
    [
        ("encoder.encoder.layer.9.output.dense", ((RANK, WIDTH), (WIDTH, RANK)), "layers.9.mlp.down"),
        ("encoder.encoder.layer.1.output.dense", ((RANK, WIDTH), (WIDTH, RANK)), r"shape \(384, 384\)"),
        ("encoder.encoder.layer.1.output.dense", ((RANK,), (WIDTH, RANK)), "have shapes"),
        ("encoder.encoder.layer.1.somewhere", ((RANK, WIDTH), (WIDTH, RANK)), "has no place"),
        ("encoder.pooler.dense", ((RANK, WIDTH), (WIDTH, RANK)), "no 'pooler.dense.weight' to update"),
    ],
)
def test_updates_of_what_is_not_there_are_refused(
    layer: str, shapes: tuple[tuple[int, ...], ...], said: str, small: tuple[Path, Head, Tensors], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(small[0], tmp_path / "copy"))
    tensors = load_file(folder / "model.safetensors")
    for side, shape in zip("AB", shapes, strict=True):
        tensors[f"{layer}.lora_{side}"] = np.ones(shape, np.float16)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=said):
        Laya.load(str(folder), threads=1)


def test_the_built_in_decider_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(load, "BUILT_IN_FOLDER", tmp_path / "nothing")
    with pytest.raises(SourceError, match="comes without heedful-decider"):
        Laya.load("heedful-decider", threads=1)
    monkeypatch.setattr(load, "BUILT_IN_FOLDER", GOLDEN / "sequential")
    decider = Laya.load("heedful-decider", threads=1)
    assert decider.decide(STATE, [TEAM]).model == "heedful-decider"
