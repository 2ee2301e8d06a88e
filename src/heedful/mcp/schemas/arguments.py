"""A call's arguments, from a model's text or an object, as the tool's schema wants them, or an error: never a guess.

Repaired is what can be meant in one way only: a code fence, a comma too many, Python's quotes and names, JSON in a JSON
string; "3" where the schema wants a number, "true" where it wants a boolean, null for what may be left out.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heedful.errors import McpBadArguments
from heedful.mcp.schemas.validate import schema_fault

MAX_TEXT_CHARS = 1 << 20
MAX_LITERAL_CHARS = 1 << 16
"""Of what is read as Python's notation."""
_FENCE = re.compile(r"\s*```[A-Za-z]{0,10}[ \t]*\n(.*)\n?[ \t]*```\s*", re.DOTALL)
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?")
_COMMA_OR_STRING = re.compile(r'"(?:[^"\\]|\\.)*"|,(?=\s*[}\]])', re.DOTALL)
_MAX_NESTING = 64


@dataclass(frozen=True)
class Arguments:
    values: dict[str, Any]
    repairs: tuple[str, ...]
    """What was changed, in words."""


class _Faulty(Exception):
    pass


def parsed(given: str | Mapping[str, Any], tool: str, signature: str) -> Arguments:
    """A JSON object. Raises McpBadArguments."""
    if not isinstance(given, str):
        return Arguments(dict(given), ())
    repairs: list[str] = []
    try:
        value = _value_of(given, repairs)
        if isinstance(value, str):
            value = _value_of(value, repairs)
            repairs.append("it was JSON in a JSON string")
        if not isinstance(value, dict):
            raise _Faulty("they must be one JSON object")
    except _Faulty as error:
        raise McpBadArguments(tool, str(error), signature) from None
    return Arguments(value, tuple(repairs))


def fitted(arguments: Arguments, schema: Mapping[str, Any], tool: str, signature: str) -> Arguments:
    """Under a normalised schema (normalise.py): trivially different types are made right, then all is validated. Raises
    McpBadArguments naming the first fault."""
    repairs = list(arguments.repairs)
    values = _coerced(arguments.values, schema, "", repairs, 0)
    fault = schema_fault(values, schema)
    if fault:
        raise McpBadArguments(tool, fault, signature)
    return Arguments(values, tuple(repairs))


def _value_of(text: str, repairs: list[str]) -> Any:
    if len(text) > MAX_TEXT_CHARS:
        raise _Faulty(f"{len(text):,} characters; at most {MAX_TEXT_CHARS:,} are read")
    if not text.strip():
        raise _Faulty("there are none; for no arguments write {}")
    fence = _FENCE.fullmatch(text)
    if fence:
        text = fence.group(1)
        repairs.append("a code fence was taken off")
    try:
        return _json(text)
    except ValueError as error:
        fault = f"they are not JSON: {str(error)[:100]}"
    without = _COMMA_OR_STRING.sub(lambda found: "" if found.group() == "," else found.group(), text)
    if without != text:
        try:
            value = _json(without)
            repairs.append("a comma too many was taken out")
            return value
        except ValueError:
            pass
    value = _python_literal(text)
    if not isinstance(value, dict):
        raise _Faulty(fault)
    repairs.append("Python's notation was read")
    return value


def _json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_doubles, parse_constant=_no_constant)
    except RecursionError:
        raise _Faulty("they are nested too deep") from None


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Faulty("a key stands twice in one object")
    return found


def _no_constant(name: str) -> Any:
    raise _Faulty(f"{name} is no JSON value")


def _python_literal(text: str) -> Any:
    """None where it is none, or not JSON's kinds of values."""
    if len(text) > MAX_LITERAL_CHARS:
        return None
    try:
        value = ast.literal_eval(text.strip())
        return value if _is_plain(value) else None
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, str | int | float | bool | None)


def _coerced(value: Any, schema: Any, where: str, repairs: list[str], depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > _MAX_NESTING:
        return value
    kind = schema.get("type")
    if isinstance(kind, str):
        changed = _retyped(value, kind)
        if changed is not value:
            repairs.append(f"{where or 'the whole'}: {json.dumps(value)[:40]} was read as {kind}")
            value = changed
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        return [_coerced(each, schema["items"], f"{where}[{i}]", repairs, depth + 1) for i, each in enumerate(value)]
    properties = schema.get("properties")
    if not isinstance(value, dict) or not isinstance(properties, Mapping):
        return value
    found = {}
    for key, each in value.items():
        inner = properties.get(key)
        at = f"{where}.{key}".lstrip(".")[:80]
        if each is None and key not in schema.get("required", []) and inner is not None and not _takes_null(inner):
            repairs.append(f"{at}: null was left out")
            continue
        found[key] = _coerced(each, inner, at, repairs, depth + 1)
    return found


def _takes_null(schema: Any) -> bool:
    """False only where a type is named, and it is another."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    return kinds is None or kinds == "null" or (isinstance(kinds, list) and "null" in kinds)


def _retyped(value: Any, kind: str) -> Any:
    """The value itself where nothing trivial helps."""
    if isinstance(value, float) and kind == "integer" and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if not isinstance(value, str):
        return value
    text = value.strip()
    if kind == "integer" and _INTEGER.fullmatch(text):
        return int(text)
    if kind == "number" and _NUMBER.fullmatch(text):
        return int(text) if _INTEGER.fullmatch(text) else float(text)
    if kind == "boolean" and text in ("true", "false", "True", "False"):
        return text in ("true", "True")
    if kind in ("array", "object") and text[:1] == {"array": "[", "object": "{"}[kind]:
        try:
            return _json(text)
        except (ValueError, _Faulty):
            return value
    return value
