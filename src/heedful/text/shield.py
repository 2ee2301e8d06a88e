"""Keeps what users write apart from what a chat template writes, through a rendering that mixes both.

Before: in every string of a user, one character of each control token's text is replaced by a placeholder, a
private-use character that occurs in no string here. The same for an end that the template could complete to a control
token, and for a start that could complete what the template began. After: a control token's text in the rendered chat
is the template's own, and the placeholders turn back. Each placeholder stands for one character, so lengths, trimming
and splitting work as without.

Not covered: a template that deletes from inside a message and so joins two halves of a control token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from heedful.errors import BadParameter
from heedful.text.literals import LiteralScanner

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class ControlTexts:
    """The texts of a model's control tokens, ready to be looked for."""

    def __init__(self, texts: Collection[str]) -> None:
        self._forward = LiteralScanner(texts)
        self._backward = LiteralScanner([text[::-1] for text in texts])

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """`text` cut into (piece, is a control token's text)."""
        return self._forward.split(text)

    def weak_points(self, text: str) -> set[int]:
        """Positions in a user's string whose replacement keeps it from becoming, or joining into, a control token."""
        points = set(self._forward.starts(text))
        points.update(start for start in self._forward.open_tails(text) if _has_mark(text[start:]))
        for start in self._backward.open_tails(text[::-1]):
            end = len(text) - start
            if _has_mark(text[:end]):
                points.add(end - 1)
        return points


def _has_mark(overlap: str) -> bool:
    """Letters alone are left as they are: templates do write '<|' + role + '|>' and mean it, and compare roles."""
    return not overlap.isalnum()


class Shield:
    """For one rendering. `taken`: every character that occurs in the messages or the template."""

    def __init__(self, control: ControlTexts, taken: Collection[str]) -> None:
        self._control = control
        self._free = (chr(code) for codes in _PRIVATE_USE for code in codes if chr(code) not in taken)
        self._placeholders: dict[str, str] = {}  # character → what stands for it

    def cover(self, value: Any) -> Any:
        """A copy of `value` (JSON types) with every string in it covered, keys included."""
        if isinstance(value, str):
            return self._cover_text(value)
        if isinstance(value, list):
            return [self.cover(item) for item in value]
        if isinstance(value, dict):
            return {self._cover_text(key): self.cover(item) for key, item in value.items()}
        return value

    def uncover(self, text: str) -> str:
        return text.translate({ord(stand_in): char for char, stand_in in self._placeholders.items()})

    def _cover_text(self, text: str) -> str:
        points = self._control.weak_points(text)
        if not points:
            return text
        chars = list(text)
        for point in points:
            chars[point] = self._placeholder(chars[point])
        return "".join(chars)

    def _placeholder(self, char: str) -> str:
        if char not in self._placeholders:
            free = next(self._free, None)
            if free is None:
                raise BadParameter("messages", "they use every private-use character of Unicode", "Shorten them.")
            self._placeholders[char] = free
        return self._placeholders[char]
