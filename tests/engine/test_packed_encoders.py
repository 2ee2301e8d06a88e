"""Encoders whose matrix products run on packed weights: each product against float64, real sentences against the
reference's vectors, within the error that docs/kernels.md states.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from heedful.engine.encoder import Encoder
from heedful.errors import BadParameter, UnsupportedModel
from heedful.kernels import native

pytest.importorskip("heedful._native")

from heedful.engine.torch_embed import Trunk, packed, run_trunk
from heedful.engine.torch_packed import PackedLinear, pack_linears
from heedful.models.bert import Bert
from heedful.models.deberta import Deberta
from heedful.models.encoder_config import encoder_config_from_hf
from heedful.models.layers import Linear
from heedful.models.modernbert import ModernBert

GOLDEN = Path(__file__).parent.parent / "golden/encoders"
SENTENCES = [s["text"] for s in json.loads((GOLDEN / "minilm/sentences.json").read_text())["sentences"]]
FORMATS = tuple(native.WEIGHTS_FORMATS)


@pytest.mark.parametrize(("weights", "error"), [("q8", 0.009), ("q6", 0.025), ("q4", 0.1)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_is_the_layer_within_its_format(weights: str, error: float, bias: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Linear(96, 40, bias=bias))
    x = torch.randn(3, 17, 96)
    expected = model(x).detach().double()
    saved = pack_linears(model, native.panel_format(weights), threads=2)
    assert isinstance(model[0], PackedLinear)
    with torch.inference_mode():
        found = model(x).double()
    assert found.shape == (3, 17, 40)
    assert 0 < (found - expected).norm() / expected.norm() < error
    assert saved == 4 * 96 * 40 - 96 * 40 // 256 * {"q8": 272, "q6": 288, "q4": 160}[weights]


def test_what_does_not_fit_stays_as_it_is() -> None:
    model = torch.nn.ModuleDict({"narrow": Linear(33, 64), "few_rows": Linear(64, 3), "other": torch.nn.Linear(64, 64)})
    assert pack_linears(model, "w6", threads=1) == 0
    assert pack_linears(torch.nn.ModuleDict({"fits": Linear(32, 8)}), None, threads=1) == 0


@pytest.mark.parametrize(("weights", "lost"), [("q8", 0.002), ("q6", 0.006), ("q4", 0.09)])
def test_real_sentences_keep_their_direction(minilm_dir: Path, weights: str, lost: float) -> None:
    encoder = Encoder.load(str(minilm_dir), threads=2, weights=weights)
    batch = encoder.embed(SENTENCES, truncate=True)
    cosine = (batch.vectors * load_file(GOLDEN / "minilm/golden.safetensors")["embeddings"]).sum(axis=1)
    assert (1 - cosine).max() < lost
    bytes_per_256 = {"q8": 272, "q6": 288, "q4": 160}[weights]
    assert batch.receipt.weights.bytes_read == encoder.facts.linear_weights * bytes_per_256 // 256 * batch.receipt.steps


@pytest.mark.parametrize(("family", "trunk"), [("bert_mlm", Bert), ("deberta_v2", Deberta), ("modernbert", ModernBert)])
def test_every_family_runs_packed(family: str, trunk: type[Trunk]) -> None:
    """On widths that fit blocks of 32, which the recorded tiny models have not."""
    widths = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "pooler_hidden_size": 64}
    config = encoder_config_from_hf(json.loads((GOLDEN / family / "config.json").read_text()) | widths)
    torch.manual_seed(0)
    model = trunk(config).eval().requires_grad_(False)
    if isinstance(model, Deberta):
        model.fix_positions()
    ids, positions, lengths = packed([[5, 6, 7, 8, 9, 10], [11, 12, 13]])
    with torch.inference_mode():
        expected = run_trunk(model, ids, positions, torch.zeros_like(ids), lengths)
        pack_linears(model, "w8", threads=2)
        found = run_trunk(model, ids, positions, torch.zeros_like(ids), lengths)
    assert not any(isinstance(part, Linear) for part in model.modules())
    assert 0 < (found - expected).norm() / expected.norm() < 0.02


def test_unknown_formats_are_refused_before_anything_is_read() -> None:
    with pytest.raises(BadParameter, match="q8, q6, q4"):
        Encoder.load("no such place", weights="q5")


def test_without_native_kernels_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "is_built", lambda: False)
    with pytest.raises(UnsupportedModel, match="native kernels"):
        native.panel_format("q6")
    assert native.panel_format(None) is None
