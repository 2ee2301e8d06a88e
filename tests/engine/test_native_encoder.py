"""BERT's trunk and Laya's head on the native kernels, against the plain PyTorch modules with the same weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from heedful.decide import Choice, Noul, Score
from heedful.decide.laya import Laya
from heedful.decide.load import BUILT_IN, BUILT_IN_FOLDER, default_decider
from heedful.engine.encoder import Encoder
from heedful.engine.native_encoder import NativeEncoder, runs_natively
from heedful.engine.torch_embed import embed_with_encoder
from heedful.engine.torch_laya import laya_logits, make_laya
from heedful.errors import UnsupportedModel
from heedful.kernels import native
from heedful.models.bert import Bert
from heedful.models.encoder_config import EncoderConfig
from heedful.models.laya import LayaHead, LayaNetwork
from heedful.models.laya_config import LayaConfig, LayaSequence
from heedful.models.pooling import PoolingMode
from heedful.weights.load_laya import load_laya
from heedful.weights.names import Weights
from heedful.weights.tensor import StoredTensor, fold

KERNELS = pytest.importorskip("heedful._native")

GOLDEN = Path(__file__).parent.parent / "golden/encoders"
VARIANTS = KERNELS.variants()
CONFIGS = [
    EncoderConfig("bert", 50, 64, 2, 4, 96, 40, 2),
    EncoderConfig("bert", 50, 36, 3, 4, 70, 40, 2, activation="gelu_tanh", norm_eps=1e-5),
    EncoderConfig("bert", 50, 15, 1, 3, 21, 40, 1, activation="relu"),
]
TEXTS = [[7, 8, 9], [3], list(range(1, 38)), [5, 6, 7, 8, 9, 10, 11, 12], list(range(10, 40))]
MODES: Sequence[PoolingMode] = ("mean", "cls", "last")


def stored(name: str, tensor: torch.Tensor) -> StoredTensor:
    values = np.ascontiguousarray(tensor.detach().numpy())
    rows, columns = fold(values.shape)
    return StoredTensor(name, "F32", values.shape, values.view(np.uint8).reshape(rows, 4 * columns))


def weights_of(module: Any) -> Weights:
    return {name: stored(name, slot) for name, slot in module.weight_slots()}


def random_bert(config: EncoderConfig) -> Bert:
    torch.manual_seed(0)
    bert = Bert(config).eval().requires_grad_(False)
    for parameter in bert.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    return bert


def random_laya(config: LayaConfig) -> LayaNetwork:
    head = LayaHead(config).eval().requires_grad_(False)
    network = LayaNetwork(random_bert(config.trunk), head)
    for parameter in head.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    return network


def native_laya(config: LayaConfig, network: LayaNetwork, **options: Any) -> NativeEncoder:
    trunk, head = (weights_of(part) for part in (network.trunk, network.head))
    return NativeEncoder(config.trunk, trunk, laya=(config, head), **{"threads": 2, **options})


def sequences(*, apart: bool) -> list[LayaSequence]:
    """Three questions; the options' marks stand in another order than the tokens once."""
    made = []
    for length, marks, kind in ((20, (3, 6, 11), 0), (9, (2, 4), 2), (33, (9, 4), 1)):
        ids = [(7 * at + length) % 50 for at in range(length)]
        if not apart:
            made.append(LayaSequence(ids, marks, kind))
            continue
        begins = sorted(marks)
        ends = [*begins[1:], begins[-1] + 3]
        options, positions = [0] * length, list(range(length))
        for number, (begin, end) in enumerate(zip(begins, ends, strict=True), 1):
            options[begin:end] = [number] * (end - begin)
            positions[begin:end] = range(begins[0], begins[0] + end - begin)
        made.append(LayaSequence(ids, marks, kind, positions, options))
    return made


