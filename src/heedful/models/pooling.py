"""How the hidden states of a text become one vector, and how much of a text a model takes. Data, no arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

PoolingMode = Literal["mean", "cls", "last"]
"""Of all tokens the mean, or the first one's state, or the last one's."""


@dataclass(frozen=True)
class Pooling:
    """What a sentence model was trained with; the defaults are for a model that says nothing."""

    mode: PoolingMode = "mean"
    normalize: bool = False
    """The model's own vectors have length 1."""
    max_tokens: int | None = None
    """The longest text, its marks at both ends included; None: the model's context."""
    lowercase: bool = False
    """Texts are put in lower case before the tokenizer sees them."""

    def with_mode(self, mode: PoolingMode | None) -> Pooling:
        """The same, pooled otherwise; None: as it is."""
        return self if mode is None else replace(self, mode=mode)
