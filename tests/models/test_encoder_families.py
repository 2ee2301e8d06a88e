"""ModernBERT, DeBERTa and the heads, without padding, against outputs recorded from transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from heedful.cost.encoder_receipt import bidirectional_visits
from heedful.engine.torch_classify import build_mlm_head, build_sequence_head, class_logits, token_logits
from heedful.engine.torch_embed import Trunk, build_encoder, run_trunk
from heedful.errors import UnsupportedModel
from heedful.kernels.text_attention import LOCAL_BLOCK, BidirectionalAttend, DisentangledAttend
from heedful.models.deberta import Deberta, distance_rows
from heedful.models.encoder_config import EncoderConfig, RelativePositions, encoder_config_from_hf
from heedful.models.head_config import mlm_head_config_from_hf, sequence_head_config_from_hf
from heedful.models.rope import Rope
from heedful.weights.encoder_names import encoder_from_hf
from heedful.weights.head_names import mlm_head_weights, sequence_head_weights
from heedful.weights.names import Weights
from heedful.weights.safetensors_file import read_safetensors

GOLDEN = Path(__file__).parent.parent / "golden" / "encoders"
TRUNKS = (
    "modernbert",
    "modernbert_seqcls_cls",
    "modernbert_seqcls_mean",
    "modernbert_mlm",
    "deberta_v2",
    "deberta_v2_seqcls",
    "deberta_v2_mlm",
    "deberta_v2_own_positions",
    "deberta_v2_convolution",
)
CLASSIFIERS = ("bert_seqcls", "modernbert_seqcls_cls", "modernbert_seqcls_mean", "deberta_v2_seqcls")
TOLERANCE = 1e-4
LENGTHS = [80, 37, 5]


def config_json(model: str) -> dict[str, Any]:
    return json.loads((GOLDEN / model / "config.json").read_text())  # type: ignore[no-any-return]


def tiny(model: str, **changes: Any) -> tuple[EncoderConfig, Trunk, Weights]:
    config = encoder_config_from_hf({**config_json(model), **changes})
    trunk, heads = encoder_from_hf(config.family, read_safetensors(GOLDEN / model))
    return config, build_encoder(config, trunk), heads


def recorded(model: str) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    """(all tensors, mask, ids and token types of the tokens that are not padding)."""
    tensors = load_file(GOLDEN / model / "golden.safetensors")
    mask = tensors["attention_mask"].bool()
    assert mask.sum(1).tolist() == LENGTHS
    ids = tensors["input_ids"][mask].long()
    types = tensors["token_type_ids"][mask].long() if "token_type_ids" in tensors else torch.zeros_like(ids)
    return tensors, mask, ids, types


def positions_of(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


# ---- trunks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("model", TRUNKS)
def test_packed_hidden_states_equal_the_recorded_padded_ones(model: str, fixed: bool) -> None:
    expected, mask, ids, types = recorded(model)
    _, trunk, _ = tiny(model)
    if fixed and isinstance(trunk, Deberta):
        trunk.fix_positions()
    hidden = run_trunk(trunk, ids, positions_of(LENGTHS), types, LENGTHS)
    assert (hidden - expected["last_hidden_state"][mask]).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("model", "change"),
    [
        ("modernbert", {"local_attention": 256}),
        ("modernbert", {"local_attention": 18}),
        ("modernbert", {"layer_types": ["sliding_attention", "full_attention", "full_attention", "full_attention"]}),
        ("deberta_v2", {"max_relative_positions": 40}),
        ("deberta_v2", {"pos_att_type": ["c2p"]}),
        ("deberta_v2", {"pos_att_type": ["p2c"]}),
        ("deberta_v2_convolution", {"conv_act": "relu"}),
        ("deberta_v2_own_positions", {"max_relative_positions": 20, "position_buckets": 20}),
    ],
)
def test_the_recorded_states_notice(model: str, change: dict[str, Any]) -> None:
    expected, mask, ids, types = recorded(model)
    _, trunk, _ = tiny(model, **change)
    hidden = run_trunk(trunk, ids, positions_of(LENGTHS), types, LENGTHS)
    assert (hidden - expected["last_hidden_state"][mask]).abs().max() > 0.01


@pytest.mark.parametrize("model", ["modernbert", "deberta_v2"])
@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), random=st.randoms(use_true_random=False))
def test_a_text_among_others_is_the_text_alone(model: str, lengths: list[int], random: Any) -> None:
    _, trunk, _ = tiny(model)
    texts = [[random.randrange(120) for _ in range(length)] for length in lengths]
    ids = torch.tensor([token for text in texts for token in text])
    packed = run_trunk(trunk, ids, positions_of(lengths), torch.zeros_like(ids), lengths)
    for text, found in zip(texts, packed.split(lengths), strict=True):
        one = torch.tensor(text)
        alone = run_trunk(trunk, one, positions_of([len(text)]), torch.zeros_like(one), [len(text)])
        assert (found - alone).abs().max() < TOLERANCE


# ---- attention --------------------------------------------------------------------------------------------------


def plain_attention(scores: Tensor, v: Tensor) -> Tensor:
    """Scores (H, T, T) and values (T, H, D), in float64."""
    return (scores.softmax(-1) @ v.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("window", [1, 2, 65, LOCAL_BLOCK, 1000])
def test_windows_on_both_sides_in_blocks(window: int) -> None:
    lengths = [2 * LOCAL_BLOCK + 1, 1, LOCAL_BLOCK, LOCAL_BLOCK, 65]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), 3, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    found = BidirectionalAttend(lengths)(0, q, k, v, window=window, scale=0.5, softcap=None)
    visits = 0
    for parts in zip(*(x.split(lengths) for x in (q, k, v, found)), strict=True):
        query, key, value, ours = parts
        apart = torch.arange(len(query))[:, None] - torch.arange(len(query))
        sees = apart.abs() <= window - 1
        visits += int(sees.sum())
        scores = torch.einsum("ihd,jhd->hij", query, key) * 0.5
        expected = plain_attention(scores.masked_fill(~sees, -math.inf), value)
        assert (ours - expected).abs().max() < 1e-12
    counted = bidirectional_visits(lengths, (window, None), heads=3)
    assert counted.total == 3 * (visits + sum(length**2 for length in lengths))
    assert counted.dense == counted.total + counted.saved.window == 6 * sum(length**2 for length in lengths)


@pytest.mark.parametrize("terms", [(True, True), (True, False), (False, True), (False, False)])
def test_disentangled_attention_in_blocks(terms: tuple[bool, bool]) -> None:
    lengths = [LOCAL_BLOCK + 3, 2, 2, 1]
    longest, rows = max(lengths), 10
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), 3, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    kr, qr = (torch.randn(rows, 3, 8, generator=generator, dtype=torch.float64) if there else None for there in terms)
    row_of = torch.randint(rows, (2 * longest - 1,), generator=generator)
    found = DisentangledAttend(lengths)(q, k, v, position_keys=kr, position_queries=qr, rows=row_of, scale=0.3)
    for query, key, value, ours in zip(*(x.split(lengths) for x in (q, k, v, found)), strict=True):
        at = row_of[torch.arange(len(query))[:, None] - torch.arange(len(query)) + longest - 1]
        scores = torch.einsum("ihd,jhd->hij", query, key)
        if kr is not None:
            scores = scores + torch.einsum("ihd,ijhd->hij", query, kr[at])
        if qr is not None:
            scores = scores + torch.einsum("jhd,ijhd->hij", key, qr[at])
        assert (ours - plain_attention(scores * 0.3, value)).abs().max() < 1e-12


def bucket(distance: int, buckets: int, most: int) -> int:
    """As the published formula says, in float64."""
    middle, size = buckets // 2, abs(distance)
    if size <= middle:
        return distance
    shared = math.ceil(math.log(size / middle) / math.log((most - 1) / middle) * (middle - 1) - 1e-6) + middle
    return shared if distance > 0 else -shared


def test_distances_fall_into_logarithmic_buckets() -> None:
    longest = 700
    found = distance_rows(RelativePositions(span=256, buckets=256, max_distance=512), longest).tolist()
    for distance, row in zip(range(1 - longest, longest), found, strict=True):
        assert row == min(max(bucket(distance, 256, 512) + 256, 0), 511), distance


def test_distances_without_buckets_are_clipped() -> None:
    rows = distance_rows(RelativePositions(span=3, buckets=0, max_distance=3), 5)
    assert rows.tolist() == [0, 0, 1, 2, 3, 4, 5, 5, 5]


# ---- heads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", CLASSIFIERS)
def test_class_logits_equal_the_recorded_ones(model: str) -> None:
    expected, _, ids, types = recorded(model)
    config, trunk, heads = tiny(model)
    weights = sequence_head_weights(config.family, heads)
    num_labels = expected["logits"].shape[1]
    head = build_sequence_head(sequence_head_config_from_hf(config_json(model), config, num_labels), weights)
    texts, kinds = ([part.tolist() for part in x.split(LENGTHS)] for x in (ids, types))
    found = torch.from_numpy(class_logits(trunk, head, texts, kinds))
    assert (found - expected["logits"]).abs().max() < TOLERANCE
    assert head.config.labels == tuple(f"LABEL_{i}" for i in range(num_labels))


@pytest.mark.parametrize("model", ["bert_mlm", "modernbert_mlm", "deberta_v2_mlm"])
def test_token_logits_equal_the_recorded_ones(model: str) -> None:
    expected, mask, ids, types = recorded(model)
    config, trunk, heads = tiny(model)
    head_config = mlm_head_config_from_hf(config_json(model), config)
    head = build_mlm_head(head_config, mlm_head_weights(config.family, heads, head_config))
    found = token_logits(trunk, head, ids, positions_of(LENGTHS), types, LENGTHS)
    assert (found - expected["logits"][mask]).abs().max() < TOLERANCE


def test_a_tied_embedding_may_be_stored_again_and_an_untied_one_counts() -> None:
    expected, mask, ids, types = recorded("bert_mlm")
    stored = read_safetensors(GOLDEN / "bert_mlm")
    stored["cls.predictions.decoder.weight"] = stored["bert.embeddings.word_embeddings.weight"]
    config, trunk, _ = tiny("bert_mlm")
    _, heads = encoder_from_hf("bert", stored)
    for tied in (True, False):
        head_config = mlm_head_config_from_hf({**config_json("bert_mlm"), "tie_word_embeddings": tied}, config)
        head = build_mlm_head(head_config, mlm_head_weights("bert", heads, head_config))
        assert (head.out.weight is None) == tied
        found = token_logits(trunk, head, ids, positions_of(LENGTHS), types, LENGTHS)
        assert (found - expected["logits"][mask]).abs().max() < TOLERANCE


def test_models_without_such_a_head_say_so() -> None:
    _, _, heads = tiny("modernbert")
    with pytest.raises(UnsupportedModel, match="no classifier"):
        sequence_head_weights("modernbert", heads)
    config, _, heads = tiny("bert_seqcls")
    with pytest.raises(UnsupportedModel, match="guesses tokens"):
        mlm_head_weights("bert", heads, mlm_head_config_from_hf(config_json("bert_seqcls"), config))


@pytest.mark.parametrize(
    ("model", "change", "said"),
    [
        ("bert_seqcls", {"id2label": {"0": "a", "1": "b"}}, "does not name the 3 classes"),
        ("bert_seqcls", {"id2label": ["a", "b", "c"]}, "does not name the 3 classes"),
        ("bert_seqcls", {"problem_type": "ranking"}, "problem_type is 'ranking'"),
        ("bert_seqcls", {"problem_type": ["regression"]}, "problem_type"),
        ("deberta_v2_seqcls", {"pooler_hidden_size": 24}, "pooler has another width"),
        ("deberta_v2_seqcls", {"pooler_hidden_act": "mish"}, "activation 'mish'"),
        ("modernbert_seqcls_mean", {"classifier_pooling": "max"}, "classifier_pooling is 'max'"),
    ],
)
def test_head_configs_that_are_refused(model: str, change: dict[str, Any], said: str) -> None:
    config, _, _ = tiny(model)
    with pytest.raises(UnsupportedModel, match=said):
        sequence_head_config_from_hf({**config_json(model), **change}, config, 3)


# ---- configs ----------------------------------------------------------------------------------------------------


def test_modernbert_config_as_old_and_new_versions_write_it() -> None:
    new = config_json("modernbert")
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "layer_types")}
    old |= {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    config = encoder_config_from_hf(new)
    assert config == encoder_config_from_hf(old)
    assert config.windows == (None, 9, 9, None)
    assert config.ropes == (Rope(16, 160000.0), Rope(16, 10000.0), Rope(16, 10000.0), Rope(16, 160000.0))
    one_theta = encoder_config_from_hf({**old, "local_rope_theta": None})
    assert set(one_theta.ropes) == {Rope(16, 160000.0)}


@pytest.mark.parametrize("model", ["modernbert", "deberta_v2", "deberta_v2_convolution"])
def test_weights_are_counted(model: str) -> None:
    config, trunk, _ = tiny(model)
    in_layers = sum(p.numel() for n, p in trunk.named_parameters() if n.startswith(("layers", "conv")) and p.ndim >= 2)
    # layers · terms · span · 2 rows · channels
    positions = {"modernbert": 0, "deberta_v2": 2 * 2 * 16 * 2 * 48, "deberta_v2_convolution": 2 * 2 * 16 * 2 * 32}[
        model
    ]
    assert config.matrix_weights == in_layers
    assert config.linear_weights == in_layers + positions
    assert config.embedding_weights == sum(p.numel() for n, p in trunk.named_parameters() if "embed.weight" in n)


@pytest.mark.parametrize(
    ("model", "change", "said"),
    [
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types"),
        ("modernbert", {"layer_types": ["full_attention"] * 3 + [7]}, "layer_types"),
        ("modernbert", {"layer_types": 5}, "layer_types"),
        ("modernbert", {"local_attention": "16"}, "local_attention is '16'"),
        ("modernbert", {"rope_parameters": [1]}, "rope_parameters"),
        ("modernbert", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_parameters"),
        ("modernbert", {"rope_parameters": {"full_attention": {"rope_theta": "x"}}}, "rope_theta"),
        ("modernbert", {"rope_parameters": None, "global_rope_theta": 0}, "rotary base"),
        ("modernbert", {"layer_types": None, "global_attn_every_n_layers": 0}, "global_attn_every_n_layers"),
        ("modernbert", {"num_attention_heads": 0}, "num_heads is 0"),
        ("modernbert", {"norm_eps": None}, "norm_eps"),
        ("modernbert", {"norm_eps": 10**400}, "norm_eps"),
        ("modernbert", {"rope_parameters": None, "global_rope_theta": 10**400}, "global_rope_theta"),
        ("deberta_v2", {"relative_attention": False}, "no relative attention"),
        ("deberta_v2", {"conv_kernel_size": 4}, "convolution over 4 neighbours"),
        ("deberta_v2", {"conv_kernel_size": 3, "conv_groups": 5}, "in 5 groups"),
        ("deberta_v2", {"conv_kernel_size": 3, "conv_act": "mish"}, "activation 'mish'"),
        ("deberta_v2", {"conv_kernel_size": "3"}, "conv_kernel_size"),
        ("deberta_v2", {"embedding_size": 32}, "narrower embeddings"),
        ("deberta_v2", {"attention_head_size": 8}, "heads of another size"),
        ("deberta_v2", {"pos_att_type": ["p2p"]}, "pos_att_type"),
        ("deberta_v2", {"pos_att_type": 3}, "pos_att_type"),
        ("deberta_v2", {"position_buckets": "16"}, "position_buckets"),
        ("deberta_v2", {"position_buckets": 2}, "2 buckets"),
        ("deberta_v2", {"position_buckets": 200}, "200 buckets"),
        ("deberta_v2", {"max_relative_positions": 0.5}, "max_relative_positions"),
        ("deberta_v2", {"type_vocab_size": -1}, "token_types is -1"),
        ("deberta_v2", {"is_decoder": True}, "made a decoder"),
    ],
)
def test_configs_that_are_refused(model: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        encoder_config_from_hf({**config_json(model), **change})


@pytest.mark.parametrize("model", ["modernbert", "deberta_v2"])
def test_weights_must_fit_the_config(model: str) -> None:
    for change, said in (
        ({"num_hidden_layers": 9, "layer_types": None}, r"layers\.\d"),
        ({"num_hidden_layers": 1, "layer_types": None}, "nothing uses"),
        ({"vocab_size": 121}, "shape"),
    ):
        with pytest.raises(UnsupportedModel, match=said):
            tiny(model, **change)
