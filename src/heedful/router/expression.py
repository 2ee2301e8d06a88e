"""The conditions of a policy: comparisons joined by and, or, not. A parser of its own; nothing is evaluated as code.

    condition = parse('tokens > 4000 and not has_pii', {"tokens": "number", "has_pii": "bool"})
    condition.holds({"tokens": 5000, "has_pii": False})

    condition   := both ("or" both)*            both := negation ("and" negation)*
    negation    := "not" negation | comparison  comparison := value (("==" | "!=" | "<" | "<=" | ">" | ">=") value)?
    value       := NAME | NUMBER | 'text' | "text" | true | false | "(" condition ")"

Types are checked when it is parsed, so that a condition that parses can always be evaluated.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from heedful.errors import PolicyError

Value = bool | float | str
MOST_CHARS = 1_000
MOST_DEPTH = 32
TYPES = ("bool", "number", "text")

_TOKEN = re.compile(
    r"""\s*(?:(?P<number>[0-9]+(?:\.[0-9]+)?(?![\w.]))|(?P<name>[A-Za-z_]\w*)"""
    r"""|(?P<text>'[^']*'|"[^"]*")|(?P<sign>==|!=|<=|>=|<|>|\(|\)))"""
)
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_WORDS = frozenset({"and", "or", "not", "true", "false"})


@dataclass(frozen=True)
class _Constant:
    value: Value
    type: str

    def of(self, values: Mapping[str, Value]) -> Value:
        return self.value


@dataclass(frozen=True)
class _Name:
    name: str
    type: str

    def of(self, values: Mapping[str, Value]) -> Value:
        return values[self.name]


@dataclass(frozen=True)
class _Comparison:
    sign: str
    left: _Node
    right: _Node
    type: str = "bool"

    def of(self, values: Mapping[str, Value]) -> Value:
        return _COMPARE[self.sign](self.left.of(values), self.right.of(values))


@dataclass(frozen=True)
class _Not:
    inner: _Node
    type: str = "bool"

    def of(self, values: Mapping[str, Value]) -> Value:
        return not self.inner.of(values)


@dataclass(frozen=True)
class _All:
    """Of `parts`, all or any."""

    parts: tuple[_Node, ...]
    is_any: bool
    type: str = "bool"

    def of(self, values: Mapping[str, Value]) -> Value:
        found = (bool(part.of(values)) for part in self.parts)
        return any(found) if self.is_any else all(found)


_Node = _Constant | _Name | _Comparison | _Not | _All


@dataclass(frozen=True)
class Condition:
    text: str
    names: frozenset[str]
    """That it reads."""
    _root: _Node

    def holds(self, values: Mapping[str, Value]) -> bool:
        """`values`: of every name in `names`."""
        return bool(self._root.of(values))


def parse(
    text: str,
    known: Mapping[str, str],
    where: str = "condition",
    options: Mapping[str, Sequence[str]] = {},
) -> Condition:
    """`known`: name → "bool", "number" or "text"; `options`: of a text, what it can be. `where`: of the condition, for
    errors. Raises PolicyError."""
    if len(text) > MOST_CHARS:
        raise PolicyError(where, f"has {len(text):,} characters; at most {MOST_CHARS:,} are read")
    parser = _Parser(text, known, where, options)
    root = parser.whole()
    return Condition(text, frozenset(parser.names), root)


