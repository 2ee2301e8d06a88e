"""Texts of a policy with places that a request, or a tool's result, fills: "There are {count} packets of {item}."

    template = parsed("{city} at {clock[0]}")
    template.names                     # ("city", "clock[0]")
    template.filled(lookup)            # lookup("city") → a value, or KeyError

A place is one brace deep; {{ and }} are braces. Nothing in it is run, and what fills it is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_CHARS = 4_000
_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]{1,200})\}|[{}]")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[^\s.\[\]{}\"'*]+|\[-?[0-9]{1,9}\])*")


@dataclass(frozen=True)
class Template:
    text: str
    names: tuple[str, ...]
    """Of the places, in order."""

    def filled(self, lookup: Callable[[str], Any]) -> str:
        """Raises what `lookup` does. Numbers, objects and lists are written as JSON."""

        def piece(match: re.Match[str]) -> str:
            if match[1] is None:
                return match[0][0]
            value = lookup(match[1].strip())
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

        return _PIECE.sub(piece, self.text)


def parsed(text: str) -> Template:
    """Raises ValueError with what is wrong."""
    if len(text) > MAX_CHARS:
        raise ValueError(f"has {len(text):,} characters; at most {MAX_CHARS:,} are read")
    names = []
    for match in _PIECE.finditer(text):
        if match[0] in ("{", "}"):
            raise ValueError(f"has a lone {match[0]}; a brace itself is written twice")
        if match[1] is not None:
            name = match[1].strip()
            if not _NAME.fullmatch(name):
                raise ValueError(f"has {{{name:.40}}}, which is no name")
            names.append(name)
    return Template(text, tuple(names))
