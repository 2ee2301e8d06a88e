"""Whether an answer is right, where that can be said by rule: exact, regex, number, JSON schema, all of several.

check = check_from_json({"number": 42})
check.passes("The answer is 42.")
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from heedful.errors import BadParameter
from heedful.router.patterns import compiled, found_in

_NUMBER = re.compile(r"(?<![\w.])[-+−]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?(?!\w)")
_FENCE = re.compile(r"```(?:json)?\s*(.*?)```", re.S)
KINDS = ("exact", "regex", "number", "json_schema")


class Check(Protocol):
    def passes(self, answer: str) -> bool: ...


@dataclass(frozen=True)
class Exact:
    """One of these texts, but for case, white space and a full stop at the end."""

    texts: tuple[str, ...]

    def passes(self, answer: str) -> bool:
        return _plain(answer) in {_plain(text) for text in self.texts}


@dataclass(frozen=True)
class Regex:
    """Found somewhere in the answer, whatever the case."""

    pattern: re.Pattern[str]

    def passes(self, answer: str) -> bool:
        return found_in(self.pattern, answer)


@dataclass(frozen=True)
class Number:
    """The last number of the answer, within `tolerance`."""

    value: float
    tolerance: float = 0.0

    def passes(self, answer: str) -> bool:
        found = _NUMBER.findall(answer[-2_000:])
        if not found:
            return False
        said = float(found[-1].replace(",", "").replace("−", "-"))
        return abs(said - self.value) <= max(self.tolerance, 1e-9 * abs(self.value))


@dataclass(frozen=True)
class JsonSchema:
    """The answer, or the fenced block in it, is JSON under the schema."""

    schema: Any

    def passes(self, answer: str) -> bool:
        from jsonschema import Draft202012Validator

        fenced = _FENCE.search(answer)
        try:
            value = json.loads(fenced[1] if fenced else answer)
        except (ValueError, RecursionError):
            return False
        return bool(Draft202012Validator(self.schema).is_valid(value))


@dataclass(frozen=True)
class All:
    checks: tuple[Check, ...]

    def passes(self, answer: str) -> bool:
        return all(check.passes(answer) for check in self.checks)


def check_from_json(given: Any, where: str = "check") -> Check:
    """`given`: {"exact": text or texts}, {"regex": …}, {"number": 42, "tolerance": 0.5}, {"json_schema": …}, or several
    of them together. Raises BadParameter."""
    if not isinstance(given, Mapping) or not given:
        raise BadParameter(where, "must be an object", f"It has one of: {', '.join(KINDS)}.")
    if strange := [key for key in given if key not in (*KINDS, "tolerance")]:
        raise BadParameter(where, f"has {strange[0]!r:.40}", f"Checks are: {', '.join(KINDS)}.")
    checks = [_check_of(kind, given, where) for kind in KINDS if kind in given]
    if not checks:
        raise BadParameter(where, "has a tolerance and no number")
    return checks[0] if len(checks) == 1 else All(tuple(checks))


def _check_of(kind: str, given: Mapping[str, Any], where: str) -> Check:
    value = given[kind]
    if kind == "exact":
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise BadParameter(f"{where}.exact", "must be a text, or a list of them")
        return Exact(tuple(texts))
    if kind == "regex":
        if not isinstance(value, str):
            raise BadParameter(f"{where}.regex", "must be a text")
        return Regex(compiled(value, f"{where}.regex"))
    if kind == "number":
        tolerance = given.get("tolerance", 0.0)
        for name, number in (("number", value), ("tolerance", tolerance)):
            if isinstance(number, bool) or not isinstance(number, int | float) or number != number:
                raise BadParameter(f"{where}.{name}", "must be a number")
        return Number(float(value), float(tolerance))
    return _schema(value, where)


def _schema(value: Any, where: str) -> JsonSchema:
    from importlib.util import find_spec

    if not find_spec("jsonschema"):
        raise BadParameter(f"{where}.json_schema", "needs jsonschema", "pip install 'heedful[router]'")
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        Draft202012Validator.check_schema(value)
    except SchemaError as error:
        raise BadParameter(f"{where}.json_schema", f"is no schema: {error.message:.100}") from None
    if any(not reference.startswith("#") for reference in _references(value)):
        raise BadParameter(f"{where}.json_schema", "refers to another document, and none is fetched")
    return JsonSchema(value)


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            if key in ("$ref", "$dynamicRef") and isinstance(value, str):
                yield value
            yield from _references(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from _references(item)


def _plain(text: str) -> str:
    return " ".join(text.split()).rstrip(".").casefold()
