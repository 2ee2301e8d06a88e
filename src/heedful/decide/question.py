"""Typed questions about a state, checked once: what reaches a decider is well-formed. Owns the limits of the contract,
and the two ways in which the reference models write a JSON value as text.

    Choice("team", {"billing": "owns invoices", "other": None}, "Who owns this?")
    Score("anger", ["calm", "annoyed", "furious"])
    Noul("urgent", "Is this urgent?")

The name only tells a question's answer from others': no decider shows it to a model. Contract: System One, as of
typesafe-sdk 0.7.5 and jevcompat's SPEC 0.1.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar

from heedful.errors import BadParameter

Meaning = str | Mapping[str, Any] | ListLike[Any]
"""What a user says of the world: text, a JSON object or a JSON array."""
State = Meaning

MOST_OPTIONS = 255
MOST_LEVELS = 10
MOST_DEPTH = 64
"""Objects and arrays within each other."""
MOST_BITS = 128
"""Of a whole number: JSON readers differ beyond what fits in a double, and printing a huge one takes long."""


@dataclass(frozen=True)
class Choice:
    """Which one of the options. Their order carries no meaning."""

    name: str
    options: Mapping[str, Meaning | None] | ListLike[str]
    """1 to 255 names, each with what it stands for, or None where the name says it. A list of names will do."""
    instructions: Meaning | None = None

    type: ClassVar[str] = "choice"

    def __post_init__(self) -> None:
        where = _check_head(self.name, self.instructions)
        options = _options(f"{where}.options", self.options)
        _check_count(f"{where}.options", len(options), MOST_OPTIONS)
        for option, description in options.items():
            _check(f"{where}.options", isinstance(option, str), f"a name must be a string, not {option!r:.40}")
            if description is not None:
                check_meaning(f"{where}.options[{option!r:.40}]", description)
        object.__setattr__(self, "options", options)

    @property
    def labels(self) -> tuple[str, ...]:
        """Keys of the answer's probabilities, in order."""
        return tuple(self.options)

    def described(self) -> dict[str, Meaning | None]:
        """The options, however they were given, with what they stand for."""
        return dict(self.options) if isinstance(self.options, Mapping) else dict.fromkeys(self.options)

    def to_dict(self) -> dict[str, Any]:
        """As it is sent: without its name, under which it stands in "questions"."""
        return {"type": self.type, **_instructions(self.instructions), "criteria": self.described()}


@dataclass(frozen=True)
class Score:
    """How much, on an ordered scale."""

    name: str
    levels: ListLike[Meaning]
    """1 to 10, the lowest first; a level's index is its value."""
    instructions: Meaning | None = None

    type: ClassVar[str] = "score"

    def __post_init__(self) -> None:
        where = _check_head(self.name, self.instructions)
        if not isinstance(self.levels, list | tuple):
            kind = type(self.levels).__name__
            raise BadParameter(f"{where}.levels", f"must be a list, the lowest level first, not {kind}")
        _check_count(f"{where}.levels", len(self.levels), MOST_LEVELS)
        for index, level in enumerate(self.levels):
            check_meaning(f"{where}.levels[{index}]", level)
        object.__setattr__(self, "levels", tuple(self.levels))

    @property
    def labels(self) -> tuple[str, ...]:
        """Keys of the answer's probabilities, in order: "0", "1", …"""
        return tuple(map(str, range(len(self.levels))))

    def to_dict(self) -> dict[str, Any]:
        return {"type": self.type, **_instructions(self.instructions), "criteria": list(self.levels)}


@dataclass(frozen=True)
class Noul:
    """Yes or no. What either means may be described, or neither, or one."""

    name: str
    instructions: Meaning | None = None
    true: Meaning | None = None
    false: Meaning | None = None

    type: ClassVar[str] = "noul"
    labels: ClassVar[tuple[str, ...]] = ("false", "true")
    """In the order of the reference models' option slots."""

    def __post_init__(self) -> None:
        where = _check_head(self.name, self.instructions)
        for side in ("true", "false"):
            if (meaning := getattr(self, side)) is not None:
                check_meaning(f"{where}.{side}", meaning)

    def to_dict(self) -> dict[str, Any]:
        sides = {side: getattr(self, side) for side in ("true", "false") if getattr(self, side) is not None}
        return {"type": self.type, **_instructions(self.instructions), **({"criteria": sides} if sides else {})}


Question = Choice | Score | Noul


def questions_from_json(questions: Any) -> tuple[Question, ...]:
    """The "questions" of a request: a mapping of names to {"type", "instructions", "criteria"}.

    Unknown fields of a question are ignored, as the hosted server does. Raises BadParameter for the first thing wrong.
    """
    if not isinstance(questions, Mapping):
        raise BadParameter("questions", f"must map names to questions, not {type(questions).__name__}")
    return checked_questions(_question_from_json(name, question) for name, question in questions.items())


