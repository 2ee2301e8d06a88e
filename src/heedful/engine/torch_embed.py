"""Hidden states with PyTorch, and their pooling: the models behind the embedders, weights in float32.

Texts of one call lie one after another, without padding; each attends within itself alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from heedful.engine.torch_runner import build_decoder
from heedful.kernels.text_attention import BidirectionalAttend, CausalTextAttend
from heedful.models.bert import Bert
from heedful.models.config import ModelConfig
from heedful.models.decoder import Decoder
from heedful.models.encoder_config import EncoderConfig
from heedful.models.pooling import PoolingMode
from heedful.weights.names import Weights, WeightsToPlace


def make_encoder(config: EncoderConfig, weights: Weights, *, threads: int) -> Bert:
    """Sets PyTorch's thread count for the whole process, as the torch runner does. Raises as `build_bert`."""
    torch.set_num_threads(threads)
    return build_bert(config, weights)


def make_decoder(config: ModelConfig, weights: Weights, *, threads: int) -> Decoder:
    """Sets PyTorch's thread count for the whole process. Raises as `torch_runner.build_decoder`."""
    torch.set_num_threads(threads)
    return build_decoder(config, weights)


def build_bert(config: EncoderConfig, weights: Weights) -> Bert:
    """A Bert in float32 with these weights. Raises UnsupportedModel when one is missing, extra or misshapen."""
    with torch.device("meta"):
        bert = Bert(config)
    bert = bert.to_empty(device="cpu").requires_grad_(False).eval()
    to_place = WeightsToPlace(weights)
    for name, slot in bert.weight_slots():
        to_place.take(name, tuple(slot.shape)).to_float32(out=slot.numpy())
    to_place.require_none_left()
    return bert


@torch.inference_mode()
def embed_with_encoder(bert: Bert, texts: Sequence[Sequence[int]], mode: PoolingMode) -> npt.NDArray[np.float32]:
    """Token ids of texts → pooled last hidden states (texts, C), not normalised."""
    ids, positions, lengths = _packed(texts)
    hidden = bert(ids, positions, torch.zeros_like(ids), BidirectionalAttend(lengths))
    return pool(hidden, lengths, mode).numpy()


@torch.inference_mode()
def embed_with_decoder(decoder: Decoder, texts: Sequence[Sequence[int]], mode: PoolingMode) -> npt.NDArray[np.float32]:
    """Token ids of texts → pooled hidden states after the last norm (texts, C), not normalised."""
    ids, positions, lengths = _packed(texts)
    hidden = decoder(ids, positions, CausalTextAttend(lengths))
    return pool(hidden, lengths, mode).numpy()


def pool(hidden: Tensor, lengths: list[int], mode: PoolingMode) -> Tensor:
    """Hidden states (T, C) of texts of these lengths → one vector a text (texts, C)."""
    parts = torch.split(hidden, lengths)
    if mode == "mean":
        return torch.stack([part.mean(dim=0) for part in parts])
    return torch.stack([part[0 if mode == "cls" else -1] for part in parts])


def _packed(texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, list[int]]:
    """Token ids and positions int64 (T,), and the lengths."""
    lengths = [len(text) for text in texts]
    ids = torch.tensor([token for text in texts for token in text])
    return ids, torch.cat([torch.arange(length) for length in lengths]), lengths
