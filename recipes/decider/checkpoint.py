"""The folder that is shipped, in Laya's layout on an encoder that heedful has by an alias: written fresh, then trained.

Training begins from a fresh folder that the engine itself reads, so that network, packing and names are the engine's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from recipes.decider.lora import ALPHA, RANK
from safetensors.torch import save_file
from torch import Tensor, nn

from heedful.decide.calibrate import TYPES, Calibration
from heedful.weights.load_laya import LoadedLaya

TRUNK = "minilm"
WIDTH, HEAD_LAYERS = 384, 1
HEAD_WIDTH = 64
MAX_LEN, HEAD_MAX_LEN = 4096, 3072
"""Room for 255 options. They share their places, so that the trunk's 512 bound question, longest option and state."""
SEED = 7


def write_fresh(folder: Path) -> None:
    """With random weights, and no update of the trunk."""
    torch.manual_seed(SEED)
    tensors: dict[str, Tensor] = {"type_emb.weight": 0.02 * torch.randn(len(TYPES), WIDTH)}
    for layer in range(HEAD_LAYERS):
        block = nn.TransformerEncoderLayer(WIDTH, WIDTH // HEAD_WIDTH, 4 * WIDTH, norm_first=True)
        tensors |= {f"head.layers.{layer}.{name}": value for name, value in block.state_dict().items()}
    scorer = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
    tensors |= {f"scorer.{name}": value for name, value in scorer.state_dict().items()}
    write(folder, tensors, Calibration())


def write(folder: Path, tensors: Mapping[str, Tensor], calibration: Calibration) -> None:
    """Weights as float16."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "encoder": TRUNK,
        "trunk": "alias",
        "head_layers": HEAD_LAYERS,
        "act_costs": {},
        "max_len": MAX_LEN,
        "head_max_len": HEAD_MAX_LEN,
        "option_layout": "parallel",
        "temperature": [round(calibration.by_type.get(kind, 1.0), 4) for kind in TYPES],
        "temperature_by_options": {name: round(value, 4) for name, value in calibration.by_options.items()},
        "lora_r": RANK,
        "lora_alpha": ALPHA,
    }
    halves = {name: tensor.detach().half().contiguous() for name, tensor in tensors.items()}
    save_file(halves, folder / "model.safetensors")
    (folder / "rl_agent_config.json").write_text(f"{json.dumps(settings, indent=1)}\n", encoding="utf-8")


def head_tensors(head: nn.Module, loaded: LoadedLaya) -> dict[str, Tensor]:
    """By the names they were read under."""
    ours = dict(head.named_parameters())
    assert set(ours) == set(loaded.head), set(ours) ^ set(loaded.head)
    return {stored.name: ours[name] for name, stored in loaded.head.items()}
