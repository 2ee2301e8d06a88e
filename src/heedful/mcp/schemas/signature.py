"""A tool in few words: `name(a: str, b?: int = 10, mode: "r"|"w") - What it does.` and shorter JSON of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

SUMMARY_CHARS = 160
HINT_CHARS = 60
"""Of a parameter's description in a short form."""
MAX_ENUM = 12
MAX_NESTING = 3

_TYPES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "null"}
_SENTENCE = re.compile(r"(.+?[.!?])(\s|$)", re.DOTALL)


def signature(name: str, description: str, parameters: Mapping[str, Any]) -> str:
    """One line; `parameters` is a normalised schema."""
    told = ", ".join(_parameter(key, schema, parameters) for key, schema in parameters.get("properties", {}).items())
    said = summary(description)
    return f"{name}({told})" + (f" - {said}" if said else "")


def summary(description: str, most_chars: int = SUMMARY_CHARS) -> str:
    """The first sentence, on one line, cut at a word where it is long."""
    text = " ".join(description.split())
    found = _SENTENCE.match(text)
    return _cut(found.group(1) if found else text, most_chars)


def brief_schema(schema: Any, depth: int = 0) -> Any:
    """A normalised schema without what a model can do without: long descriptions, defaults' neighbours, bounds."""
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key in ("type", "enum", "const", "format", "default", "required"):
        if key in schema and schema[key] != []:
            found[key] = schema[key]
    if schema.get("description") and depth:
        found["description"] = summary(str(schema["description"]), HINT_CHARS)
    if isinstance(schema.get("properties"), Mapping) and (schema["properties"] or not depth):
        found["properties"] = {name: brief_schema(each, depth + 1) for name, each in schema["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), Mapping) and schema[key]:
            found[key] = brief_schema(schema[key], depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            found[key] = [brief_schema(each, depth + 1) for each in schema[key]]
    return found


def _parameter(name: str, schema: Any, parent: Mapping[str, Any]) -> str:
    optional = "" if name in parent.get("required", []) else "?"
    default = ""
    if isinstance(schema, Mapping) and isinstance(schema.get("default"), str | int | float | bool):
        default = f" = {json.dumps(schema['default'], ensure_ascii=False)[:40]}"
    return f"{name}{optional}: {_type(schema)}{default}"


def _type(schema: Any, depth: int = 0) -> str:
    if not isinstance(schema, Mapping) or depth > MAX_NESTING:
        return "any"
    if "const" in schema:
        return json.dumps(schema["const"], ensure_ascii=False)
    if isinstance(schema.get("enum"), list):
        values = [json.dumps(value, ensure_ascii=False) for value in schema["enum"]]
        return "|".join(values[:MAX_ENUM]) + ("|…" if len(values) > MAX_ENUM else "")
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return "|".join(dict.fromkeys(_type(each, depth + 1) for each in schema[key]))
    kind = schema.get("type")
    if isinstance(kind, list):
        return "|".join(_type({**schema, "type": each}, depth) for each in kind)
    if kind == "array":
        return f"[{_type(schema.get('items'), depth + 1)}]"
    if kind == "object":
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            return "object"
        return "{" + ", ".join(_parameter(name, each, schema) for name, each in properties.items()) + "}"
    return _TYPES.get(str(kind), "any")


def _cut(text: str, most_chars: int) -> str:
    if len(text) <= most_chars:
        return text
    return text[: most_chars - 1].rsplit(" ", 1)[0].rstrip(",;:- ") + "…"
