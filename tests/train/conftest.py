"""What several tests of training begin from: a tiny decoder trained on text, and tiny encoders with rows to decide."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from training_cases import quiet, small_settings, write_documents

from heedful.train.loop import begin

GOLDEN_LAYA = Path(__file__).parent.parent / "golden" / "decisions" / "laya"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def base_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers of width 32."""
    folder = tmp_path_factory.mktemp("base")
    more = {"model__qk_norm": False, "model__windows": "L", "model__context_len": 96, "run__steps": 2}
    begin(folder / "run", small_settings(write_documents(folder / "t.jsonl"), **more, run__eval_every=0), say=quiet)
    return folder / "run"


@pytest.fixture(scope="session")
def laya_base() -> Path:
    """A ModernBERT of three layers of width 64 with a head, options side by side, as the laya package wrote it."""
    return GOLDEN_LAYA / "parallel"


@pytest.fixture(scope="session")
def encoder_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of two layers of width 64, of random weights."""
    folder, width, draw = tmp_path_factory.mktemp("encoder"), 64, np.random.default_rng(0)
    shutil.copytree(GOLDEN_LAYA / "parallel" / "tokenizer", folder, dirs_exist_ok=True)
    config = {
        "model_type": "bert", "vocab_size": 500, "hidden_size": width, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 96, "max_position_embeddings": 128, "type_vocab_size": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"word_embeddings": (500, width), "position_embeddings": (128, width), "token_type_embeddings": (2, width)}
    tensors = {f"embeddings.{name}.weight": draw.normal(0, 0.3, shape) for name, shape in shapes.items()}
    for at in range(2):
        layer = f"encoder.layer.{at}"
        matrices = {f"attention.self.{name}": (width, width) for name in ("query", "key", "value")}
        matrices |= {"attention.output.dense": (width, width), "intermediate.dense": (96, width)}
        for name, shape in (matrices | {"output.dense": (width, 96)}).items():
            tensors[f"{layer}.{name}.weight"] = draw.normal(0, 0.2, shape)
            tensors[f"{layer}.{name}.bias"] = draw.normal(0, 0.1, shape[0])
    for name in ("embeddings", *(f"encoder.layer.{at}.{part}output" for at in range(2) for part in ("attention.", ""))):
        tensors |= {f"{name}.LayerNorm.weight": np.ones(width), f"{name}.LayerNorm.bias": np.zeros(width)}
    save_file({name: values.astype(np.float32) for name, values in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def decisions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """States of which one word tells whether money is asked back, who answers, and how urgent it is."""
    path, draw = tmp_path_factory.mktemp("decisions") / "rows.jsonl", random.Random(2)
    lines = []
    for number in range(240):
        refund = draw.random() < 0.5
        said = [*draw.choices(["order", "please", "house", "sea", "red"], k=3), "refund" if refund else "offer"]
        team = dict.fromkeys(draw.sample(["billing", "sales"], 2))
        question, expected = draw.choice(
            [
                ({"type": "choice", "instructions": "Who?", "criteria": team}, "billing" if refund else "sales"),
                ({"type": "score", "instructions": "Urgent?", "criteria": ["no", "some", "now"]}, 2 if refund else 0),
                ({"type": "noul", "instructions": "Money back?"}, refund),
            ]
        )
        state = f"{number} {' '.join(draw.sample(said, len(said)))}"
        lines.append(json.dumps({"state": state, "questions": {"q": question}, "expected": {"q": expected}}))
    path.write_text("".join(f"{line}\n" for line in lines))
    return path
