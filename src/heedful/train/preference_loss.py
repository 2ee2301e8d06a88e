"""Direct preference optimization (arXiv:2305.18290): a loss on how much likelier than under the base the chosen answer
has become, against the rejected one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from heedful.models.decoder import Decoder
from heedful.train.settings import DpoSettings


@dataclass(frozen=True)
class PreferenceLoss:
    losses: Tensor
    """(pairs,), in nats."""
    margins: Tensor
    """(pairs,): how much larger the reward of the chosen answer is, β log p / p_base being a reward."""


def preference_loss(log_probs: Tensor, reference: Tensor, settings: DpoSettings) -> PreferenceLoss:
    """Of Σ log p of whole answers, (pairs, 2) each: chosen, rejected."""
    rewards = settings.beta * (log_probs - reference)
    margins = rewards[:, 0] - rewards[:, 1]
    wrong = settings.label_smoothing
    return PreferenceLoss(-(1 - wrong) * F.logsigmoid(margins) - wrong * F.logsigmoid(-margins), margins)


def token_losses(decoder: Decoder, hidden: Tensor, targets: Tensor, *, chunk: int) -> Tensor:
    """−log p of each target (T,) after hidden (T, C), with the logits of `chunk` tokens in memory at once: they are
    made again for the gradients, since what a token's loss counts is known after all of them only.
    """

    def of_chunk(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(decoder.logits(hidden), targets, reduction="none")

    chunks = [slice(begin, begin + chunk) for begin in range(0, max(1, len(hidden)), chunk)]
    return torch.cat([checkpoint(of_chunk, hidden[rows], targets[rows], use_reentrant=False) for rows in chunks])
