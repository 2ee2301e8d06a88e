"""BERT without padding, against hidden states recorded from transformers; its config from every way of writing it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from heedful.engine.torch_embed import build_encoder
from heedful.errors import UnsupportedModel
from heedful.kernels.attention import DenseAttend
from heedful.kernels.text_attention import QUERY_BLOCK, BidirectionalAttend, CausalTextAttend
from heedful.models.bert import Bert
from heedful.models.encoder_config import EncoderConfig, encoder_config_from_hf, is_encoder
from heedful.weights.encoder_names import encoder_from_hf
from heedful.weights.safetensors_file import read_safetensors

GOLDEN = Path(__file__).parent.parent / "golden" / "encoders"
TINY = ("bert_mlm", "bert_seqcls")
TOLERANCE = 1e-4


def config_json(model: str) -> dict[str, Any]:
    return json.loads((GOLDEN / model / "config.json").read_text())  # type: ignore[no-any-return]


def tiny_bert(model: str) -> Bert:
    trunk, _ = encoder_from_hf("bert", read_safetensors(GOLDEN / model))
    bert = build_encoder(encoder_config_from_hf(config_json(model)), trunk)
    assert isinstance(bert, Bert)
    return bert


def positions_of(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


@pytest.mark.parametrize("model", TINY)
def test_packed_hidden_states_equal_the_recorded_padded_ones(model: str) -> None:
    expected = load_file(GOLDEN / model / "golden.safetensors")
    mask = expected["attention_mask"].bool()
    lengths = mask.sum(1).tolist()
    assert lengths == [80, 37, 5]
    ids, types = expected["input_ids"][mask].long(), expected["token_type_ids"][mask].long()
    assert set(types.tolist()) == {0, 1}
    hidden = tiny_bert(model)(ids, positions_of(lengths), types, BidirectionalAttend(lengths))
    assert (hidden - expected["last_hidden_state"][mask]).abs().max() < TOLERANCE


def test_token_types_and_positions_count() -> None:
    """The recorded states notice when either is left out."""
    expected = load_file(GOLDEN / "bert_mlm" / "golden.safetensors")
    ids, types = expected["input_ids"][0].long(), expected["token_type_ids"][0].long()
    bert, positions = tiny_bert("bert_mlm"), torch.arange(80)
    for at, kinds in ((positions, torch.zeros_like(types)), (torch.zeros_like(positions), types)):
        hidden = bert(ids, at, kinds, BidirectionalAttend([80]))
        assert (hidden - expected["last_hidden_state"][0]).abs().max() > 0.1


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_text_among_others_is_the_text_alone(lengths: list[int], random: Any) -> None:
    bert = tiny_bert("bert_seqcls")
    texts = [[random.randrange(120) for _ in range(length)] for length in lengths]
    zeros = torch.zeros(sum(lengths), dtype=torch.int64)
    packed = bert(
        torch.tensor([token for text in texts for token in text]),
        positions_of(lengths),
        zeros,
        BidirectionalAttend(lengths),
    )
    for text, found in zip(texts, packed.split(lengths), strict=True):
        size = len(text)
        alone = bert(torch.tensor(text), torch.arange(size), zeros[:size], BidirectionalAttend([size]))
        assert (found - alone).abs().max() < TOLERANCE


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (100, None), (700, None), (None, 20.0)])
def test_causal_attention_in_blocks_is_the_dense_one(window: int | None, softcap: float | None) -> None:
    lengths = [QUERY_BLOCK + 3, 1, QUERY_BLOCK, 2 * QUERY_BLOCK + 1]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), heads, 8, generator=generator) for heads in (4, 2, 2))
    step = {"window": window, "scale": 0.5, "softcap": softcap}
    found, expected = (attend(lengths)(0, q, k, v, **step) for attend in (CausalTextAttend, DenseAttend))
    assert (found - expected).abs().max() < 1e-5


def test_heads_are_set_apart() -> None:
    _, mlm = encoder_from_hf("bert", read_safetensors(GOLDEN / "bert_mlm"))
    assert "cls.predictions.bias" in mlm
    _, classifier = encoder_from_hf("bert", read_safetensors(GOLDEN / "bert_seqcls"))
    assert set(classifier) == {"classifier.bias", "classifier.weight", "pooler.dense.bias", "pooler.dense.weight"}


def test_names_of_first_releases_and_strange_ones() -> None:
    stored = read_safetensors(GOLDEN / "bert_seqcls")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in stored.items()
    }
    assert encoder_from_hf("bert", old)[0].keys() == encoder_from_hf("bert", stored)[0].keys()
    bare = {name.removeprefix("bert."): tensor for name, tensor in stored.items()}
    assert encoder_from_hf("bert", bare)[0].keys() == encoder_from_hf("bert", stored)[0].keys()
    with pytest.raises(UnsupportedModel, match=r"encoder\.layer\.0\.rel"):
        encoder_from_hf("bert", {"encoder.layer.0.rel.weight": stored["classifier.weight"]})


def test_weights_must_fit_the_config() -> None:
    trunk, _ = encoder_from_hf("bert", read_safetensors(GOLDEN / "bert_mlm"))
    for key, value, said in (
        ("num_hidden_layers", 3, r"layers\.2"),
        ("num_hidden_layers", 1, r"nothing uses .*layers\.1"),
        ("vocab_size", 121, "shape"),
    ):
        config = encoder_config_from_hf({**config_json("bert_mlm"), key: value})
        with pytest.raises(UnsupportedModel, match=said):
            build_encoder(config, trunk)


def test_config_of_minilm(minilm_dir: Path) -> None:
    hf = json.loads((minilm_dir / "config.json").read_text())
    config = encoder_config_from_hf(hf)
    assert config == EncoderConfig("bert", 30522, 384, 6, 12, 1536, 512, 2, 1e-12, "gelu")
    assert (config.head_dim, config.linear_weights) == (32, 6 * (4 * 384 * 384 + 2 * 384 * 1536))
    stored = read_safetensors(minilm_dir)
    in_matrices = sum(t.num_weights for n, t in stored.items() if n.startswith("encoder") and len(t.shape) == 2)
    assert config.linear_weights == in_matrices
    in_tables = sum(t.num_weights for n, t in stored.items() if n.endswith("embeddings.weight"))
    assert config.embedding_weights == in_tables


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "roberta"}, "model_type 'roberta'"),
        ({"model_type": ["bert"]}, "model_type"),
        ({"position_embedding_type": "relative_key"}, "'relative_key' positions"),
        ({"is_decoder": True}, "decoder"),
        ({"hidden_act": "mish"}, "activation 'mish'"),
        ({"num_attention_heads": 5}, "48 channels do not part into 5 heads"),
        ({"num_hidden_layers": 10**9}, "num_layers is 1000000000"),
        ({"hidden_size": "48"}, "hidden_size is 48"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"layer_norm_eps": 0}, "eps is 0"),
        ({"layer_norm_eps": "small"}, "layer_norm_eps"),
        ({"hidden_act": ["gelu"]}, "activation"),
    ],
)
def test_configs_that_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        encoder_config_from_hf({**config_json("bert_mlm"), **change})


def test_a_config_that_lacks_a_number() -> None:
    hf = config_json("bert_mlm")
    del hf["num_attention_heads"]
    with pytest.raises(UnsupportedModel, match="num_attention_heads"):
        encoder_config_from_hf(hf)


def test_what_an_encoder_is() -> None:
    assert is_encoder({"model_type": "bert"})
    assert is_encoder({"model_type": "modernbert"})
    assert not is_encoder({"model_type": "llama"})
    assert not is_encoder({})
    assert not is_encoder({"model_type": ["bert"]})
