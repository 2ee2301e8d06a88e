"""Rotary positions as numbers: which angle each channel pair turns per position. Numpy only; both runners read it.

A rotary embedding (RoFormer, arXiv:2104.09864) turns channel pair i of a head by position × inv_freq[i]. Long-context
variants change inv_freq: `linear` (arXiv:2306.15595) divides all, `llama3` divides the slow ones and blends between,
`yarn` (arXiv:2309.00071) blends by wavelength and also scales cos and sin by an attention factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import isfinite

import numpy as np
import numpy.typing as npt

from heedful.errors import UnsupportedModel


@dataclass(frozen=True)
class Rope:
    """One layer kind's rotary positions. Pairs are (i, i + rotary_dim/2), the "half-split" order."""

    rotary_dim: int
    """Channels of a head that turn; the rest pass through."""
    theta: float = 10000.0
    scaling: str = "default"
    factor: float = 1.0
    original_context_len: int = 0
    """Context the model was first trained with (llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: round the blend's bounds to whole channels."""
    attention_factor: float | None = None
    """yarn: multiplies cos and sin; None: 0.1·ln(factor) + 1."""
    freq_divisors: tuple[float, ...] = ()
    """GGUF's `rope_freqs`: divide each inv_freq by its own number (how llama3 scaling is stored there)."""

    @property
    def attention_scaling(self) -> float:
        if self.scaling != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def __post_init__(self) -> None:
        divisors_ok = all(isfinite(d) and d > 0 for d in self.freq_divisors)
        if not (isfinite(self.theta) and self.theta > 1 and isfinite(self.factor) and self.factor > 0 and divisors_ok):
            raise UnsupportedModel(
                f"rotary base {self.theta}, factor {self.factor} are impossible", "The file is damaged."
            )
        if self.scaling in ("llama3", "yarn") and self.original_context_len < 1:
            raise UnsupportedModel(f"{self.scaling} lacks the original context length", "The file is incomplete.")

    def inv_freq(self) -> npt.NDArray[np.float64]:
        """Radians per position, (rotary_dim / 2,)."""
        plain = 1.0 / self.theta ** (np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim)
        if self.freq_divisors:
            return plain / np.asarray(self.freq_divisors, dtype=np.float64)
        if self.scaling == "linear":
            return plain / self.factor
        if self.scaling == "llama3":
            return self._llama3(plain)
        if self.scaling == "yarn":
            return self._yarn(plain)
        assert self.scaling == "default", self.scaling
        return plain

    def _llama3(self, plain: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        turns = self.original_context_len * plain / (2 * math.pi)  # full turns within the original context
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        return keep * plain + (1 - keep) * plain / self.factor

    def _yarn(self, plain: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        low, high = self._channel_of(self.beta_fast), self._channel_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        ramp = (np.arange(self.rotary_dim // 2) - low) / max(high - low, 0.001)
        keep = 1 - np.clip(ramp, 0.0, 1.0)
        turning: npt.NDArray[np.float64] = keep * plain + (1 - keep) * plain / self.factor
        return turning

    def _channel_of(self, turns: float) -> float:
        """The (fractional) channel pair that makes `turns` full turns within the original context."""
        wavelength = self.original_context_len / (turns * 2 * math.pi)
        return self.rotary_dim * math.log(wavelength) / (2 * math.log(self.theta))
