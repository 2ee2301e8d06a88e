"""Inverse frequencies against those recorded from transformers for real models' settings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from heedful.models.config import config_from_hf

CASES = json.loads((Path(__file__).parent.parent / "golden" / "attention" / "rope.json").read_text())
CASES = {name: case for name, case in CASES.items() if isinstance(case, dict) and "inv_freq" in case}


def test_all_kinds_are_recorded() -> None:
    assert {case["rope_parameters"]["rope_type"] for case in CASES.values()} == {"default", "linear", "llama3", "yarn"}


@pytest.mark.parametrize("name", CASES)
def test_inverse_frequencies(name: str) -> None:
    case = CASES[name]
    config = config_from_hf(
        {
            "model_type": "llama",
            "vocab_size": 8,
            "hidden_size": case["head_dim"],
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "intermediate_size": 8,
            "max_position_embeddings": case["max_position_embeddings"],
            "rope_parameters": case["rope_parameters"],
        }
    )
    assert config.rope is not None
    np.testing.assert_allclose(config.rope.inv_freq(), case["inv_freq"], rtol=1e-6)
    assert config.rope.attention_scaling == pytest.approx(case["attention_scaling"], rel=1e-6)
