"""Hidden states with PyTorch, and their pooling: the models behind the embedders, weights in float32.

Texts of one call lie one after another, without padding; each attends within itself alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from heedful.engine.torch_runner import build_model
from heedful.kernels.attention import Attend
from heedful.kernels.delta_rule import StatefulRecur
from heedful.kernels.text_attention import BidirectionalAttend, CausalTextAttend, DisentangledAttend
from heedful.models.bert import Bert
from heedful.models.carried import zero_state
from heedful.models.config import ModelConfig
from heedful.models.deberta import Deberta
from heedful.models.decoder import Decoder
from heedful.models.encoder_config import EncoderConfig
from heedful.models.gliclass import GLiClassHead
from heedful.models.heads import MlmHead, SequenceHead
from heedful.models.laya import LayaHead
from heedful.models.modernbert import ModernBert
from heedful.models.pooling import PoolingMode
from heedful.models.qwen3_5 import Qwen35
from heedful.weights.names import Weights, WeightsToPlace

Trunk = Bert | ModernBert | Deberta
Module = TypeVar("Module", bound=Trunk | SequenceHead | MlmHead | LayaHead | GLiClassHead)


def make_encoder(config: EncoderConfig, weights: Weights, *, threads: int) -> Trunk:
    """Sets PyTorch's thread count for the whole process, as the torch runner does. Raises as `build_encoder`."""
    torch.set_num_threads(threads)
    trunk = build_encoder(config, weights)
    if isinstance(trunk, Deberta):
        trunk.fix_positions()
    return trunk


def make_decoder(config: ModelConfig, weights: Weights, *, threads: int) -> Decoder | Qwen35:
    """Sets PyTorch's thread count for the whole process. Raises as `torch_runner.build_model`."""
    torch.set_num_threads(threads)
    return build_model(config, weights)


def build_encoder(config: EncoderConfig, weights: Weights) -> Trunk:
    """The family's trunk in float32 with these weights. Raises UnsupportedModel when one is missing, extra or
    misshapen.
    """
    families: dict[str, type[Trunk]] = {"bert": Bert, "modernbert": ModernBert, "deberta-v2": Deberta}
    with torch.device("meta"):
        trunk = families[config.family](config)
    return place_weights(trunk, weights)


def place_weights(module: Module, weights: Weights) -> Module:
    """A module made on the meta device, with its weights in float32. Raises as `build_encoder`."""
    module.to_empty(device="cpu").requires_grad_(False).eval()  # in place
    to_place = WeightsToPlace(weights)
    for name, slot in module.weight_slots():
        to_place.take(name, tuple(slot.shape)).to_float32(out=slot.numpy())
    to_place.require_none_left()
    return module


def run_trunk(trunk: Trunk, ids: Tensor, positions: Tensor, types: Tensor, lengths: list[int]) -> Tensor:
    """Hidden states (T, C) of texts of these lengths that lie one after another; ids, positions, types int64 (T,)."""
    if isinstance(trunk, Deberta):
        return trunk(ids, positions, types, DisentangledAttend(lengths))  # type: ignore[no-any-return]
    return trunk(ids, positions, types, BidirectionalAttend(lengths))  # type: ignore[no-any-return]


@torch.inference_mode()
def embed_with_encoder(trunk: Trunk, texts: Sequence[Sequence[int]], mode: PoolingMode) -> npt.NDArray[np.float32]:
    """Token ids of texts → pooled last hidden states (texts, C), not normalised."""
    ids, positions, lengths = packed(texts)
    return pool(run_trunk(trunk, ids, positions, torch.zeros_like(ids), lengths), lengths, mode).numpy()


@torch.inference_mode()
def embed_with_decoder(
    decoder: Decoder | Qwen35, texts: Sequence[Sequence[int]], mode: PoolingMode
) -> npt.NDArray[np.float32]:
    """Token ids of texts → pooled hidden states after the last norm (texts, C), not normalised."""
    ids, positions, lengths = packed(texts)
    hidden = run_decoder(decoder, ids, positions, CausalTextAttend(lengths), lengths)
    return pool(hidden, lengths, mode).numpy()


def run_decoder(
    decoder: Decoder | Qwen35, ids: Tensor, positions: Tensor, attend: Attend, lengths: list[int]
) -> Tensor:
    """Hidden states (T, C) of texts of these lengths that lie one after another, each from its beginning."""
    if isinstance(decoder, Qwen35):
        recur = StatefulRecur(lengths, [zero_state(decoder.config) for _ in lengths])
        return decoder(ids, positions, attend, recur)  # type: ignore[no-any-return]
    return decoder(ids, positions, attend)  # type: ignore[no-any-return]


def pool(hidden: Tensor, lengths: list[int], mode: PoolingMode) -> Tensor:
    """Hidden states (T, C) of texts of these lengths → one vector a text (texts, C)."""
    parts = torch.split(hidden, lengths)
    if mode == "mean":
        return torch.stack([part.mean(dim=0) for part in parts])
    return torch.stack([part[0 if mode == "cls" else -1] for part in parts])


def packed(texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, list[int]]:
    """Token ids and positions int64 (T,), and the lengths."""
    lengths = [len(text) for text in texts]
    ids = torch.tensor([token for text in texts for token in text])
    return ids, torch.cat([torch.arange(length) for length in lengths]), lengths
