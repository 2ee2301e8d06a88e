"""How many floating-point operations a second this machine does at its best, in a large float32 product."""

from __future__ import annotations

from time import perf_counter

import torch

_WIDTH = 1024
_REPEATS = 4


def measure_peak_flops() -> float:
    """With the threads that PyTorch has; the best of some tries, a fraction of a second together."""
    a, b = torch.rand(_WIDTH, _WIDTH), torch.rand(_WIDTH, _WIDTH)
    out = torch.empty(_WIDTH, _WIDTH)
    seconds = []
    for _ in range(_REPEATS):
        began = perf_counter()
        torch.mm(a, b, out=out)
        seconds.append(perf_counter() - began)
    return 2 * _WIDTH**3 / min(seconds)
