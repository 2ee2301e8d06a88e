"""Training in words: the line of a step, the table of a dry run, the curve at the end. Numbers in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from heedful.models.config import ModelConfig


@dataclass(frozen=True)
class StepLine:
    """What a progress line shows of the steps since the last one."""

    step: int
    steps: int
    loss: float
    smoothed: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    peak_share: float
    """FLOP/s as a share of the machine's measured best."""
    visits: int
    """Of the step's forward pass."""
    seconds_left: float
    figures: Mapping[str, float] = field(default_factory=dict)
    """Further ones of the last step, by name."""


def progress_line(line: StepLine) -> str:
    width = len(f"{line.steps:,}")
    more = "".join(f"{name.replace('_', ' ')} {value:.4g} · " for name, value in line.figures.items())
    return (
        f"step {line.step:>{width},}/{line.steps:,} · loss {line.loss:.4f} (smoothed {line.smoothed:.4f}) · "
        f"{more}lr {line.lr:.2e} · grad {line.grad_norm:.2f} · {line.tokens_per_second:,.0f} tok/s · "
        f"{line.peak_share:.0%} of peak · {short(line.visits)} visits · {duration(line.seconds_left)} left"
    )


def training_flops(config: ModelConfig, tokens: int, visits: int) -> int:
    """Forward and backward of a model's own work: 6 a weight and token, 12 · head_dim a visit. What is computed again
    to save memory does not count.
    """
    return 6 * (config.linear_weights + config.head_weights) * tokens + 12 * config.head_dim * visits


def short(count: float) -> str:
    """1234567 → "1.23 M"."""
    for unit in ("", " k", " M", " G", " T"):
        if abs(count) < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:,.0f} P"


def duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


_LEVELS = " ▁▂▃▄▅▆▇█"


def loss_plot(losses: Sequence[float], *, columns: int = 72, rows: int = 8) -> str:
    """Losses of two steps or more as bars, each column the mean of its share of the steps."""
    assert len(losses) > 1, losses
    columns = min(columns, len(losses))
    edges = [len(losses) * i // columns for i in range(columns + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    heights = [(mean - low) / (high - low) * (rows * 8 - 1) + 1 if high > low else 1.0 for mean in means]
    lines = []
    for row in reversed(range(rows)):
        bars = "".join(_LEVELS[round(min(8.0, max(0.0, height - 8 * row)))] for height in heights)
        label = f"{high:8.3f}" if row == rows - 1 else f"{low:8.3f}" if row == 0 else " " * 8
        lines.append(f"{label} │{bars}".rstrip())
    return "\n".join([*lines, f"{'':8} └{'─' * columns}", f"{'':9} 1{f'{len(losses):,}':>{columns - 1}}"])