def checked_questions(questions: Iterable[Question]) -> tuple[Question, ...]:
    """At least one, and no two of one name. Raises BadParameter."""
    _check("questions", isinstance(questions, Iterable), f"must be a list, not {type(questions).__name__}")
    checked = tuple(questions)
    _check("questions", bool(checked), "there must be at least one")
    names: set[str] = set()
    for question in checked:
        ok = isinstance(question, Choice | Score | Noul)
        _check("questions", ok, f"must be Choice, Score or Noul, not {type(question).__name__}")
        _check("questions", question.name not in names, f"two are called {question.name!r:.40}")
        names.add(question.name)
    return checked


def check_state(state: Any) -> None:
    """Raises BadParameter unless it is text, a JSON object or a JSON array."""
    check_meaning("state", state)


def check_meaning(field: str, value: Any) -> None:
    """Raises BadParameter unless it is text, or an object or an array of what JSON can carry, at most 64 deep."""
    ok = isinstance(value, str | Mapping | list | tuple)
    _check(field, ok, f"must be text, a JSON object or a JSON array, not {_kind(value)}")
    _check_json(field, value, 0)


def json_text(value: Any) -> str:
    """Text as it is, anything else as JSON with its characters as they are: how Laya's models read a state."""
    return value if isinstance(value, str) else json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def line_text(value: Any, depth: int = 0) -> str:
    """An object as `key: value` lines, an array as `- item` lines, nested ones indented: how Kev's models read it.

    Lines inside of a text are not indented, and an item's leading white space is lost: so their training data was made.
    """
    margin = "  " * depth
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return "\n".join(margin + _entry(key, item, depth) for key, item in value.items())
    if isinstance(value, list | tuple):
        return "\n".join(f"{margin}- {line_text(item, depth + 1).lstrip()}" for item in value)
    return str(value)


def _entry(key: str, item: Any, depth: int) -> str:
    is_nested = isinstance(item, Mapping | list | tuple)
    return f"{key}:\n{line_text(item, depth + 1)}" if is_nested else f"{key}: {line_text(item)}"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _question_from_json(name: Any, question: Any) -> Question:
    where = f"questions[{name!r:.40}]"
    if not isinstance(question, Mapping):
        raise BadParameter(where, f"must be an object, not {_kind(question)}")
    kind, instructions, criteria = (question.get(key) for key in ("type", "instructions", "criteria"))
    if kind == Choice.type:
        _check(f"{where}.criteria", isinstance(criteria, Mapping), "must be an object of option names")
        return Choice(name, criteria or {}, instructions)
    if kind == Score.type:
        _check(f"{where}.criteria", isinstance(criteria, list | tuple), "must be an array, the lowest level first")
        return Score(name, criteria or (), instructions)
    if kind == Noul.type:
        sides = {} if criteria is None else criteria
        _check(f"{where}.criteria", isinstance(sides, Mapping), 'must be an object with "true", "false" or both')
        return Noul(name, instructions, sides.get("true"), sides.get("false"))
    raise BadParameter(f"{where}.type", f'must be "choice", "score" or "noul", not {kind!r:.40}')


def _check_head(name: Any, instructions: Any) -> str:
    """The part of a field's name that says which question it is of."""
    _check("questions", isinstance(name, str) and name != "", f"a name must be text, and not empty, not {name!r:.40}")
    where = f"questions[{name!r:.40}]"
    if instructions is not None:
        check_meaning(f"{where}.instructions", instructions)
    return where


def _options(field: str, options: Any) -> dict[Any, Any]:
    """A copy, in the caller's order."""
    if isinstance(options, Mapping):
        return dict(options)
    _check(field, isinstance(options, list | tuple), f"must map names to descriptions, not {type(options).__name__}")
    for name in options:
        _check(field, isinstance(name, str), f"a name must be a string, not {name!r:.40}")
    _check(field, len(set(options)) == len(options), "two have the same name")
    return dict.fromkeys(options)


def _check_count(field: str, count: int, most: int) -> None:
    _check(field, 1 <= count <= most, f"there are {count:,}, and there must be 1 to {most}")


def _check_json(field: str, value: Any, depth: int) -> None:
    if isinstance(value, Mapping | list | tuple):
        _check(field, depth < MOST_DEPTH, f"is nested more than {MOST_DEPTH} levels deep")
        if isinstance(value, Mapping):
            for key in value:
                _check(field, isinstance(key, str), f"a key must be a string, not {key!r:.40}")
        for item in value.values() if isinstance(value, Mapping) else value:
            _check_json(field, item, depth + 1)
    elif isinstance(value, float):
        _check(field, isfinite(value), f"{value} is no number that JSON can carry")
    elif isinstance(value, int):
        _check(field, value.bit_length() <= MOST_BITS, f"holds a whole number of more than {MOST_BITS} bits")
    else:
        _check(field, value is None or isinstance(value, str), f"holds a {_kind(value)}, which JSON cannot carry")


def _check(field: str, ok: bool, problem: str) -> None:
    if not ok:
        raise BadParameter(field, problem)


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _instructions(instructions: Meaning | None) -> dict[str, Any]:
    return {} if instructions is None else {"instructions": instructions}
