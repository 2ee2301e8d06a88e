"""Everything that is wrong with a state and its questions, for those who answer a request with all of it at once.

    issues = [*state_issues(body["state"]), *question_issues(body["questions"])]

Places and names of problems are those of pydantic 2, which System One's own server shows: a question's place includes
its type, and a value that may be text, an object or an array has an issue for each. What passes here,
question.questions_from_json reads, and the reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from heedful.decide.question import MOST_LEVELS, MOST_OPTIONS, Choice, Noul, Score, check_meaning
from heedful.errors import BadParameter

Place = tuple[str | int, ...]
"""Keys and indices from the request's body down."""


@dataclass(frozen=True)
class Issue:
    loc: Place
    msg: str
    type: str
    """Pydantic's name of the problem."""


def state_issues(state: Any) -> Iterator[Issue]:
    yield from _meaning(("state",), state)


def question_issues(questions: Any) -> Iterator[Issue]:
    """Of the "questions" of a request."""
    loc: Place = ("questions",)
    if not isinstance(questions, Mapping):
        yield Issue(loc, "Input should be a valid dictionary", "dict_type")
        return
    if not questions:
        yield too_short(loc, "Dictionary")
    for name, question in questions.items():
        yield from _question(name, question)


def too_short(loc: Place, kind: str) -> Issue:
    """An empty `kind`: a Dictionary or List, in pydantic's words."""
    return Issue(loc, f"{kind} should have at least 1 item after validation, not 0", "too_short")


def too_long(loc: Place, kind: str, count: int, most: int) -> Issue:
    return Issue(loc, f"{kind} should have at most {most:,} items after validation, not {count:,}", "too_long")


def _question(name: Any, question: Any) -> Iterator[Issue]:
    loc: Place = ("questions", _key(name))
    if not isinstance(name, str):
        yield Issue((*loc, "[key]"), "Input should be a valid string", "string_type")
    elif not name:
        yield Issue((*loc, "[key]"), "String should have at least 1 character", "string_too_short")
    if not isinstance(question, Mapping):
        yield Issue(loc, "Input should be a valid dictionary or object to extract fields from", "model_attributes_type")
        return
    if "type" not in question:
        yield Issue(loc, "Unable to extract tag using discriminator 'type'", "union_tag_not_found")
        return
    kind = question["type"]
    criteria_issues = _CRITERIA.get(kind) if isinstance(kind, str) else None
    if criteria_issues is None:
        expected = ", ".join(repr(known) for known in _CRITERIA)
        problem = f"Input tag '{kind!s:.40}' found using 'type' does not match any of the expected tags: {expected}"
        yield Issue(loc, problem, "union_tag_invalid")
        return
    if (instructions := question.get("instructions")) is not None:
        yield from _meaning((*loc, kind, "instructions"), instructions)
    if kind != Noul.type and "criteria" not in question:
        yield Issue((*loc, kind, "criteria"), "Field required", "missing")
    else:
        yield from criteria_issues((*loc, kind, "criteria"), question.get("criteria"))


def _options(loc: Place, options: Any) -> Iterator[Issue]:
    if not isinstance(options, Mapping):
        yield Issue(loc, "Input should be a valid dictionary", "dict_type")
        return
    yield from _count(loc, "Dictionary", len(options), MOST_OPTIONS)
    for name, description in options.items():
        if not isinstance(name, str):
            yield Issue((*loc, _key(name), "[key]"), "Input should be a valid string", "string_type")
        if description is not None:
            yield from _meaning((*loc, _key(name)), description)


def _levels(loc: Place, levels: Any) -> Iterator[Issue]:
    if not isinstance(levels, list | tuple):
        yield Issue(loc, "Input should be a valid list", "list_type")
        return
    yield from _count(loc, "List", len(levels), MOST_LEVELS)
    for index, level in enumerate(levels):
        yield from _meaning((*loc, index), level)


def _sides(loc: Place, sides: Any) -> Iterator[Issue]:
    if sides is None:
        return
    if not isinstance(sides, Mapping):
        yield Issue(loc, "Input should be a valid dictionary with true, false or both", "model_type")
        return
    for side in ("true", "false"):
        if sides.get(side) is not None:
            yield from _meaning((*loc, side), sides[side])


_CRITERIA: dict[str, Callable[[Place, Any], Iterator[Issue]]] = {
    Noul.type: _sides,
    Choice.type: _options,
    Score.type: _levels,
}


def _meaning(loc: Place, value: Any) -> Iterator[Issue]:
    if not isinstance(value, str | Mapping | list | tuple):
        yield Issue((*loc, "str"), "Input should be a valid string", "string_type")
        yield Issue((*loc, "dict[str,any]"), "Input should be a valid dictionary", "dict_type")
        yield Issue((*loc, "list[any]"), "Input should be a valid list", "list_type")
        return
    try:
        check_meaning("Input", value)
    except BadParameter as error:
        yield Issue(loc, error.message.replace(": ", " ", 1), "value_error")


def _count(loc: Place, kind: str, count: int, most: int) -> Iterator[Issue]:
    if not count:
        yield too_short(loc, kind)
    elif count > most:
        yield too_long(loc, kind, count, most)


def _key(name: Any) -> str:
    return name if isinstance(name, str) else f"{name!r:.40}"
