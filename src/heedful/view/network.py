"""The plain PyTorch model that a view reads attention from, loaded beside the engine that answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from heedful import hardware
from heedful.engine.pooled import has_torch
from heedful.errors import UnsupportedModel
from heedful.weights.load import load

if TYPE_CHECKING:
    from heedful.models.decoder import Decoder
    from heedful.models.qwen3_5 import Qwen35


def require_torch() -> None:
    """Raises UnsupportedModel, with the remedy."""
    if not has_torch():
        raise UnsupportedModel(
            "a view rebuilds attention with PyTorch, which is not installed", "pip install 'heedful[torch]'"
        )


def load_network(model: str) -> Decoder | Qwen35:
    """In float32, 4 bytes a weight. Raises as `weights.load`, and UnsupportedModel where PyTorch or memory lacks."""
    require_torch()
    loaded = load(model)
    needed, free = (
        4 * sum(tensor.num_weights for tensor in loaded.weights.values()),
        hardware.detect().free_memory_bytes,
    )
    if free and needed > free:
        raise UnsupportedModel(
            f"a view of {model} needs {needed / 1e9:.1f} GB for float32 weights, and {free / 1e9:.1f} GB are free",
            "Take a smaller model, or close other programs.",
        )
    from heedful.engine.torch_runner import build_model  # torch takes seconds to import

    return build_model(loaded.config, loaded.weights)
