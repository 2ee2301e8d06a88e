"""What a Laya decision model is made of, and one question as it reads it: plain data, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from heedful.models.encoder_config import EncoderConfig

QUESTION_TYPES = ("choice", "score", "noul")
"""By row of the type embedding."""
_HEAD_CHANNELS = 64
ACT_FACTS = 4
"""Numbers about the probabilities that the act head reads beside a hidden state."""
ACT_WIDTH = 256


@dataclass(frozen=True)
class LayaConfig:
    trunk: EncoderConfig
    head_layers: int
    actions: int | None = None
    """Outputs of the head that says whether to act on an answer; None: the checkpoint has no such head."""

    @property
    def head(self) -> EncoderConfig:
        """The layers between trunk and scorer: as BERT's with each norm before its part, and ReLU."""
        width = self.trunk.hidden_size
        return replace(
            self.trunk,
            family="bert",
            num_layers=self.head_layers,
            num_heads=max(1, width // _HEAD_CHANNELS),
            intermediate_size=4 * width,
            token_types=1,
            norm_eps=1e-5,
            activation="relu",
            windows=(),
            ropes=(),
            learned_positions=False,
            relative=None,
            convolution=None,
            gated_mlp=False,
        )


@dataclass(frozen=True)
class LayaLayout:
    """How a question is laid out for a model. Lengths are in tokens."""

    max_len: int
    """Of a question with its options and its state."""
    head_max_len: int
    """Of the question with its options, as far as they can be cut to it."""
    positions: int
    """The trunk has so many."""
    parallel: bool = False
    """Options begin at one position and do not see each other: their order cannot matter."""


@dataclass(frozen=True)
class LayaSequence:
    """One question with its options and its state, as tokens."""

    ids: Sequence[int]
    markers: Sequence[int]
    """Place in `ids` of each option's mark, where its logit is read."""
    type: int
    """Index in QUESTION_TYPES."""
    positions: Sequence[int] | None = None
    """By token; None: 0, 1, …"""
    options: Sequence[int] | None = None
    """By token: which option it belongs to, from 1, or 0: none. Tokens of different options do not see each other in
    the trunk. None: all tokens see each other.
    """

    def __post_init__(self) -> None:
        for of_token in (self.positions, self.options):
            assert of_token is None or len(of_token) == len(self.ids), (len(of_token), len(self.ids))
        assert (self.positions is None) == (self.options is None), "an order-invariant layout has both"
