"""Finding any of a fixed set of strings in a text. Knows nothing of tokens or templates.

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
        """Cuts `text` into (piece, is a literal), leftmost literal first, then longest. No piece is empty."""
        done = 0
        candidate = self._first_char.search(text)
        while candidate:
            start = candidate.start()
            end = next(self.ends(text, start), start)
            if end > start:
                if start > done:
                    yield text[done:start], False
                yield text[start:end], True
                done = end
            candidate = self._first_char.search(text, max(end, start + 1))
        if done < len(text):
            yield text[done:], False

    def starts(self, text: str) -> Iterator[int]:
        """Every position at which a literal starts, overlapping ones included."""
        for candidate in self._first_char.finditer(text):
            if any(self.ends(text, candidate.start())):
                yield candidate.start()

    def ends(self, text: str, start: int) -> Iterator[int]:
        """Ends of the literals at `start`, longest first."""
        for key in dict.fromkeys((text[start : start + 2], text[start : start + 1])):
            for length in self._lengths.get(key, ()):
                # a slice over the text's end is shorter than asked for, and may be another literal
                if start + length <= len(text) and text[start : start + length] in self._literals:
                    yield start + length

    def open_tail(self, text: str) -> int:
        """First position from which `text` runs to its end as a proper beginning of a literal; its length if none."""
        for start in range(max(0, len(text) - self._max_len + 1), len(text)):
            following = bisect_right(self._sorted, text[start:])  # what starts with this tail sorts right behind it
            if following < len(self._sorted) and self._sorted[following].startswith(text[start:]):
                return start
        return len(text)
