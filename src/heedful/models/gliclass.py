"""What stands on a GLiClass model's encoders: tokens' states to a text's and its labels' vectors, and those to logits.

    labels = label_states(config, ids, hidden)          # (T,), (T, C) → (labels, C)
    text = text_state(config, ids, hidden)              # → (1, C)
    logits = GLiClassHead(config)(text, labels)         # → (labels,)

`hidden` is of one text, without padding. The package gliclass pools `avg`, `max` and their kin over padding too, so
there a short text's scores in a batch differ from those it has alone; here they are always those it has alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heedful.models.bert import activate
from heedful.models.gliclass_config import MLP_WIDTH, GLiClassConfig, TextPooling
from heedful.models.layers import Linear

_EPSILON = 1e-8


def label_states(config: GLiClassConfig, ids: Tensor, hidden: Tensor) -> Tensor:
    """A uni-encoder's states of the labels that its marks begin, in their order."""
    starts = (ids == config.label_id).nonzero()[:, 0]
    begins = starts if config.from_mark else starts + 1
    if config.label_pooling == "first":
        return hidden[begins]
    end = _text_start(config, ids) if config.text_only else len(ids)
    ends = [*starts[1:].tolist(), end]
    spans = [hidden[begin:stop] for begin, stop in zip(begins.tolist(), ends, strict=True)]
    return torch.stack([span.sum(0) / max(1, len(span)) for span in spans])


def text_state(config: GLiClassConfig, ids: Tensor, hidden: Tensor, *, masked: bool = False) -> Tensor:
    """The text's state (1, C).

    Where a uni-encoder pools the text alone, the reference puts zeros after it, one for each token before it, and its
    models were trained with them in their means and maxima; `masked` leaves them out.
    """
    if not config.text_only or config.architecture == "bi-encoder":
        return pool_text(config.text_pooling, hidden)
    start = _text_start(config, ids)
    return pool_text(config.text_pooling, hidden[start:] if masked else F.pad(hidden[start:], (0, 0, 0, start)))


def pool_text(pooling: TextPooling, hidden: Tensor) -> Tensor:
    """(T, C) → (1, C)."""
    if pooling in ("first", "last"):
        return hidden[:1] if pooling == "first" else hidden[-1:]
    x = hidden.abs() if pooling.startswith("abs") else hidden
    if pooling.endswith("max"):
        return x.amax(0, keepdim=True)
    if pooling == "sum":
        return x.sum(0, keepdim=True)
    return x.square().mean(0, keepdim=True).sqrt() if pooling == "rms" else x.mean(0, keepdim=True)


def _text_start(config: GLiClassConfig, ids: Tensor) -> int:
    return int((ids == config.text_id).nonzero()[0, 0])


class Projector(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, config: GLiClassConfig, width: int) -> None:
        super().__init__()
        self.activation = config.activation
        self.up = Linear(width, config.projector_size)
        self.down = Linear(config.projector_size, config.encoder.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(activate(self.activation, self.up(x)))  # type: ignore[no-any-return]


class DotScorer(nn.Module):
    def forward(self, text: Tensor, labels: Tensor) -> Tensor:
        """(1, C), (labels, C) → (labels,), as of every scorer."""
        return labels @ text[0]


class MlpScorer(nn.Module):
    """Three layers over text and label side by side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [Linear(2 * width, MLP_WIDTH), Linear(MLP_WIDTH, MLP_WIDTH // 2), Linear(MLP_WIDTH // 2, 1)]
        )

    def forward(self, text: Tensor, labels: Tensor) -> Tensor:
        x = torch.cat([text.expand_as(labels), labels], dim=-1)
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)[:, 0]  # type: ignore[no-any-return]


class WeightedDotScorer(nn.Module):
    """Two projections of each: one as it is, one multiplied with the other side's; two layers over the three."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.text = Linear(width, 2 * width)
        self.label = Linear(width, 2 * width)
        self.up = Linear(3 * width, 4 * width)
        self.out = Linear(4 * width, 1)

    def forward(self, text: Tensor, labels: Tensor) -> Tensor:
        own, by = self.text(text).chunk(2, dim=-1)
        label_own, label_by = self.label(labels).chunk(2, dim=-1)
        x = torch.cat([own.expand_as(label_own), label_own, by * label_by], dim=-1)
        return self.out(F.relu(self.up(x)))[:, 0]  # type: ignore[no-any-return]


class GLiClassHead(nn.Module):
    def __init__(self, config: GLiClassConfig) -> None:
        super().__init__()
        self.config = config
        width = config.encoder.hidden_size
        self.text = Projector(config, width)
        self.label = Projector(config, width)
        if config.label_encoder is not None:
            self.from_label_encoder = Projector(config, config.label_encoder.hidden_size)
        kinds = {"mlp": MlpScorer, "weighted-dot": WeightedDotScorer}
        self.scorer = kinds[config.scorer](width) if config.scorer in kinds else DotScorer()
        self.logit_scale = nn.Parameter(torch.zeros(()))

    def project_labels(self, states: Tensor) -> Tensor:
        """States of labels (labels, C), in a bi-encoder as wide as its label encoder → their vectors (labels, C)."""
        if self.config.label_encoder is not None:
            states = self.from_label_encoder(states)
        return self._of_length_one(self.label(states))

    def forward(self, text: Tensor, labels: Tensor) -> Tensor:
        """A text's state (1, C) and its labels' vectors (labels, C) → logits (labels,)."""
        logits = cast(Tensor, self.scorer(self._of_length_one(self.text(text)), labels))
        return logits * self.logit_scale if self.config.scaled else logits

    def weight_slots(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by the name of weights/gliclass_names.py, with the parameter it belongs in."""
        yield from self.named_parameters()

    def _of_length_one(self, x: Tensor) -> Tensor:
        return x / (x.norm(dim=-1, keepdim=True) + _EPSILON) if self.config.normalize else x
