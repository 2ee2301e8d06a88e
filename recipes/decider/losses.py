"""What a batch of questions costs: soft cross-entropy, and RLCD (a score of sampled distributions, as Laya trains).

All over logits (questions, most options) with a mask of the options that are there; targets sum to 1 over them.
"""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLES = 4
SPHERICAL_WEIGHT, RANKED_WEIGHT = 0.75, 1.0
SIGMA_FIRST, SIGMA_LAST = 0.4, 0.1
_LEAST_LOG = -9.21
_ABSENT = -1e4


def cross_entropy(logits: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Mean over the questions of −Σ t log p."""
    logs = torch.log_softmax(logits.masked_fill(~mask, _ABSENT), dim=-1)
    return -(target * logs).sum(-1).mean()


def policy_loss(
    logits: Tensor, target: Tensor, mask: Tensor, is_score: Tensor, sigma: float, generator: torch.Generator
) -> Tensor:
    """What RLCD adds to the cross-entropy: logits are pulled towards those of their noisy copies (SAMPLES of them) that
    earn more than the copies' mean, by the target's log score, its spherical score and, of a scale, minus its ranked
    probability score.
    """
    count = mask.sum(-1, keepdim=True)
    noise = sigma * torch.randn((SAMPLES, *logits.shape), generator=generator) * mask
    noise = (noise - noise.sum(-1, keepdim=True) / count) * mask
    sampled = logits.detach() + noise
    reward = rewards(torch.softmax(sampled.masked_fill(~mask, _ABSENT), dim=-1), target, mask, is_score)
    advantage = (reward - reward.mean(0)) / (reward.std() + 1e-6)
    log_density = -(((sampled - logits) ** 2) * mask).sum(-1) / (2 * sigma**2)
    return -(advantage * log_density).mean()


def rewards(shares: Tensor, target: Tensor, mask: Tensor, is_score: Tensor) -> Tensor:
    """Of distributions (samples, questions, options) → (samples, questions)."""
    log_score = (target * shares.clamp_min(1e-12).log().clamp_min(_LEAST_LOG)).sum(-1)
    spherical = (target * shares).sum(-1) / shares.norm(dim=-1)
    gaps = ((shares.cumsum(-1) - target.cumsum(-1)) ** 2 * mask).sum(-1)
    ranked = gaps / (mask.sum(-1) - 1).clamp_min(1)
    total: Tensor = log_score + SPHERICAL_WEIGHT * spherical - RANKED_WEIGHT * ranked * is_score
    return total