class _Parser:
    def __init__(self, text: str, known: Mapping[str, str], where: str, options: Mapping[str, Sequence[str]]) -> None:
        self._text = text
        self._known = known
        self._where = where
        self._options = options
        self._tokens = self._split()
        self._at = 0
        self._depth = 0
        self.names: set[str] = set()

    def whole(self) -> _Node:
        root = self._either()
        if self._kind != "end":
            raise self._wrong(f"has {self._word!r} where it should end")
        return self._needs(root, "bool", self._text.strip())

    def _split(self) -> list[tuple[str, str]]:
        found, at = [], 0
        while self._text[at:].strip():
            token = _TOKEN.match(self._text, at)
            if token is None:
                rest = self._text[at:].lstrip()
                hint = "compare with ==" if rest.startswith("=") else "texts stand in quotes"
                raise self._wrong(f"cannot be read from {rest[:20]!r} on ({hint})")
            kind = token.lastgroup or ""
            word = token[kind]
            found.append(("word" if kind == "name" and word in _WORDS else kind, word))
            at = token.end()
        return [*found, ("end", "its end")]

    @property
    def _kind(self) -> str:
        return self._tokens[self._at][0]

    @property
    def _word(self) -> str:
        return self._tokens[self._at][1]

    def _take(self, kind: str, *words: str) -> str | None:
        if self._kind != kind or (words and self._word not in words):
            return None
        self._at += 1
        return self._tokens[self._at - 1][1]

    def _either(self) -> _Node:
        return self._joined("or", self._both)

    def _both(self) -> _Node:
        return self._joined("and", self._negation)

    def _joined(self, word: str, part: Callable[[], _Node]) -> _Node:
        first = part()
        if not (self._kind == "word" and self._word == word):
            return first
        parts = [self._needs(first, "bool", f"left of {word}")]
        while self._take("word", word):
            parts.append(self._needs(part(), "bool", f"right of {word}"))
        return _All(tuple(parts), is_any=word == "or")

    def _negation(self) -> _Node:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise self._wrong(f"is nested more than {MOST_DEPTH} deep")
        try:
            if self._take("word", "not"):
                return _Not(self._needs(self._negation(), "bool", "behind not"))
            return self._comparison()
        finally:
            self._depth -= 1

    def _comparison(self) -> _Node:
        left = self._value()
        sign = self._take("sign", *_COMPARE)
        if sign is None:
            return left
        right = self._value()
        if left.type != right.type:
            raise self._wrong(f"compares {left.type} with {right.type} by {sign}")
        if sign not in ("==", "!=") and left.type != "number":
            raise self._wrong(f"orders {left.type} by {sign}; only numbers have an order")
        if self._take("sign", *_COMPARE):
            raise self._wrong("compares twice in a row; join two comparisons by and")
        self._check_can_be(left, right)
        self._check_can_be(right, left)
        return _Comparison(sign, left, right)

    def _check_can_be(self, name: _Node, text: _Node) -> None:
        """A text that is never said would make a condition that never holds."""
        if isinstance(name, _Name) and isinstance(text, _Constant) and name.name in self._options:
            can_be = self._options[name.name]
            if text.value not in can_be:
                near = get_close_matches(str(text.value), can_be, 1)
                hint = f"Did you mean {near[0]!r}?" if near else f"It is one of: {', '.join(can_be[:8])}."
                raise PolicyError(self._where, f"{self._text!r:.80}: {name.name} is never {text.value!r:.40}", hint)

    def _value(self) -> _Node:
        if self._take("sign", "("):
            inner = self._either()
            if not self._take("sign", ")"):
                raise self._wrong(f"has {self._word!r} where a ) is missing")
            return inner
        if (number := self._take("number")) is not None:
            return _Constant(float(number), "number")
        if (text := self._take("text")) is not None:
            return _Constant(text[1:-1], "text")
        if (truth := self._take("word", "true", "false")) is not None:
            return _Constant(truth == "true", "bool")
        if (name := self._take("name")) is not None:
            return self._name(name)
        raise self._wrong(f"has {self._word!r} where a value should stand")

    def _name(self, name: str) -> _Node:
        if name not in self._known:
            near = get_close_matches(name, self._known, 1)
            hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(sorted(self._known))}."
            raise PolicyError(self._where, f"{self._text!r:.80} asks for {name!r:.40}, which nothing here says", hint)
        self.names.add(name)
        return _Name(name, self._known[name])

    def _needs(self, node: _Node, kind: str, what: str) -> _Node:
        if node.type != kind:
            raise self._wrong(f"has a {node.type} {what!r:.60} where something true or false should stand")
        return node

    def _wrong(self, problem: str) -> PolicyError:
        return PolicyError(
            self._where, f"{self._text!r:.80} {problem}", "Conditions look like this: tokens > 4000 and not has_pii."
        )
