"""How long a replica takes for a step, as five numbers: measured by `heedful bench --save`, or assumed of a machine.

A step of n decoding sequences that reads b bytes of keys and values takes batch(n) + b · seconds_per_kv_byte; p prompt
tokens that make v visits add p · seconds_per_token + v · seconds_per_visit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heedful.cost.energy import Machine
from heedful.cost.formulas import WEIGHT_BLOCK_BYTES, Shape, decode_cost, prefill_cost
from heedful.cost.paper import page_policy
from heedful.errors import BadParameter
from heedful.request import CachePolicy

ASSUMED_SHARE = 0.7
"""Of the machine's peak, where nothing was measured: tuned kernels reach 0.5 to 1 of it."""
_BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Speed:
    source: str
    """Where the numbers are from, for people."""
    batches: tuple[tuple[int, float], ...]
    """(sequences, seconds) of a decode step without its keys and values; between them, and beyond, it goes straight."""
    seconds_per_kv_byte: float
    seconds_per_token: float
    seconds_per_visit: float
    threads: int = 2

    def __post_init__(self) -> None:
        counts = [count for count, _ in self.batches]
        assert counts, self
        assert counts == sorted(set(counts)), counts
        assert counts[0] == 1, counts

    def step_seconds(self, sequences: int, kv_bytes: float) -> float:
        """`kv_bytes`: of all sequences together."""
        return self.batch_seconds(sequences) + kv_bytes * self.seconds_per_kv_byte

    def prompt_seconds(self, tokens: float, visits: float) -> float:
        return tokens * self.seconds_per_token + visits * self.seconds_per_visit

    def batch_seconds(self, sequences: int) -> float:
        points = self.batches
        if len(points) == 1:
            return points[0][1]
        above = min(max(bisect_left(points, (sequences,)), 1), len(points) - 1)
        (n0, s0), (n1, s1) = points[above - 1], points[above]
        return s0 + (s1 - s0) * (sequences - n0) / (n1 - n0)


def assumed_speed(shape: Shape, weight_format: str, machine: Machine) -> Speed:
    """Of a machine whose memory and arithmetic are used to ASSUMED_SHARE. Raises BadParameter for a shape that lacks
    numbers."""
    if shape.head_dim is None or shape.kv_heads is None or shape.linear_weights is None or shape.head_weights is None:
        raise BadParameter(
            "model", "is not known well enough", "Give --kv-heads, --head-dim, --hidden, --intermediate, --vocab."
        )
    weights = shape.linear_weights + shape.head_weights
    size = weights * WEIGHT_BLOCK_BYTES[weight_format] / 32
    flops, memory = machine.flops_per_second * ASSUMED_SHARE, machine.bytes_per_second * ASSUMED_SHARE
    return Speed(
        source=f"assumed: {ASSUMED_SHARE:.0%} of {machine.bytes_per_second / 1e9:g} GB/s and of "
        f"{machine.flops_per_second / 1e9:g} GFLOP/s, on {machine.cores} cores",
        batches=tuple((n, max(size / memory, 2 * n * weights / flops)) for n in _BATCHES),
        seconds_per_kv_byte=1 / memory,
        seconds_per_token=(2 * shape.linear_weights + shape.recurrence_flops) / flops,
        seconds_per_visit=4 * shape.head_dim / flops,
        threads=machine.cores,
    )


def measured_speed(bench: Mapping[str, Any], shape: Shape) -> Speed:
    """Of what `heedful bench --save` wrote: prefill at several contexts, decoding there and in several batches.

    Raises BadParameter where that is not in it.
    """
    try:
        return _fitted(bench, shape)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        what = f"has not what a plan needs ({type(error).__name__}: {str(error)[:80]})"
        raise BadParameter("--bench", what, "Write it with: heedful bench MODEL --save FILE.") from None


def _fitted(bench: Mapping[str, Any], shape: Shape) -> Speed:
    policy = page_policy(CachePolicy(str(bench["kv_format"])))
    cases, batches = bench["cases"], bench["batches"]
    if len(cases) < 2 or not batches:
        raise ValueError("two contexts and a batch at least")
    contexts = [int(case["context"]) for case in cases]
    prompts = [(float(n), float(prefill_cost(shape, n, policy=policy).visits)) for n in contexts]
    per_token, per_visit = _line(
        prompts, [n / float(case["prefill_tok_s"]) for n, case in zip(contexts, cases, strict=True)]
    )
    read = {n: decode_cost(shape, n, policy=policy).kv_bytes_read or 0 for n in contexts}
    steps = [1 / float(case["decode_tok_s"]) for case in cases]
    _, per_byte = _line([(1.0, float(read[n])) for n in contexts], steps)
    points = []
    for case in sorted(batches, key=lambda case: int(case["sequences"])):
        kv_bytes = int(case["sequences"]) * (decode_cost(shape, int(case["context"]), policy=policy).kv_bytes_read or 0)
        points.append((int(case["sequences"]), max(float(case["step_seconds"]) - kv_bytes * per_byte, 1e-9)))
    return Speed(
        source=f"measured: {bench['model']} on {int(bench['threads'])} threads, {bench['kv_format']} keys and values",
        batches=tuple(points),
        seconds_per_kv_byte=per_byte,
        seconds_per_token=per_token,
        seconds_per_visit=per_visit,
        threads=int(bench["threads"]),
    )


def _line(facts: Sequence[tuple[float, float]], seconds: Sequence[float]) -> tuple[float, float]:
    """a and b, neither below 0, of a · x + b · y = s, with the least sum of squares of relative errors."""
    rows = [(x / s, y / s) for (x, y), s in zip(facts, seconds, strict=True)]
    xx, xy, yy = (sum(p * q for p, q in pairs) for pairs in _products(rows))
    x1, y1 = sum(x for x, _ in rows), sum(y for _, y in rows)
    determinant = xx * yy - xy * xy
    if determinant > 1e-12 * xx * yy:
        a, b = (x1 * yy - y1 * xy) / determinant, (y1 * xx - x1 * xy) / determinant
        if a >= 0 and b >= 0:
            return a, b
    alone_x, alone_y = (x1 / xx, 0.0), (0.0, y1 / yy if yy else 0.0)
    return min(alone_x, alone_y, key=lambda line: sum((line[0] * x + line[1] * y - 1) ** 2 for x, y in rows))


def _products(rows: Sequence[tuple[float, float]]) -> tuple[list[tuple[float, float]], ...]:
    return [(x, x) for x, _ in rows], [(x, y) for x, y in rows], [(y, y) for _, y in rows]
