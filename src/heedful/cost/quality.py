"""What a setting that changes the output was measured to cost in quality. Numbers are measured, or there are none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Quality:
    """Against the same weights computed in float32 with exact keys and values."""

    mean_kld: float
    p99_kld: float
    mean_delta_nll: float
    needle_recall: float | None
    """Share of planted facts found again; None: not measured."""
    measured_on: str


_ALICE = "Alice's Adventures in Wonderland, chapter I, {} tokens, native kernels with 8-bit activations"

# (model alias, KV format) as the native runner computes them; docs/kernels.md says how
_MEASURED = {
    ("smollm2", "f16"): Quality(0.0019, 0.0088, 0.0037, None, _ALICE.format("1,987")),
    ("smollm2", "q8"): Quality(0.0024, 0.0120, 0.0036, None, _ALICE.format("1,987")),
    ("gemma3-270m", "f16"): Quality(0.0017, 0.0074, 0.0026, None, _ALICE.format("999")),
    ("gemma3-270m", "q8"): Quality(0.0051, 0.0283, 0.0102, None, _ALICE.format("999")),
}


def measured_quality(model: str, kv_format: str) -> Quality | None:
    """None where nothing was measured; nothing is to be measured for "f32", which changes no output."""
    return _MEASURED.get((model, kv_format))