# ---- the trunk --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: str(c.hidden_size))
def test_pooled_states_are_those_of_the_plain_model(config: EncoderConfig, variant: str) -> None:
    bert = random_bert(config)
    encoder = NativeEncoder(config, weights_of(bert), threads=2, variant=variant)
    for mode in MODES:
        expected = embed_with_encoder(bert, TEXTS, mode)
        found = encoder.embed(TEXTS, mode)
        assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("panel_format", [None, "w8", "w6", "w4"])
def test_company_and_threads_change_no_bit(panel_format: str | None) -> None:
    """130 texts, so that there are more blocks than threads and blocks hold parts of texts."""
    bert = random_bert(CONFIGS[0])
    texts = [*TEXTS, *[[(3 * i + j) % 50 for j in range(1 + i % 40)] for i in range(125)]]
    encoders = [
        NativeEncoder(CONFIGS[0], weights_of(bert), threads=threads, panel_format=panel_format) for threads in (1, 2, 3)
    ]
    for mode in MODES:
        together = [encoder.embed(texts, mode) for encoder in encoders]
        assert all(np.array_equal(together[0], other) for other in together)
        for place in (0, 1, 2, 4, 129):
            np.testing.assert_array_equal(encoders[1].embed([texts[place]], mode)[0], together[0][place])


@pytest.mark.parametrize(("panel_format", "error"), [("w8", 0.02), ("w6", 0.05), ("w4", 0.2)])
def test_packed_weights_lose_what_their_format_loses(panel_format: str, error: float) -> None:
    bert = random_bert(CONFIGS[0])
    encoder = NativeEncoder(CONFIGS[0], weights_of(bert), threads=1, panel_format=panel_format)
    expected = embed_with_encoder(bert, TEXTS, "mean")
    assert 0 < np.linalg.norm(encoder.embed(TEXTS, "mean") - expected) / np.linalg.norm(expected) < error
    weights = CONFIGS[0].matrix_weights
    block_bytes = {"w8": 272, "w6": 288, "w4": 160}[panel_format]
    assert encoder.saved_bytes == 4 * weights - weights * block_bytes // 256


def test_real_vectors_are_the_recorded_ones(minilm_dir: Path) -> None:
    """Unlike test_encoder.py's, for each variant."""
    sentences = json.loads((GOLDEN / "minilm/sentences.json").read_text())["sentences"]
    expected = load_file(GOLDEN / "minilm/golden.safetensors")["embeddings"]
    encoder = Encoder.load(str(minilm_dir), threads=2)
    assert isinstance(encoder._run.__self__, NativeEncoder)  # type: ignore[attr-defined]
    found = encoder.embed([one["text"] for one in sentences], truncate=True).vectors
    assert np.abs(found - expected).max() < 1e-5


# ---- Laya's head ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_logits_are_those_of_the_plain_network(variant: str, apart: bool, layers: int) -> None:
    config = LayaConfig(replace(CONFIGS[0], hidden_size=128, num_heads=4), layers, actions=3)
    network, asked = random_laya(config), sequences(apart=apart)
    expected = [logit for of in laya_logits(network, asked) for logit in of]
    encoder = native_laya(config, network, variant=variant)
    found = [logit for of in encoder.laya_logits(asked) for logit in of]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    alone = [encoder.laya_logits([one])[0] for one in asked]
    assert [logit for of in alone for logit in of] == found


def test_options_that_see_each_other_answer_otherwise() -> None:
    """What the masks are for: without them the same tokens give other logits."""
    config = LayaConfig(CONFIGS[0], 1)
    encoder = native_laya(config, random_laya(config))
    (masked,) = encoder.laya_logits(sequences(apart=True)[:1])
    seen = replace(sequences(apart=True)[0], options=[0] * 20)
    (open_to_all,) = encoder.laya_logits([seen])
    assert max(abs(a - b) for a, b in zip(masked, open_to_all, strict=True)) > 1e-3


