"""Laya's logits with PyTorch, weights in float32. Questions of one step lie one after another, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from heedful.engine.torch_embed import build_encoder, place_weights
from heedful.kernels.attention import Attend
from heedful.kernels.option_attention import OptionAttend
from heedful.kernels.text_attention import BidirectionalAttend, DisentangledAttend
from heedful.models.deberta import Deberta
from heedful.models.laya import LayaHead, LayaNetwork
from heedful.models.laya_config import LayaConfig, LayaSequence
from heedful.weights.lora import LoraAdapter
from heedful.weights.names import Weights


def make_laya(
    config: LayaConfig, trunk: Weights, head: Weights, *, updates: LoraAdapter | None = None, threads: int
) -> LayaNetwork:
    """Weights by the names of weights/encoder_names.py and laya_names.py; updates are added to the trunk's. Sets
    PyTorch's thread count for the whole process. Raises UnsupportedModel when one is missing, extra or misshapen.
    """
    torch.set_num_threads(threads)
    encoder = build_encoder(config.trunk, trunk)
    if updates is not None:
        updates.merge_into((name, slot.numpy()) for name, slot in encoder.weight_slots())
    if isinstance(encoder, Deberta):
        encoder.fix_positions()
    return LayaNetwork(encoder, build_head(config, head))


def build_head(config: LayaConfig, weights: Weights) -> LayaHead:
    """Raises UnsupportedModel when a weight is missing, extra or misshapen."""
    with torch.device("meta"):
        head = LayaHead(config)
    return place_weights(head, weights)


@torch.inference_mode()
def laya_logits(network: LayaNetwork, sequences: Sequence[LayaSequence]) -> list[list[float]]:
    """Of each question the logits of its options, before any temperature."""
    return [logits.tolist() for logits in question_logits(network, sequences)]


def question_logits(network: LayaNetwork, sequences: Sequence[LayaSequence]) -> list[Tensor]:
    """One step over all: of each question the logits (options,), with their gradient where one is asked for.

    The questions have one layout: either all or none have options that do not see each other.
    """
    lengths = [len(one.ids) for one in sequences]
    starts = [0, *accumulate(lengths)]
    markers = [start + at for start, one in zip(starts, sequences, strict=False) for at in one.markers]
    positions = torch.tensor([at for one in sequences for at in one.positions or range(len(one.ids))])
    logits = network(
        torch.tensor([token for one in sequences for token in one.ids]),
        positions,
        torch.tensor([one.type for one in sequences]).repeat_interleave(torch.tensor(lengths)),
        torch.tensor(markers),
        _trunk_attend(network, sequences, lengths, positions),
        BidirectionalAttend(lengths),
    )
    return list(logits.split([len(one.markers) for one in sequences]))


def _trunk_attend(
    network: LayaNetwork, sequences: Sequence[LayaSequence], lengths: list[int], positions: Tensor
) -> Attend | DisentangledAttend:
    apart = [one.options is not None for one in sequences]
    assert all(apart) or not any(apart), apart
    if isinstance(network.trunk, Deberta):
        assert not any(apart), "DeBERTa's distances are those of places"
        return DisentangledAttend(lengths)
    if any(apart):
        return OptionAttend(lengths, positions, torch.tensor([of for one in sequences for of in one.options or ()]))
    return BidirectionalAttend(lengths)
