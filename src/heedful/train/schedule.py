"""The learning rate of a step as a share of the highest: a formula, so that nothing of it needs to be saved.

wsd (warm up, stay, decay: arXiv:2404.06395) holds the rate until the last share of the steps; cosine falls all the way.
"""

from __future__ import annotations

import math

from heedful.train.settings import OptimSettings


def rate_share(step: int, steps: int, optim: OptimSettings) -> float:
    """Of step 0, 1, … of `steps`, or of optim.schedule_steps; the last one's is near `optim.min_lr`."""
    steps = optim.schedule_steps or steps
    warmup = round(optim.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup
    if optim.schedule == "cosine":
        done = (step - warmup) / max(1, steps - warmup)
        left = (1 + math.cos(math.pi * min(done, 1.0))) / 2
    else:
        decay = round(optim.decay * steps)
        left = 1.0 if step < steps - decay else max(0.0, (steps - step) / (decay + 1))
    return optim.min_lr + (1 - optim.min_lr) * left
