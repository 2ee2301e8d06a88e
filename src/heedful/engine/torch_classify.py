"""Logits of classes and of tokens with PyTorch: a trunk and the head that stands on it, weights in float32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from heedful.engine.torch_embed import Trunk, packed, place_weights, pool, run_trunk
from heedful.models.head_config import MlmHeadConfig, SequenceHeadConfig
from heedful.models.heads import MlmHead, SequenceHead
from heedful.weights.names import Weights


def build_sequence_head(config: SequenceHeadConfig, weights: Weights) -> SequenceHead:
    """Weights by the names of weights/head_names.py. Raises UnsupportedModel when one is missing or misshapen."""
    with torch.device("meta"):
        head = SequenceHead(config)
    return place_weights(head, weights)


def build_mlm_head(config: MlmHeadConfig, weights: Weights) -> MlmHead:
    """Weights by the names of weights/head_names.py. Raises UnsupportedModel when one is missing or misshapen."""
    with torch.device("meta"):
        head = MlmHead(config)
    return place_weights(head, weights)


@torch.inference_mode()
def class_logits(
    trunk: Trunk, head: SequenceHead, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]]
) -> npt.NDArray[np.float32]:
    """Token ids of texts, and of each token whether it is of a pair's second text (1) or not (0) → (texts, classes)."""
    ids, positions, lengths = packed(texts)
    kinds = torch.tensor([kind for text in types for kind in text])
    hidden = run_trunk(trunk, ids, positions, kinds, lengths)
    return head(pool(hidden, lengths, head.config.pooling)).numpy()  # type: ignore[no-any-return]


@torch.inference_mode()
def token_logits(
    trunk: Trunk, head: MlmHead, ids: Tensor, positions: Tensor, types: Tensor, lengths: list[int]
) -> Tensor:
    """Of texts that lie one after another, ids, positions and types int64 (T,): what stands at each place, (T, V)."""
    return head(run_trunk(trunk, ids, positions, types, lengths), trunk.embed.weight)  # type: ignore[no-any-return]
