"""Finding any of a fixed set of strings in a text: leftmost first, then longest. Knows nothing of tokens or templates.

Its memory is that of the strings; six thousand of them (Gemma's control tokens) cost a text no more than few do.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator


class LiteralScanner:
    """`literals`: strings to find; empty ones are ignored."""

    def __init__(self, literals: Iterable[str]) -> None:
        self._literals = frozenset(filter(None, literals))
        self._sorted = sorted(self._literals)
        self._lengths: dict[str, list[int]] = {}  # first two characters, or the only one → lengths, longest first
        for literal in sorted(self._literals, key=len, reverse=True):
            lengths = self._lengths.setdefault(literal[:2], [])
            if len(literal) not in lengths[-1:]:
                lengths.append(len(literal))
        first_chars = {literal[0] for literal in self._literals}
        # `(?!)` never matches: what an empty class would mean if it were legal.
        self._first_char = re.compile("[" + re.escape("".join(sorted(first_chars))) + "]" if first_chars else "(?!)")
        self._max_len = max(map(len, self._literals), default=0)

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """Cuts `text` into (piece, is a literal); no piece is empty and their concatenation is `text`."""
        done = 0
        for start, end in self._matches(text):
            if start > done:
                yield text[done:start], False
            yield text[start:end], True
            done = end
        if done < len(text):
            yield text[done:], False

    def starts(self, text: str) -> Iterator[int]:
        """Every position at which a literal starts, overlapping ones included."""
        for candidate in self._first_char.finditer(text):
            if self._longest_at(text, candidate.start()):
                yield candidate.start()

    def open_tails(self, text: str) -> Iterator[int]:
        """Every position from which `text` runs to its end as a proper beginning of a literal."""
        for start in range(max(0, len(text) - self._max_len + 1), len(text)):
            tail = text[start:]
            following = bisect_right(self._sorted, tail)  # a longer string that starts with it sorts right behind it
            if following < len(self._sorted) and self._sorted[following].startswith(tail):
                yield start

    def _matches(self, text: str) -> Iterator[tuple[int, int]]:
        candidate = self._first_char.search(text)
        while candidate:
            start = candidate.start()
            length = self._longest_at(text, start)
            if length:
                yield start, start + length
            candidate = self._first_char.search(text, start + max(1, length))

    def _longest_at(self, text: str, start: int) -> int:
        """Length of the longest literal at `start`; 0 when there is none."""
        for key in (text[start : start + 2], text[start]):
            for length in self._lengths.get(key, ()):
                if text[start : start + length] in self._literals:
                    return length
        return 0
