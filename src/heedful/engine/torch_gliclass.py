"""GLiClass with PyTorch: token ids of texts and labels to logits, weights in float32. Texts of one call lie one after
another, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from heedful.engine.torch_embed import Trunk, packed, place_weights, run_trunk
from heedful.models.gliclass import GLiClassHead, label_states, pool_text, text_state
from heedful.models.gliclass_config import GLiClassConfig
from heedful.weights.names import Weights

Floats = npt.NDArray[np.float32]


def build_gliclass_head(config: GLiClassConfig, weights: Weights) -> GLiClassHead:
    """Weights by the names of weights/gliclass_names.py. Raises UnsupportedModel when one is missing or misshapen."""
    with torch.device("meta"):
        head = GLiClassHead(config)
    return place_weights(head, weights)


@torch.inference_mode()
def uni_logits(trunk: Trunk, head: GLiClassHead, masked: bool, texts: Sequence[Sequence[int]]) -> list[Floats]:
    """Token ids of labels and text together → of each text the logits of its labels. `masked`: see `text_state`."""
    return [
        head(
            text_state(head.config, ids, hidden, masked=masked),
            head.project_labels(label_states(head.config, ids, hidden)),
        ).numpy()
        for ids, hidden in _states(trunk, texts)
    ]


@torch.inference_mode()
def label_vectors(label_trunk: Trunk, head: GLiClassHead, labels: Sequence[Sequence[int]]) -> Floats:
    """Token ids of a bi-encoder's labels → their vectors (labels, C)."""
    states = [pool_text(head.config.text_pooling, hidden) for _, hidden in _states(label_trunk, labels)]
    return head.project_labels(torch.cat(states)).numpy()


@torch.inference_mode()
def bi_logits(
    trunk: Trunk, head: GLiClassHead, texts: Sequence[Sequence[int]], labels: Sequence[Floats]
) -> list[Floats]:
    """Token ids of texts, and of each its labels' vectors (labels, C) → of each text the logits of its labels."""
    return [
        head(text_state(head.config, ids, hidden), torch.from_numpy(vectors)).numpy()
        for (ids, hidden), vectors in zip(_states(trunk, texts), labels, strict=True)
    ]


def _states(trunk: Trunk, texts: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
    """Of each text its ids (T,) and last hidden states (T, C)."""
    ids, positions, lengths = packed(texts)
    hidden = run_trunk(trunk, ids, positions, torch.zeros_like(ids), lengths)
    return list(zip(torch.split(ids, lengths), torch.split(hidden, lengths), strict=True))
