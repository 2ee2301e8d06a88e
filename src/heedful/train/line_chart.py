"""Lines over steps as one inline SVG: axes with round numbers, a line or two a run. Numbers in, markup out; colours are
the page's, by class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10

WIDTH, HEIGHT = 400, 220
"""In the units of the drawing; on a phone one is about a pixel, so that its text stays readable."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 8, 24
_MOST_POINTS = 300
"""Of a line; more would not be seen, and the page would grow with the run."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    points: Points
    """(step, value), ascending; values that are no numbers leave a gap."""
    css_class: str


def line_chart(
    title: str, lines: Sequence[Line], *, first_step: float, last_step: float, from_zero: bool = False
) -> str:
    """`title` is for those who cannot see it. `from_zero`: the axis of values begins at 0."""
    drawn = [Line(_thinned(line.points), line.css_class) for line in lines]
    values = [value for line in drawn for _, value in line.points if isfinite(value)]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    ticks = round_numbers(min(low, 0.0) if from_zero else low, high)
    scale = _Scale(first_step, max(last_step, first_step + 1), min(low, ticks[0]), max(high, ticks[-1]))
    parts = [_axes(scale, ticks), *(_path(line, scale) for line in drawn)]
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">' + "".join(parts) + "</svg>"


@dataclass(frozen=True)
class _Scale:
    first: float
    last: float
    low: float
    high: float

    def x(self, step: float) -> float:
        return _LEFT + (step - self.first) / (self.last - self.first) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - _TOP - _BOTTOM)


def round_numbers(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` multiples of 1, 2 or 5 · 10ⁿ from at most `low` to at least `high`."""
    if not high > low:
        low, high = (low - abs(low) / 2 - 0.5, low + abs(low) / 2 + 0.5)
    rough = (high - low) / count
    size = 10.0 ** floor(log10(rough))
    step = next(size * n for n in (1, 2, 5, 10) if size * n >= rough * 0.999)
    begin, end = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [n * step for n in range(begin, end + 1)]


def in_short(value: float) -> str:
    """For an axis: 1200000 → "1.2M", 0.0005 → "5e-4"."""
    if value == 0:
        return "0"
    if abs(value) < 0.01:
        exponent = floor(log10(abs(value)))
        return f"{value / 10.0**exponent:.2g}e{exponent}"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.4g}"


def _axes(scale: _Scale, ticks: Sequence[float]) -> str:
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    parts = []
    for tick in ticks:
        y = scale.y(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{in_short(tick)}</text>')
    steps = [tick for tick in round_numbers(scale.first, scale.last) if scale.first <= tick <= scale.last]
    for tick in steps:
        anchor = "end" if scale.x(tick) > right - 12 else "middle"
        parts.append(f'<text x="{scale.x(tick):.1f}" y="{bottom + 17}" text-anchor="{anchor}">{tick:,.0f}</text>')
    return "".join(parts)


def _path(line: Line, scale: _Scale) -> str:
    pieces: list[list[str]] = [[]]
    for step, value in line.points:
        if isfinite(value):
            pieces[-1].append(f"{scale.x(step):.1f} {scale.y(value):.1f}")
        elif pieces[-1]:
            pieces.append([])
    paths = "".join(f'<path class="{line.css_class}" d="M{"L".join(piece)}"/>' for piece in pieces if len(piece) > 1)
    dots = "".join(
        f'<circle class="{line.css_class}" cx="{piece[0].split()[0]}" cy="{piece[0].split()[1]}" r="2.5"/>'
        for piece in pieces
        if len(piece) == 1
    )
    return paths + dots


def _thinned(points: Points) -> Points:
    """At most so many points that can be seen: of each share of them the first, the lowest and the highest."""
    if len(points) <= _MOST_POINTS:
        return points
    shares = _MOST_POINTS // 3
    kept: list[tuple[float, float]] = []
    for i in range(shares):
        share = points[len(points) * i // shares : len(points) * (i + 1) // shares]
        extremes = {share[0], min(share, key=_value), max(share, key=_value)}
        kept += sorted(extremes)
    return [*kept, points[-1]] if kept[-1] != points[-1] else kept


def _value(point: tuple[float, float]) -> float:
    return point[1] if isfinite(point[1]) else 0.0
