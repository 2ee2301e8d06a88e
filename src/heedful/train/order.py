"""A shuffle that is a formula: where item i of n goes, from a key alone, in constant time and without a stored list.

A Feistel network permutes the numbers of an even count of bits; one that falls outside of n is sent through again
until it falls inside (cycle walking, Black and Rogaway 2002), four times or less on average.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import overload

_ROUNDS = 6
_MASK = (1 << 64) - 1


class Permutation(Sequence[int]):
    """`Permutation(n, "key")[i]` for i in [0, n); the same for the same n and key on every machine."""

    def __init__(self, n: int, key: str) -> None:
        assert n >= 1, n
        self._n = n
        self._half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
        digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._n))]
        if not 0 <= index < self._n:
            raise IndexError(index)
        index = self._turned(index)
        while index >= self._n:
            index = self._turned(index)
        return index

    def _turned(self, x: int) -> int:
        low_bits = (1 << self._half_bits) - 1
        left, right = x >> self._half_bits, x & low_bits
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & low_bits)
        return left << self._half_bits | right


def _mixed(x: int) -> int:
    """The finaliser of splitmix64."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


class TrainingOrder:
    """Which of n units of data come when; some are kept apart to judge by, the same ones whatever the seed.

    `order[cursor]`: the unit that comes after `cursor` others, over all epochs: a function of seed, epoch and place.
    Without `shuffle` they come as they are numbered.
    """

    def __init__(self, n: int, *, kept: int, seed: int, shuffle: bool = True) -> None:
        assert 0 <= kept < n, (kept, n)
        self._apart, self._kept, self._seed = Permutation(n, "validation"), kept, seed
        self.epoch_len = n - kept
        self._numbered = None if shuffle else sorted(self._apart[kept:])

    @property
    def kept(self) -> list[int]:
        return self._apart[: self._kept]

    def __getitem__(self, cursor: int) -> int:
        epoch, position = divmod(cursor, self.epoch_len)
        if self._numbered is not None:
            return self._numbered[position]
        shuffle = Permutation(self.epoch_len, f"{self._seed} {epoch}")
        return self._apart[self._kept + shuffle[position]]


def kept_apart(n: int, share: float) -> int:
    """How many of n units: about their share, and at least one where there is to be a share."""
    return max(1, round(n * share)) if share > 0 else 0
