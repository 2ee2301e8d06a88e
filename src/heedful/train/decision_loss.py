"""What a batch of questions costs: cross-entropy against the shares that their options should get, and RLCD, which adds
a reward of sampled distributions, as Laya is trained. Questions of a batch are padded to the most options of any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

SAMPLES = 4
"""Noisy copies of a question's logits."""
SPHERICAL_WEIGHT, RANKED_WEIGHT = 0.75, 1.0
SIGMA_FIRST, SIGMA_LAST = 0.4, 0.1
"""Of the noise, at a run's first step and after its last."""
_LEAST_LOG = -9.21
_ABSENT = -1e4


@dataclass(frozen=True)
class Asked:
    """Questions with what the model says and should say, (questions, options) each."""

    logits: Tensor
    targets: Tensor
    """Of a question they sum to 1."""
    is_option: Tensor
    """bool; False is padding."""
    is_score: Tensor
    """bool (questions,)."""


def asked(logits: Sequence[Tensor], targets: Sequence[Sequence[float]], is_score: Sequence[bool]) -> Asked:
    return Asked(
        pad_sequence(list(logits), batch_first=True),
        pad_sequence([torch.tensor(each) for each in targets], batch_first=True),
        pad_sequence([torch.ones(len(each), dtype=torch.bool) for each in logits], batch_first=True),
        torch.tensor(list(is_score)),
    )


def cross_entropies(questions: Asked) -> Tensor:
    """−Σ t log p of each question (questions,), in nats."""
    logs = torch.log_softmax(questions.logits.masked_fill(~questions.is_option, _ABSENT), dim=-1)
    return -(questions.targets * logs).sum(-1)


# ---- RLCD


@dataclass(frozen=True)
class Sampled:
    """Copies of the logits with noise on them, and what they earn."""

    logits: Tensor
    """(SAMPLES, questions, options), without a gradient."""
    rewards: Tensor
    """(SAMPLES, questions)."""


def sampled(questions: Asked, noise: Sequence[Tensor], sigma: float) -> Sampled:
    """`noise`: of each question (SAMPLES, options), standard normal; that of a copy is centred."""
    centred = pad_sequence([(sigma * (each - each.mean(-1, keepdim=True))).T for each in noise], batch_first=True)
    logits = questions.logits.detach() + centred.permute(2, 0, 1)
    shares = torch.softmax(logits.masked_fill(~questions.is_option, _ABSENT), dim=-1)
    return Sampled(logits, rewards(shares, questions))


def rewards(shares: Tensor, questions: Asked) -> Tensor:
    """Of distributions (samples, questions, options) → (samples, questions): the target's log score, its spherical
    score and, of a scale, minus its ranked probability score.
    """
    targets, is_option = questions.targets, questions.is_option
    log_score = (targets * shares.clamp_min(1e-12).log().clamp_min(_LEAST_LOG)).sum(-1)
    spherical = (targets * shares).sum(-1) / shares.norm(dim=-1)
    gaps = ((shares.cumsum(-1) - targets.cumsum(-1)) ** 2 * is_option).sum(-1)
    ranked = gaps / (is_option.sum(-1) - 1).clamp_min(1)
    total: Tensor = log_score + SPHERICAL_WEIGHT * spherical - RANKED_WEIGHT * ranked * questions.is_score
    return total


def policy_losses(questions: Asked, copies: Sampled, deviation: float, sigma: float) -> Tensor:
    """What RLCD adds to the cross-entropy of each question (questions,): its logits are pulled towards those copies
    that earn more than the copies' mean. `deviation`: of all rewards of the batch.
    """
    advantages = (copies.rewards - copies.rewards.mean(0)) / (deviation + 1e-6)
    squares = ((copies.logits - questions.logits) ** 2 * questions.is_option).sum(-1)
    return (advantages * squares / (2 * sigma**2)).mean(0)
