"""Matrix products of SmolLM2-135M on this machine: GB/s of weights for one token, GOP/s for a prompt.

    python bench/kernels_matmul.py [--threads 2] [--tokens 1 4 512] [--repeat 20] [--variant avx2]

The layers' case is 30 layers of four matrices (q, k, v in one; gate and up in one), each in memory of its own, w4; the
head is w8. Best and median of the repetitions. The processor's load by others is printed, since it ruins the figures.
A table, and a JSON line last. bench/kernels.py calls `measure`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from heedful import _native

LAYERS = 30
LAYER_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEAD_SHAPES = ((49152, 576),)
F32 = 0  # ggml's number of the type that the random weights are packed from


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 512])
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--variant", default=_native.variant())
    args = parser.parse_args()
    cases = measure(args.threads, args.tokens, args.repeat, args.variant)
    print(f"{'case':14}{'tokens':>7}{'best ms':>10}{'median ms':>11}{'GB/s':>8}{'GOP/s':>8}{'others':>8}")
    for case in cases:
        print(
            f"{case['case']:14}{case['tokens']:7}{case['best_ms']:10.3f}{case['median_ms']:11.3f}"
            f"{case['gb_per_second']:8.1f}{case['gop_per_second']:8.1f}{case['others_busy']:8.0%}"
        )
    print(json.dumps({"bench": "kernels_matmul", "threads": args.threads, "variant": args.variant, "cases": cases}))


def measure(threads: int, tokens: list[int], repeat: int, variant: str) -> list[dict[str, Any]]:
    """One record a case; GB/s and GOP/s (2 · rows · columns · tokens) are of the best repetition."""
    rng = np.random.default_rng(0)
    sets = {
        "layers w4": [(_packed(rng, shape, "w4"), "w4", *shape) for shape in LAYER_SHAPES] * LAYERS,
        "head w8": [(_packed(rng, shape, "w8"), "w8", *shape) for shape in HEAD_SHAPES],
    }
    return [
        _case(name, matrices, count, threads, repeat if count < 64 else max(2, repeat // 5), variant)
        for count in tokens
        for name, matrices in sets.items()
        if count < 64 or name != "head w8"  # a prompt needs one row of logits
    ]


def _packed(rng: np.random.Generator, shape: tuple[int, int], panel_format: str) -> np.ndarray:
    weights = rng.standard_normal(shape, np.float32)
    return _native.Packer().pack(F32, weights.view(np.uint8), shape[1], panel_format)


def _case(
    name: str, matrices: list[tuple[Any, str, int, int]], tokens: int, threads: int, repeat: int, variant: str
) -> dict[str, Any]:
    x = np.random.default_rng(1).standard_normal((tokens, max(m[3] for m in matrices)), np.float32)
    busy_before = _busy_and_own_ticks()
    seconds = _native.time_matmuls(matrices, x, threads, variant, repeat)
    busy_after = _busy_and_own_ticks()
    weight_bytes = sum(m[0].nbytes for m in matrices)
    operations = sum(2 * m[2] * m[3] * tokens for m in matrices)
    total, others = (after - before for after, before in zip(busy_after, busy_before, strict=True))
    return {
        "case": name,
        "tokens": tokens,
        "best_ms": min(seconds) * 1e3,
        "median_ms": statistics.median(seconds) * 1e3,
        "gb_per_second": weight_bytes / min(seconds) / 1e9,
        "gop_per_second": operations / min(seconds) / 1e9,
        "others_busy": max(0, others) / total if total else 0.0,
    }


def _busy_and_own_ticks() -> tuple[int, int]:
    """Ticks of all processors so far, and those of them in which something other than this process ran."""
    all_ticks = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    own = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    idle = all_ticks[3] + all_ticks[4]
    return sum(all_ticks), sum(all_ticks) - idle - int(own[11]) - int(own[12])


if __name__ == "__main__":
    main()
