"""A view of a model with recurrent layers shows its attention layers; what it expects next is the recorded answer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from heedful.engine.torch_runner import build_hybrid
from heedful.models.config import config_from_hf
from heedful.view.analysis import analyse
from heedful.view.sampled import choose_samples
from heedful.weights import names
from heedful.weights.safetensors_file import read_safetensors

GOLDEN = Path(__file__).parent.parent / "golden" / "qwen3_5" / "lm"


def test_attention_layers_of_a_hybrid() -> None:
    config = config_from_hf(json.loads((GOLDEN / "config.json").read_text()))
    network = build_hybrid(config, names.from_hf(read_safetensors(GOLDEN), config))
    golden = load_file(GOLDEN / "golden.safetensors")
    prompt, answer = golden["input_ids_130"][0].tolist(), golden["greedy_130"][0].tolist()
    ids = [*prompt, *answer] if answer[: len(prompt)] != prompt else answer
    layers = len(config.windows)
    assert 0 < layers < config.num_layers
    samples = choose_samples(len(prompt), len(ids) - 1, pages=3, layers=layers)
    found = analyse(network, ids, samples, len(prompt), lambda layer, at: np.ones((1, at + 1), dtype=bool))
    likeliest = {at: pairs[0][0] for at, pairs in zip(samples.queries, found.predicted, strict=True)}
    for at in range(len(prompt), len(ids) - 1):
        assert likeliest[at] == ids[at + 1]
    assert found.heads.entropy.shape == (layers, config.num_heads)
    assert found.heads.kept == pytest.approx(1, abs=1e-4)
    assert len(found.lens) == config.num_layers
