"""Laya's network on recorded tokens, against logits recorded from the laya package; gradients; options kept apart."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from heedful.engine.torch_embed import run_trunk
from heedful.engine.torch_laya import laya_logits, make_laya, question_logits
from heedful.errors import UnsupportedModel
from heedful.kernels.option_attention import OptionAttend
from heedful.kernels.text_attention import QUERY_BLOCK
from heedful.models.encoder_config import encoder_config_from_hf
from heedful.models.laya import LayaNetwork
from heedful.models.laya_config import LayaConfig, LayaSequence
from heedful.weights.encoder_names import encoder_from_hf
from heedful.weights.laya_names import laya_from_hf
from heedful.weights.safetensors_file import read_safetensors
from heedful.weights.tensor import StoredTensor

GOLDEN = Path(__file__).parent.parent / "golden" / "decisions" / "laya"
LAYOUTS = ("sequential", "parallel")
HEAD_LAYERS = {"sequential": 1, "parallel": 2}
TOLERANCE = 1e-4


def tiny(layout: str) -> LayaNetwork:
    settings = json.loads((GOLDEN / layout / "encoder" / "config.json").read_text())
    tensors = laya_from_hf(read_safetensors(GOLDEN / layout))
    config = encoder_config_from_hf(settings)
    trunk, _ = encoder_from_hf(config.family, tensors.trunk)
    return make_laya(LayaConfig(config, HEAD_LAYERS[layout], actions=2), trunk, tensors.head, threads=1)


def recorded(layout: str) -> list[list[dict[str, Any]]]:
    """Of each request its packed questions."""
    requests = json.loads((GOLDEN / f"{layout}.json").read_text())["requests"]
    return [list(request["packed"].values()) for request in requests]


def sequence(packed: dict[str, Any]) -> LayaSequence:
    ids, positions, options = packed["input_ids"], packed.get("position_ids"), packed.get("option_ids")
    return LayaSequence(ids, packed["markers"], packed["qtype"], positions, options)


def far(found: list[list[float]], packed: list[dict[str, Any]]) -> float:
    expected = [one["logits"] for one in packed]
    assert [len(one) for one in found] == [len(one) for one in expected]
    return max(abs(a - b) for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_the_recorded_ones_together_and_alone(layout: str) -> None:
    network, questions = tiny(layout), recorded(layout)
    for packed in questions:
        assert far(laya_logits(network, [sequence(one) for one in packed]), packed) < TOLERANCE
    every = [one for packed in questions for one in packed if len(one["input_ids"]) < 140]
    assert far(laya_logits(network, [sequence(one) for one in every]), every) < TOLERANCE


def test_the_recorded_logits_notice_the_mask_and_the_type() -> None:
    network = tiny("parallel")
    packed = recorded("parallel")[1][0]
    whole = sequence(packed)
    unmasked = LayaSequence(whole.ids, whole.markers, whole.type)
    other_type = LayaSequence(whole.ids, whole.markers, 1 - whole.type, whole.positions, whole.options)
    for wrong in (unmasked, other_type):
        assert far(laya_logits(network, [wrong]), [packed]) > 0.01


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_weight_that_an_answer_needs_has_a_gradient(layout: str) -> None:
    network = tiny(layout).requires_grad_(True)
    sum(logits.square().sum() for logits in question_logits(network, [sequence(recorded(layout)[3][0])])).backward()  # type: ignore[union-attr]
    without = {name for name, weight in network.named_parameters() if weight.grad is None}
    assert without == {f"head.act.{part}.{kind}" for part in ("dense", "out") for kind in ("weight", "bias")}


@pytest.mark.parametrize("family", ["bert_mlm", "deberta_v2"])
def test_on_other_trunks_the_head_is_pytorchs_own_layers(family: str) -> None:
    folder = GOLDEN.parent.parent / "encoders" / family
    trunk_config = encoder_config_from_hf(json.loads((folder / "config.json").read_text()))
    trunk_weights, _ = encoder_from_hf(trunk_config.family, read_safetensors(folder))
    width = trunk_config.hidden_size
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(width, 1, 4 * width, batch_first=True, norm_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    types = torch.nn.Embedding(3, width)
    norm, dense, out = torch.nn.LayerNorm(width), torch.nn.Linear(width, width), torch.nn.Linear(width, 1)
    named = {f"head.{name}": weight for name, weight in encoder.state_dict().items()}
    named |= {f"scorer.{at}.{name}": weight for at, module in ((0, norm), (1, dense), (3, out))
              for name, weight in module.state_dict().items()}  # fmt: skip
    head = laya_from_hf(
        {name: stored(name, weight) for name, weight in {**named, "type_emb.weight": types.weight}.items()}
    )
    network = make_laya(LayaConfig(trunk_config, head_layers=2), trunk_weights, head.head, threads=1)
    sequences = [LayaSequence(list(range(5, 5 + 9 * n)), [3, 7 + n], n) for n in (1, 2)]
    found = laya_logits(network, sequences)
    for one, logits in zip(sequences, found, strict=True):
        ids = torch.tensor(one.ids)
        hidden = run_trunk(network.trunk, ids, torch.arange(len(ids)), torch.zeros_like(ids), [len(ids)])
        with torch.inference_mode():
            x = encoder((hidden + types.weight[one.type])[None])[0][list(one.markers)]
            expected = out(torch.nn.functional.gelu(dense(norm(x)))).squeeze(-1)
        assert (torch.tensor(logits) - expected).abs().max() < TOLERANCE


def stored(name: str, weight: Tensor) -> StoredTensor:
    rows = np.ascontiguousarray(weight.detach().numpy()).view(np.uint8)
    return StoredTensor(name, "F32", tuple(weight.shape), rows.reshape(math.prod(weight.shape[:-1]), -1))


def plain(q: Tensor, k: Tensor, v: Tensor, sees: list[list[bool]]) -> Tensor:
    scores = torch.einsum("ihd,jhd->hij", q, k).masked_fill(~torch.tensor(sees), -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)


@pytest.mark.parametrize("window", [None, 1, 3, 40])
def test_options_are_kept_apart_and_windows_count_positions(window: int | None) -> None:
    options = [[0] * 5 + [1] * 4 + [2] * 2 + [3] * 4 + [0] * QUERY_BLOCK, [0, 1, 1]]
    positions = [[*range(5), *range(5, 9), 5, 6, *range(5, 9), *range(9, 9 + QUERY_BLOCK)], [0, 1, 2]]
    lengths = [len(one) for one in options]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), 2, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    flat = [torch.tensor([x for one in of for x in one]) for of in (positions, options)]
    found = OptionAttend(lengths, flat[0], flat[1])(0, q, k, v, window=window, scale=1.0, softcap=None)
    for at, (query, key, value, ours) in enumerate(zip(*(x.split(lengths) for x in (q, k, v, found)), strict=True)):
        place, option = positions[at], options[at]
        sees = [
            [
                (option[i] == option[j] or 0 in (option[i], option[j]))
                and (window is None or abs(place[i] - place[j]) < window)
                for j in range(len(place))
            ]
            for i in range(len(place))
        ]
        assert (ours - plain(query, key, value, sees)).abs().max() < 1e-12


def test_weights_of_another_architecture_are_refused() -> None:
    stored = read_safetensors(GOLDEN / "sequential")
    one = stored["type_emb.weight"]
    for name in ("head.layers.0.gate.weight", "scorer.9.weight", "head.layers.99999.norm1.weight"):
        with pytest.raises(UnsupportedModel, match="has no place"):
            laya_from_hf({**stored, name: one})
