"""Tells what a chat template wrote from what users wrote, after a rendering that mixed both.

The template is marked, not the users' text: wherever its constants hold the text of a control token, or an end that
may begin one, or a start that may complete one, each character is exchanged for a stand-in, a private-use character
that occurs in no string of the request. In the rendered chat a control token is one whose characters are stand-ins;
a run between them may come from outside only if it is a message's role, since templates do write '<|' + role + '|>'.

So nothing that a template does with users' text (joining, cutting out, changing case) can make a control token of it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property

from heedful.text.literals import LiteralScanner

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_PRIVATE_CHAR = re.compile("[\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd]")


class ControlTexts:
    """The texts of a model's control tokens."""

    def __init__(self, texts: Collection[str]) -> None:
        self.texts = tuple(texts)

    @cached_property
    def _forward(self) -> LiteralScanner:
        return LiteralScanner(self.texts)

    @cached_property
    def _backward(self) -> LiteralScanner:
        return LiteralScanner(text[::-1] for text in self.texts)

    def stand_ins(self, taken: str) -> dict[str, str] | None:
        """A stand-in for every character of a control token, the same ones as long as `taken`, all text of a request,
        has no private-use characters. None if it has nearly all of them."""
        used = set(_PRIVATE_CHAR.findall(taken))
        free = [chr(code) for codes in _PRIVATE_USE for code in codes if chr(code) not in used] if used else _DEFAULT
        chars = sorted(set("".join(self.texts)))
        return dict(zip(chars, free, strict=False)) if len(free) >= len(chars) else None

    def marked(self, constant: str, stand_ins: Mapping[str, str]) -> str:
        """A constant of a template, with stand-ins where it holds a control token or a part that may join into one."""
        marks = {i for start in self._forward.starts(constant) for i in range(start, self._end(constant, start))}
        marks.update(range(self._forward.open_tail(constant), len(constant)))
        marks.update(range(len(constant) - self._backward.open_tail(constant[::-1])))
        return (
            "".join(stand_ins[char] if i in marks else char for i, char in enumerate(constant)) if marks else constant
        )

    def split(self, rendered: str, stand_ins: Mapping[str, str], roles: Collection[str]) -> Iterator[tuple[str, bool]]:
        """A rendered chat without its stand-ins, cut into (piece, is a control token); no piece is empty."""
        plain = unmarked(rendered, stand_ins)
        written = re.compile("[" + "".join(stand_ins.values()) + "]" if stand_ins else "(?!)")
        done = 0
        candidate = written.search(rendered)
        while candidate:
            start = candidate.start()
            ends = self._forward.ends(plain, start)
            end = next((end for end in ends if _is_own(rendered[start:end], plain[start:end], roles)), start)
            if end > start:
                if start > done:
                    yield plain[done:start], False
                yield plain[start:end], True
                done = end
            candidate = written.search(rendered, max(end, start + 1))
        if done < len(plain):
            yield plain[done:], False

    def _end(self, text: str, start: int) -> int:
        return next(self._forward.ends(text, start))


def unmarked(text: str, stand_ins: Mapping[str, str]) -> str:
    return text.translate({ord(stand_in): char for char, stand_in in stand_ins.items()})


def _is_own(rendered: str, plain: str, roles: Collection[str]) -> bool:
    """Whether the template wrote this control token: no character, or just one role, comes from elsewhere."""
    foreign = "".join(char for char, original in zip(rendered, plain, strict=True) if char == original)
    return not foreign or (foreign in roles and foreign in rendered)


_DEFAULT = [chr(code) for code in _PRIVATE_USE[0]]
