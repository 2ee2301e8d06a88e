"""Which tokens a step trains on. Documents are cut into segments of at most a context; a batch takes segments in the
order of a keyed shuffle while they fit, and none is cut to fill it. So a step is a pure function of the settings and of
one number, how many segments came before it, and seeking costs nothing.

Every token but the first end token is a target exactly once an epoch; of chats, every one that is to be learned. A chat
is a segment, and none is cut; of preferences the two answers to a prompt stay together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from heedful.cost.visits import attended
from heedful.errors import BadParameter
from heedful.models.config import ModelConfig
from heedful.train.order import Permutation, TrainingOrder, kept_apart
from heedful.train.token_store import TokenStore


@dataclass(frozen=True)
class Segment:
    """Inputs are tokens[start : start + length], targets the same one further on."""

    document: int
    start: int
    length: int

    @property
    def segments(self) -> tuple[Segment, ...]:
        return (self,)


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, which a batch has both or none of."""

    chosen: Segment
    rejected: Segment

    @property
    def length(self) -> int:
        return self.chosen.length + self.rejected.length

    @property
    def segments(self) -> tuple[Segment, ...]:
        return (self.chosen, self.rejected)


Unit = Segment | Pair
"""What the order is an order of."""
AnyUnit = TypeVar("AnyUnit", Segment, Pair)


class Sized(Protocol):
    @property
    def length(self) -> int:
        """In tokens."""


AnySized = TypeVar("AnySized", bound=Sized)


class Segments(Sequence[Segment]):
    """All segments of a store, numbered in its order; found by bisection. A document is cut into as few as fit, as long
    as each other: so none is an end token alone.
    """

    def __init__(self, store: TokenStore, context_len: int) -> None:
        self._starts = store.starts
        lengths = np.diff(store.starts)
        self._before = np.concatenate(([0], np.cumsum(-(-lengths // context_len))))

    def __len__(self) -> int:
        return int(self._before[-1])

    def __getitem__(self, number: int) -> Segment:  # type: ignore[override]
        if not 0 <= number < len(self):
            raise IndexError(number)
        document = int(np.searchsorted(self._before, number, side="right")) - 1
        first, end = int(self._starts[document]), int(self._starts[document + 1])
        part, parts = number - int(self._before[document]), int(self._before[document + 1] - self._before[document])
        begin = (end - first) * part // parts
        return Segment(document, first + begin, (end - first) * (part + 1) // parts - begin)


class Chats(Sequence[Segment]):
    """A segment for each chat of a store; its last token is a target alone."""

    def __init__(self, store: TokenStore) -> None:
        self._starts = store.starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> Segment:  # type: ignore[override]
        if not 0 <= number < len(self):
            raise IndexError(number)
        first, end = int(self._starts[number]), int(self._starts[number + 1])
        return Segment(number, first, end - first - 1)


class Pairs(Sequence[Pair]):
    """Neighbouring chats of a store that has pairs."""

    def __init__(self, store: TokenStore) -> None:
        self._chats = Chats(store)

    def __len__(self) -> int:
        return len(self._chats) // 2

    def __getitem__(self, number: int) -> Pair:  # type: ignore[override]
        return Pair(self._chats[2 * number], self._chats[2 * number + 1])


def pairs_of(segments: Sequence[Segment]) -> list[Pair]:
    """What `Batch.segments` of a store with pairs consist of."""
    return [Pair(chosen, rejected) for chosen, rejected in zip(segments[::2], segments[1::2], strict=True)]


def units_of(store: TokenStore, context_len: int) -> Sequence[Unit]:
    if store.facts.paired:
        return Pairs(store)
    return Segments(store, context_len) if store.learned is None else Chats(store)


@dataclass(frozen=True)
class Batch:
    segments: tuple[Segment, ...]
    cursor: int
    """Segments, or pairs of them, before the next batch, over all epochs."""

    @property
    def tokens(self) -> int:
        return sum(segment.length for segment in self.segments)


class TrainingData:
    """The order of training, and what is kept apart to judge by."""

    def __init__(
        self,
        store: TokenStore,
        *,
        context_len: int,
        batch_tokens: int,
        seed: int,
        validation_share: float,
        validation: TokenStore | None = None,
        shuffle: bool = True,
    ) -> None:
        assert batch_tokens >= context_len, (batch_tokens, context_len)
        self.store = store
        self._units = units_of(store, context_len)
        self._batch_tokens = batch_tokens
        n = len(self._units)
        kept = kept_apart(n, validation_share) if validation is None else 0
        if kept >= n:
            raise BadParameter("--data", f"{n} segments of {context_len} tokens cannot be shared", "Give more text.")
        self._order = TrainingOrder(n, kept=kept, seed=seed, shuffle=shuffle)
        self.epoch_segments = self._order.epoch_len
        if validation is None:
            chosen = [self._units[number] for number in self._order.kept]
        else:
            others = units_of(validation, context_len)
            chosen = [others[i] for i in Permutation(len(others), "validation")]
        self.validation_store = validation or store
        self.validation_segments = [segment for unit in chosen for segment in unit.segments]

    def batch(self, cursor: int) -> Batch:
        """The batch that begins after `cursor` segments."""
        taken: list[Segment] = []
        left = self._batch_tokens
        while (unit := self._units[self._order[cursor]]).length <= left:
            taken += unit.segments
            left -= unit.length
            cursor += 1
        return Batch(tuple(taken), cursor)


def in_parts(segments: Sequence[AnySized], parts: int) -> list[list[AnySized]]:
    """Runs of segments, or of what else has a length, with about as many tokens each, at most `parts`; in each the
    equally long lie together.
    """
    total, seen = sum(segment.length for segment in segments), 0
    found: dict[int, list[AnySized]] = {}
    for segment in segments:
        middle = seen + segment.length / 2
        found.setdefault(int(middle * parts / total), []).append(segment)
        seen += segment.length
    return [sorted(part, key=lambda segment: segment.length) for part in found.values()]


@dataclass(frozen=True)
class TokenArrays:
    """Segments one after another: int64 (T,) each."""

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    lengths: list[int]


IGNORED = -100
"""A target that is none."""


def arrays(store: TokenStore, segments: Sequence[Segment]) -> TokenArrays:
    """Of no segment at all: a token without a target, for a process that has no share but takes part."""
    if not segments:
        zero = np.zeros(1, dtype=np.int64)
        return TokenArrays(zero, zero, np.full(1, IGNORED, dtype=np.int64), [1])
    spans = [store.tokens[segment.start : segment.start + segment.length + 1] for segment in segments]
    return TokenArrays(
        np.concatenate([span[:-1] for span in spans]).astype(np.int64),
        np.concatenate([np.arange(segment.length) for segment in segments]),
        np.where(_learned(store, segments), np.concatenate([span[1:] for span in spans]).astype(np.int64), IGNORED),
        [segment.length for segment in segments],
    )


def count_targets(store: TokenStore, segments: Sequence[Segment]) -> int:
    return int(np.count_nonzero(_learned(store, segments)))


def _learned(store: TokenStore, segments: Sequence[Segment]) -> npt.NDArray[np.bool_]:
    """Of each target."""
    if store.learned is None:
        return np.ones(sum(segment.length for segment in segments), dtype=np.bool_)
    return np.concatenate([store.learned[s.start + 1 : s.start + s.length + 1] for s in segments])


def visits(segments: Sequence[Segment], config: ModelConfig) -> int:
    """Token visits of one forward pass: causal, within segments, within windows."""
    return config.num_heads * sum(
        attended(0, segment.length, window) for segment in segments for window in config.windows
    )
