"""Every decoder family, dense and without a cache, against logits and continuations recorded from transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from heedful.engine.torch_runner import build_decoder
from heedful.kernels.attention import DenseAttend
from heedful.models.config import config_from_hf
from heedful.models.decoder import Decoder
from heedful.weights import names
from heedful.weights.safetensors_file import read_safetensors

GOLDEN = Path(__file__).parent.parent / "golden" / "tiny_decoders"
FAMILIES = sorted(folder.name for folder in GOLDEN.iterdir())
LOGIT_TOLERANCE = 5e-4


def tiny_decoder(family: str, config_name: str = "config.json") -> Decoder:
    config = config_from_hf(json.loads((GOLDEN / family / config_name).read_text()))
    return build_decoder(config, names.from_hf(read_safetensors(GOLDEN / family), config))


def dense_logits(decoder: Decoder, token_ids: torch.Tensor) -> torch.Tensor:
    """(B, T) → (B, T, V), the B rows packed as separate documents of one call."""
    batch, length = token_ids.shape
    positions = torch.arange(length).repeat(batch)
    hidden = decoder(token_ids.reshape(-1).long(), positions, DenseAttend([length] * batch))
    return decoder.logits(hidden).view(batch, length, -1)


def test_golden_covers_the_families() -> None:
    assert len(FAMILIES) == 9


@pytest.mark.parametrize("config_name", ["config.json", "config.v4.json"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_recorded_ones(family: str, config_name: str) -> None:
    expected = load_file(GOLDEN / family / "golden.safetensors")
    logits = dense_logits(tiny_decoder(family, config_name), expected["input_ids"])
    assert (logits - expected["logits"]).abs().max() < LOGIT_TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_continuations_equal_the_recorded_ones(family: str) -> None:
    expected = load_file(GOLDEN / family / "golden.safetensors")
    decoder = tiny_decoder(family)
    ids = expected["input_ids"].long()
    for _ in range(expected["greedy_ids"].shape[1]):
        ids = torch.cat((ids, dense_logits(decoder, ids)[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert ids[:, expected["input_ids"].shape[1] :].tolist() == expected["greedy_ids"].tolist()
