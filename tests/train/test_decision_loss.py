"""Losses of questions: by hand, by loops, and against PyTorch's own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from heedful.train.decision_loss import (
    SAMPLES,
    SPHERICAL_WEIGHT,
    Asked,
    asked,
    cross_entropies,
    policy_losses,
    rewards,
    sampled,
)

LOGITS, TARGETS = [[0.3, -1.0, 2.0], [0.5, 0.1]], [[0.0, 0.25, 0.75], [1.0, 0.0]]


def questions(is_score: list[bool], logits: list[torch.Tensor] | None = None) -> Asked:
    return asked([torch.tensor(one) for one in LOGITS] if logits is None else logits, TARGETS, is_score)


def padded(of: list[list[float]]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(one) for one in of], batch_first=True)


def test_cross_entropy_by_hand() -> None:
    for found, z, t in zip(cross_entropies(questions([False, False])).tolist(), LOGITS, TARGETS, strict=True):
        total = sum(map(math.exp, z))
        by_hand = -sum(share * math.log(math.exp(x) / total) for x, share in zip(z, t, strict=True))
        assert found == pytest.approx(by_hand, abs=1e-6)


def test_cross_entropy_and_its_gradient_are_those_of_pytorch_without_padding() -> None:
    logits = [torch.tensor(one, requires_grad=True) for one in LOGITS]
    ours = torch.autograd.grad(cross_entropies(questions([False, True], logits)).sum(), logits)
    alone = [F.cross_entropy(z, torch.tensor(t)) for z, t in zip(logits, TARGETS, strict=True)]
    for found, expected in zip(ours, torch.autograd.grad(alone[0] + alone[1], logits), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-5)


def test_rewards_by_hand() -> None:
    shares, is_score = [[0.2, 0.3, 0.5], [0.9, 0.1]], [True, False]
    found = rewards(padded(shares)[None], questions(is_score))[0].tolist()
    for p, t, scale, got in zip(shares, TARGETS, is_score, found, strict=True):
        log_score = sum(a * math.log(b) for a, b in zip(t, p, strict=True))
        spherical = sum(a * b for a, b in zip(t, p, strict=True)) / math.sqrt(sum(b * b for b in p))
        ranked = sum((sum(p[: k + 1]) - sum(t[: k + 1])) ** 2 for k in range(len(p))) / (len(p) - 1)
        assert got == pytest.approx(log_score + SPHERICAL_WEIGHT * spherical - ranked * scale, abs=1e-5)


def test_the_policy_loss_pulls_towards_the_copies_that_earn_more() -> None:
    """Its gradient is −mean of A · noise / σ² over copies and questions: by loops, from the same noise."""
    sigma, draw = 0.4, torch.Generator().manual_seed(3)
    noise = [torch.randn((SAMPLES, len(one)), generator=draw) for one in LOGITS]
    logits = [torch.tensor(one, requires_grad=True) for one in LOGITS]
    ours = questions([False, True], logits)
    copies = sampled(ours, noise, sigma)
    deviation = float(copies.rewards.std())
    found = torch.autograd.grad(policy_losses(ours, copies, deviation, sigma).mean(), logits)

    centred = [sigma * (each - each.mean(-1, keepdim=True)).numpy() for each in noise]
    earned = np.zeros((SAMPLES, 2))
    for at, (z, moved) in enumerate(zip(LOGITS, centred, strict=True)):
        for copy in range(SAMPLES):
            p, t = np.exp(np.array(z) + moved[copy]), np.array(TARGETS[at])
            p /= p.sum()
            earned[copy, at] = (t * np.log(p)).sum() + 0.75 * (t * p).sum() / math.sqrt((p * p).sum())
            if at == 1:
                earned[copy, at] -= ((p.cumsum() - t.cumsum()) ** 2).sum()
    np.testing.assert_allclose(copies.rewards.numpy(), earned, atol=1e-5)
    advantage = (earned - earned.mean(0)) / (earned.std(ddof=1) + 1e-6)
    for at, gradient in enumerate(found):
        by_hand = -(advantage[:, at, None] * centred[at] / sigma**2).sum(0) / (SAMPLES * 2)
        np.testing.assert_allclose(gradient.numpy(), by_hand, atol=1e-5)