def test_the_built_in_decider_is_the_plain_network(minilm_dir: Path) -> None:
    loaded = load_laya(BUILT_IN_FOLDER)
    network = make_laya(loaded.config, loaded.trunk, loaded.head, updates=loaded.updates, threads=1)
    decider = Laya.load(BUILT_IN, threads=2)
    assert isinstance(decider._run.__self__, NativeEncoder)  # type: ignore[attr-defined]
    state = "I was charged twice for order 88 and nobody answers."
    asked = [
        Choice("team", ["billing", "returns", "sales"], "Who?"),
        Noul("angry"),
        Score("anger", ["calm", "furious"]),
    ]
    packed = decider.packed(state, asked)
    expected = laya_logits(network, [packed[question.name].sequence for question in asked])
    for found, right in zip(decider.logits(state, asked), expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-5 * np.abs(right).max())


# ---- without torch, and what is refused -------------------------------------------------------------------------


def test_which_models_run_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs_natively(CONFIGS[0])
    assert not runs_natively(replace(CONFIGS[0], family="modernbert"))
    monkeypatch.setattr(native, "is_built", lambda: False)
    assert not runs_natively(CONFIGS[0])


def test_without_torch_the_built_in_decider_answers(monkeypatch: pytest.MonkeyPatch, minilm_dir: Path) -> None:
    monkeypatch.setattr("heedful.engine.pooled.has_torch", lambda: False)
    monkeypatch.setattr("heedful.decide.load.has_torch", lambda: False)
    assert default_decider() == BUILT_IN
    assert Laya.load(BUILT_IN, threads=1).logits("It is broken", [Noul("broken", "Is it broken?")])
    with pytest.raises(UnsupportedModel, match="runs on PyTorch"):
        Laya.load(str(GOLDEN.parent / "decisions/laya/sequential"))


def test_weights_that_do_not_belong_are_refused() -> None:
    weights = weights_of(random_bert(CONFIGS[0]))
    lacking = {name: tensor for name, tensor in weights.items() if name != "layers.1.mlp.up.bias"}
    with pytest.raises(UnsupportedModel, match=r"no weight for layers\.1\.mlp\.up\.bias"):
        NativeEncoder(CONFIGS[0], lacking, threads=1)
    with pytest.raises(UnsupportedModel, match="nothing uses"):
        NativeEncoder(CONFIGS[0], {**weights, "more.weight": weights["embed.weight"]}, threads=1)
    with pytest.raises(UnsupportedModel, match="shape"):
        NativeEncoder(replace(CONFIGS[0], vocab_size=51), weights, threads=1)


def test_the_kernels_refuse_what_reaches_beyond_their_tables() -> None:
    kernels = NativeEncoder(CONFIGS[0], weights_of(random_bert(CONFIGS[0])), threads=1)._encoder
    none, out = np.empty(0, np.int32), np.empty((2, 64), np.float32)

    def run(ids: list[int], positions: list[int], starts: list[int], wanted: list[int], kinds: list[int]) -> None:
        of = [np.array(x, np.int32) for x in (ids, positions, [0] * len(ids), starts, kinds, wanted)]
        kernels.run(of[0], of[1], of[2], none, of[3], of[4], of[5], out)

    run([1, 2], [0, 1], [0, 2], [], [0])
    for wrong in (
        ([50, 2], [0, 1], [0, 2], [], [0]),
        ([1, -1], [0, 1], [0, 2], [], [0]),
        ([1, 2], [0, 40], [0, 2], [], [0]),
        ([1, 2], [0, 1], [0, 1], [], [0]),
        ([1, 2], [0, 1], [0, 2, 2], [], [0, 0]),
        ([1, 2], [0, 1], [0, 2], [], [0, 0]),
        ([1, 2], [0, 1], [0, 2], [1, 0], [0]),
        ([1, 2], [0, 1], [0, 2], [0, 2], [0]),
        ([1, 2], [0, 1], [0, 2], [0], [0]),
    ):
        with pytest.raises(ValueError, match=r".+"):
            run(*wrong)
