"""Input schemas of strangers' tools in one plain form that chat templates, grammars and validators all take.

`normalised(schema)`: local `$ref`s are written out (nothing is ever fetched; where one comes back to itself, its inside
is left open), `X or null` of a property that may be left out is X, what only decorates ($schema, title, default: null)
is dropped; enum, const, description, default, bounds, formats and every other keyword stay. What it cannot do raises
BadSchema with the reason, for one tool alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 32
MAX_SCHEMAS = 1000
MAX_BYTES = 64 << 10
"""Of a schema's JSON, as given and as written out."""
MAX_PATTERN_CHARS = 1000

_BY_NAME = ("properties", "patternProperties", "dependentSchemas")
_LISTS = ("prefixItems", "allOf", "anyOf", "oneOf")
_SINGLE = (
    "items",
    "additionalProperties",
    "additionalItems",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
)
_DROPPED = ("$schema", "$id", "$comment", "$anchor", "$defs", "definitions", "title", "nullable")
_NOT_READ = ("$dynamicRef", "$recursiveRef")
_NULL = ({"type": "null"}, {"const": None}, {"enum": [None]})


class BadSchema(Exception):
    """Why one tool is not offered."""


def normalised(schema: Any) -> dict[str, Any]:
    """A new schema, an object whose type is "object". Raises BadSchema."""
    if not isinstance(schema, Mapping):
        raise BadSchema("its input schema is no object")
    _checked_size(schema, "as given")
    found = _Normaliser(schema).schema(schema, (), depth=0)
    assert isinstance(found, dict), found
    if found.setdefault("type", "object") != "object":
        raise BadSchema(f"its input schema is of type {found['type']!r:.40}, not object")
    if not isinstance(found.setdefault("properties", {}), dict):
        raise BadSchema("its properties are no object")
    _checked_size(found, "with its references written out")
    _check_meaning(found)
    return found


class _Normaliser:
    """One document."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._seen = 0

    def schema(self, schema: Any, open_refs: tuple[str, ...], *, depth: int) -> Any:
        """`open_refs`: the references that are being written out around it."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise BadSchema(f"a schema in it is {json.dumps(schema)[:40]}, neither object nor boolean")
        self._seen += 1
        if self._seen > MAX_SCHEMAS:
            raise BadSchema(f"it holds more than {MAX_SCHEMAS:,} schemas")
        if depth > MAX_DEPTH:
            raise BadSchema(f"it is nested more than {MAX_DEPTH} levels deep")
        for key in _NOT_READ:
            if key in schema:
                raise BadSchema(f"{key} is not read")
        if "$ref" in schema:
            return self._written_out(schema, open_refs, depth)
        found = {key: value for key, value in schema.items() if key not in _DROPPED}
        self._normalise_parts(found, open_refs, depth)
        if schema.get("nullable") is True and isinstance(found.get("type"), str):  # OpenAPI's way
            found["type"] = [found["type"], "null"]
        if found.get("default", 0) is None:
            del found["default"]
        if len(str(found.get("pattern", ""))) > MAX_PATTERN_CHARS:
            raise BadSchema(f"a pattern has more than {MAX_PATTERN_CHARS:,} characters")
        return found

    def _normalise_parts(self, found: dict[str, Any], open_refs: tuple[str, ...], depth: int) -> None:
        for key in _BY_NAME:
            if key in found:
                if not isinstance(found[key], Mapping):
                    raise BadSchema(f"{key} is no object")
                found[key] = {name: self.schema(each, open_refs, depth=depth + 1) for name, each in found[key].items()}
        for key in (*_LISTS, "items"):
            if isinstance(found.get(key), list):
                found[key] = [self.schema(each, open_refs, depth=depth + 1) for each in found[key]]
            elif key in _LISTS and key in found:
                raise BadSchema(f"{key} is no list")
        for key in _SINGLE:
            if key in found and not isinstance(found[key], list):
                found[key] = self.schema(found[key], open_refs, depth=depth + 1)
        required = found.get("required", [])
        for name, each in found.get("properties", {}).items():
            if isinstance(required, list) and name not in required and isinstance(each, dict):
                found["properties"][name] = _without_null(each)

    def _written_out(self, schema: Mapping[str, Any], open_refs: tuple[str, ...], depth: int) -> Any:
        reference = schema["$ref"]
        target = self._target(reference)
        beside = {key: value for key, value in schema.items() if key != "$ref" and key not in _DROPPED}
        if reference in open_refs:
            kind = {
                key: target[key] for key in ("type", "description") if isinstance(target, Mapping) and key in target
            }
            return {**kind, **self._plain(beside, open_refs, depth)}
        inside = self.schema(target, (*open_refs, reference), depth=depth + 1)
        if not beside:
            return inside
        if isinstance(inside, bool):
            return self._plain(beside, open_refs, depth) if inside else False
        more = self._plain(beside, open_refs, depth)
        if more.keys() & inside.keys() - {"description", "default", "examples"}:
            return {"allOf": [inside], **more}
        return {**inside, **more}

    def _plain(self, beside: Mapping[str, Any], open_refs: tuple[str, ...], depth: int) -> dict[str, Any]:
        found = self.schema(beside, open_refs, depth=depth)
        assert isinstance(found, dict), found
        return found

    def _target(self, reference: Any) -> Any:
        """What a JSON pointer (RFC 6901) into this document points at."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise BadSchema(
                f"its reference {reference!r:.80} does not point into the schema itself, and none is fetched"
            )
        value: Any = self._root
        for part in reference[2:].split("/") if reference != "#" else ():
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and key.isascii() and key.isdigit() and int(key[:9]) < len(value):
                value = value[int(key[:9])]
            elif isinstance(value, Mapping) and key in value:
                value = value[key]
            else:
                raise BadSchema(f"its reference {reference!r:.80} points at nothing")
        return value


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Of a property that may be left out: leaving it out is how to say null."""
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, list) and any(option in _NULL for option in options):
            rest = [option for option in options if option not in _NULL]
            others = {name: value for name, value in schema.items() if name != key}
            if len(rest) == 1 and isinstance(rest[0], dict) and not (rest[0].keys() & others.keys() - {"description"}):
                return _without_null({**rest[0], **others})
            if rest:
                return {**others, key: rest}
    kinds = schema.get("type")
    if isinstance(kinds, list) and "null" in kinds and len(kinds) > 1:
        rest = [kind for kind in kinds if kind != "null"]
        schema = {**schema, "type": rest[0] if len(rest) == 1 else rest}
        if isinstance(schema.get("enum"), list) and None in schema["enum"]:
            schema["enum"] = [value for value in schema["enum"] if value is not None]
    return schema


def _checked_size(schema: Any, how: str) -> None:
    try:
        size = len(json.dumps(schema, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError, TypeError):
        raise BadSchema(f"its input schema {how} is no JSON, or nested too deep") from None
    if size > MAX_BYTES:
        raise BadSchema(f"its input schema {how} has {size:,} bytes; at most {MAX_BYTES:,} are read")


def _check_meaning(schema: Mapping[str, Any]) -> None:
    """What JSON Schema itself says of schemas."""
    from jsonschema import Draft202012Validator, SchemaError

    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        where = "/".join(map(str, error.absolute_path))
        raise BadSchema(f"it is no JSON schema{f' at {where}' if where else ''}: {error.message[:160]}") from None
