"""What a pass of Laya costs: trunk, head and scorer. Counts come from the sequences that ran."""

from __future__ import annotations

from collections.abc import Sequence as ListLike

import numpy as np
import numpy.typing as npt

from heedful.cost.encoder_receipt import EncoderReceipt, EncoderSeconds, EncoderVisits, bidirectional_visits
from heedful.cost.energy import Energy
from heedful.cost.receipt import Flops, Saved, WeightTraffic
from heedful.models.laya_config import LayaConfig, LayaSequence

Places = npt.NDArray[np.int64]


def bytes_a_step(config: LayaConfig, saved_bytes: int = 0) -> int:
    """Of weights, which every step reads once; float32, but for what packing saves."""
    return -saved_bytes + 4 * (config.trunk.linear_weights + config.head.linear_weights + _scorer_weights(config))


def laya_receipt(
    name: str,
    config: LayaConfig,
    sequences: ListLike[LayaSequence],
    dropped: int,
    steps: int,
    seconds: EncoderSeconds,
    energy: Energy,
    *,
    saved_bytes: int = 0,
) -> EncoderReceipt:
    tokens, options = sum(len(one.ids) for one in sequences), sum(len(one.markers) for one in sequences)
    trunk, head = laya_visits(config, sequences)
    at_options = _weights_at_options(config)
    every = config.trunk.linear_weights + config.head.linear_weights + _scorer_weights(config) - at_options
    return EncoderReceipt(
        model=name,
        texts=len(sequences),
        prompt_tokens=tokens,
        dropped_tokens=dropped,
        steps=steps,
        visits=EncoderVisits(trunk.total + head.total, trunk.dense + head.dense, trunk.saved),
        weights=WeightTraffic(bytes_a_step(config, saved_bytes) * steps),
        flops=Flops(
            linear=2 * (every * tokens + at_options * options),
            attention=4 * (config.trunk.head_dim * trunk.total + config.head.head_dim * head.total),
        ),
        seconds=seconds,
        energy=energy,
    )


def laya_visits(config: LayaConfig, sequences: ListLike[LayaSequence]) -> tuple[EncoderVisits, EncoderVisits]:
    """Of a pass over all of them: in the trunk, in the head."""
    return _trunk_visits(config, sequences), _head_visits(config, sequences)


def _scorer_weights(config: LayaConfig) -> int:
    width = config.trunk.hidden_size
    return width * (width + 1)


def _weights_at_options(config: LayaConfig) -> int:
    """Of matrices that options' marks alone pass: the scorer, and what follows the last attention."""
    return _scorer_weights(config) + 2 * config.head.hidden_size * config.head.intermediate_size


def _head_visits(config: LayaConfig, sequences: ListLike[LayaSequence]) -> EncoderVisits:
    return bidirectional_visits([len(one.ids) for one in sequences], config.head.layer_windows, config.head.num_heads)


def _trunk_visits(config: LayaConfig, sequences: ListLike[LayaSequence]) -> EncoderVisits:
    heads, windows = config.trunk.num_heads, config.trunk.layer_windows
    if all(one.options is None for one in sequences):
        return bidirectional_visits([len(one.ids) for one in sequences], windows, heads)
    total = heads * sum(option_visits(one, window) for one in sequences for window in windows)
    dense = heads * len(windows) * sum(option_visits(one, None) for one in sequences)
    return EncoderVisits(total, dense, Saved(window=dense - total))


def option_visits(sequence: LayaSequence, window: int | None) -> int:
    """Pairs of tokens that see each other: all within the window, but those of two different options."""
    positions, options = np.asarray(sequence.positions), np.asarray(sequence.options)
    near_any = _near(positions, window) - _near(positions[options > 0], window)
    return near_any + sum(_near(positions[options == one], window) for one in np.unique(options[options > 0]))


def _near(positions: Places, window: int | None) -> int:
    """Pairs of positions less than `window` apart, a position with itself among them."""
    if window is None:
        return len(positions) ** 2
    ordered = np.sort(positions)
    after = np.searchsorted(ordered, ordered + window, "left")
    return int((after - np.searchsorted(ordered, ordered - window, "right")).sum())
