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
