"""Finding any of a fixed set of strings in a text: leftmost first, then longest.

Knows nothing of tokens or templates. A trie walk, so neither thousands of literals nor very long ones hurt.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

_END = ""  # key of a trie node at which a literal ends; characters are never empty


class LiteralScanner:
    """`literals`: strings to find; empty ones are ignored."""

    def __init__(self, literals: Collection[str]) -> None:
        self._trie: dict[str, Any] = {}
        for literal in filter(None, literals):
            node = self._trie
            for char in literal:
                node = node.setdefault(char, {})
            node[_END] = True
        # `(?!)` never matches: what an empty class would mean if it were legal.
        self._first_char = re.compile("[" + re.escape("".join(self._trie)) + "]" if self._trie else "(?!)")
        self.max_len = max(map(len, literals), default=0)

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """Cuts `text` into (piece, is a literal); no piece is empty and their concatenation is `text`."""
        done = 0
        candidate = self._first_char.search(text)
        while candidate:
            start = candidate.start()
            end = self._longest_end(text, start)
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
            if self._longest_end(text, candidate.start()) > candidate.start():
                yield candidate.start()

    def open_tails(self, text: str) -> Iterator[int]:
        """Every position from which `text` runs to its end as a proper prefix of a literal."""
        for start in range(max(0, len(text) - self.max_len + 1), len(text)):
            node = self._trie
            for char in text[start:]:
                if char not in node:
                    break
                node = node[char]
            else:
                if any(key != _END for key in node):
                    yield start

    def _longest_end(self, text: str, start: int) -> int:
        """End of the longest literal at `start`; `start` itself when there is none."""
        node, end = self._trie, start
        for position in range(start, len(text)):
            node = node.get(text[position], {})
            if not node:
                break
            if _END in node:
                end = position + 1
        return end
