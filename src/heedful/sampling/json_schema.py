"""JSON schemas from strangers, made safe to decode under: refused where they cannot be kept, bounded where open.

What is written for a bounded schema always fits the schema as given; it is only narrower. A model that repeats itself
can then not write digits, letters or white space for ever inside of one value:

- Strings have at most STRING_CHARS characters, numbers INTEGER_DIGITS or NUMBER_DIGITS digits before the point and 6
  after it, and no exponent. Tighter limits of the schema stay.
- A value of which nothing is said (`{}`) may be anything, VALUE_DEPTH levels deep, its keys KEY_CHARS characters long.
- An object with `properties` gets no others, unless the schema asks for them.

What stays unbounded: how many items an array has and properties an object has; the keys of additional properties beside
named ones; decimals and additional properties where several schemas apply to one value (`$ref`, `allOf`, `anyOf`,
`oneOf`); what has no type in a document with oneOf.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MAX_BYTES = 256 * 1024
"""Of a schema, regex, grammar or list of choices, in UTF-8."""
MAX_DEPTH = 64
MAX_ENUM = 10_000
MAX_SCHEMAS = 1000
"""In one document, and names that an object requires: llguidance's time grows with their square."""
MAX_PATTERN_PROPERTIES = 16
"""Of one object: each is compared with each."""
MAX_JOINT_PATTERNS = 6
"""In a document where several patterns may apply to one string: the time grows exponentially with them."""
MAX_REGEX_SIZE = 20_000
"""Of a regex whose repetitions are written out: (a{0,100}){0,100} has 10,000."""

STRING_CHARS = 4096
FORMAT_CHARS = {"date-time": 35, "time": 24, "duration": 32, "email": 254, "idn-email": 254, "uri": 1024}
"""Formats whose texts have no end of their own: a fraction of nine digits is enough for a second."""
KEY_CHARS = 128
VALUE_DEPTH = 12
INTEGER_DIGITS = 15
NUMBER_DIGITS = 12
DECIMALS = 1e-6
FINE_DECIMALS = 1e-9
"""Where the schema's own bounds lie closer together than FINE_RANGE."""
FINE_RANGE = 1e-3
EXACT_NUMBER = 2**53
"""Bounds beyond it would be rounded."""

SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""llguidance's options: no white space but one space after a comma or colon."""

_ANY_KEY = f"^(?s:.{{0,{KEY_CHARS}}})$"
_VALUE = "heedful-value-"
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf")
_NOT_KEPT = ("disallow", "divisibleBy", "extends", "x-guidance")
_TYPE_KEYWORDS = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("prefixItems", "allOf", "anyOf", "oneOf")
_SCHEMA = ("items", "additionalItems", "additionalProperties")


class Refused(Exception):
    """Why something cannot be honoured; becomes a BadParameter where the name of the parameter is known."""


def parsed_json(text: str) -> Any:
    """The value of a JSON text, at most MAX_DEPTH levels deep, without NaN or infinities. Raises Refused."""
    checked_size(text)
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise Refused(f"it is nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise Refused(f"it is not valid JSON: {error}") from error
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for holder in level for item in _items(holder)]
    if level:
        raise Refused(f"it is nested more than {MAX_DEPTH} levels deep")
    return value


def checked_size(text: str) -> None:
    """Raises Refused for a text that is too long or no Unicode."""
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise Refused("it has lone surrogates, which are no characters") from None
    if size > MAX_BYTES:
        raise Refused(f"it has {size:,} bytes; at most {MAX_BYTES:,} are read")


def bounded_schema(schema: Any) -> dict[str, Any]:
    """`schema`, of `parsed_json`, with bounds. It is changed in place. Raises Refused."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise Refused("a schema is a JSON object")
    _Bounds(schema).apply()
    return schema


def checked_regex(pattern: str) -> str:
    """`pattern`, unless its repetitions multiply beyond MAX_REGEX_SIZE; raises Refused. One pass, no backtracking.

    It only counts; whether the regex is well-formed, llguidance says.
    """
    sizes, atom, pos = [0], 0, 0  # of every open group so far; of the last atom, counted in sizes[-1] already
    while pos < len(pattern):
        char = pattern[pos]
        pos += 1
        if char == "(":
            sizes.append(0)
            atom = 0
        elif char == ")" and len(sizes) > 1:
            atom = max(sizes.pop(), 1)
            sizes[-1] += atom
        elif char == "{":
            times, pos = _repetition(pattern, pos)
            sizes[-1] += atom * (times - 1)
            atom *= times
        elif char not in "*+?|":
            pos = _atom_end(pattern, pos - 1)
            atom = 1
            sizes[-1] += 1
        if sizes[-1] > MAX_REGEX_SIZE:
            raise Refused(f"the repetitions of the regex {pattern[:60]!r} multiply to more than {MAX_REGEX_SIZE:,}")
    return pattern


def _repetition(pattern: str, pos: int) -> tuple[int, int]:
    """How often at most, for the braces that open before `pos`, and the position behind them; 1 if it is none."""
    end = pattern.find("}", pos, pos + 24)
    numbers = [part.strip() for part in pattern[pos : max(end, pos)].split(",")]
    counts = [int(part) for part in numbers if part.isascii() and part.isdigit()]
    return (max(1, *counts), end + 1) if counts else (1, pos)


def _atom_end(pattern: str, pos: int) -> int:
    """The position behind the character, escape or class that starts at `pos`."""
    if pattern[pos] == "\\":
        return pos + 2
    if pattern[pos] != "[":
        return pos + 1
    pos += 1
    pos += pattern.startswith("^", pos)
    pos += pattern.startswith("]", pos)
    while pos < len(pattern) and pattern[pos] != "]":
        pos += 2 if pattern[pos] == "\\" else 1
    return pos + 1


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


class _Bounds:
    """Walks one document. Schemas are changed in place, so that references into them stay right."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._seen: set[int] = set()
        self._patterns = 0
        self._may_join = False
        self._targets: list[str] = []
        self._uses_value = False
        # Narrowing one side of a oneOf may hide that both sides match; no guessing of types in such documents.
        self._narrows = not _has_one_of(root)

    def apply(self) -> None:
        self._bound(self._root, in_branch=False)
        while self._targets:
            target = self._resolved(self._targets.pop())
            if isinstance(target, dict):
                self._bound(target, in_branch=False)
        if self._may_join and self._patterns > MAX_JOINT_PATTERNS:
            raise Refused(f"more than {MAX_JOINT_PATTERNS} patterns and formats together with allOf are not supported")
        if self._uses_value:
            definitions = self._root.setdefault("$defs", {})
            if not isinstance(definitions, dict):
                raise Refused("$defs must be an object")
            if any(name.startswith(_VALUE) for name in definitions):
                raise Refused(f"names that begin with {_VALUE!r} are taken")
            definitions.update(_values())

    def _bound(self, schema: dict[str, Any], *, in_branch: bool) -> None:
        """`in_branch`: other schemas apply to the same value, as inside of allOf."""
        if id(schema) in self._seen:
            return
        self._seen.add(id(schema))
        if len(self._seen) > MAX_SCHEMAS:
            raise Refused(f"it holds more than {MAX_SCHEMAS:,} schemas")
        self._check(schema)
        combines = any(name in schema for name in _COMBINING)
        alone = not (combines or in_branch)
        self._bound_parts(schema, alone=alone)
        if "const" in schema or "enum" in schema:
            return
        types = self._types(schema)
        if not types:
            said = any(name in schema for names in _TYPE_KEYWORDS.values() for name in names)
            if not combines and not said:
                schema.update(self._any_value())
            return
        if "string" in types:
            _bound_string(schema)
        if types & {"integer", "number"}:
            _bound_number(schema, whole="number" not in types, decimals=alone)
        if "array" in types:
            self._bound_array(schema)
        if "object" in types:
            self._bound_object(schema, alone=alone)

    def _check(self, schema: dict[str, Any]) -> None:
        for name in _NOT_KEPT:
            if name in schema:
                raise Refused(f"the keyword {name!r} is not supported")
        if "$id" in schema and schema is not self._root:
            raise Refused("'$id' is supported at the top of a schema only")
        reference = schema.get("$ref", "#")
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise Refused(f"the reference {reference!r:.60} does not point into the schema itself (#/…)")
        if "$ref" in schema:
            self._targets.append(reference)
        values = schema.get("enum", [])
        if isinstance(values, list) and len(values) > MAX_ENUM:
            raise Refused(f"an enum has {len(values):,} values; at most {MAX_ENUM:,} are allowed")
        self._check_patterns(schema)

    def _check_patterns(self, schema: dict[str, Any]) -> None:
        named = schema.get("patternProperties")
        by_pattern = list(named) if isinstance(named, dict) else []
        if len(by_pattern) > MAX_PATTERN_PROPERTIES:
            raise Refused(f"patternProperties has {len(by_pattern):,} patterns; {MAX_PATTERN_PROPERTIES} are allowed")
        required = schema.get("required")
        if isinstance(required, list) and len(required) > MAX_SCHEMAS:
            raise Refused(f"an object requires {len(required):,} properties; at most {MAX_SCHEMAS:,} are allowed")
        for pattern in [schema.get("pattern", ""), *by_pattern]:
            checked_regex(pattern if isinstance(pattern, str) else "")
        own = ("pattern" in schema) + ("format" in schema)
        self._patterns += own
        combining = sum(name in schema for name in _COMBINING)
        self._may_join |= "allOf" in schema or combining > 1 or bool(combining and own)

    def _bound_parts(self, schema: dict[str, Any], *, alone: bool) -> None:
        """All schemas inside of this one."""
        for name in _SCHEMAS_BY_NAME:
            named = schema.get(name)
            if isinstance(named, dict):
                for key in named:
                    self._bound_in(named, key, in_branch=False)
        for name in (*_SCHEMA_LISTS, "items"):
            listed = schema.get(name)
            if isinstance(listed, list):
                for i in range(len(listed)):
                    self._bound_in(listed, i, in_branch=name in _COMBINING)
        for name in _SCHEMA:
            # Of an object that is combined with others, additional properties stay as they are: see _bound_object.
            if name in schema and (alone or name != "additionalProperties" or _says_something(schema[name])):
                self._bound_in(schema, name, in_branch=False)

    def _bound_in(self, holder: Any, key: Any, *, in_branch: bool) -> None:
        """The schema `holder[key]`."""
        if holder[key] is True:
            holder[key] = {}
        if isinstance(holder[key], dict):
            self._bound(holder[key], in_branch=in_branch)

    def _types(self, schema: dict[str, Any]) -> set[str]:
        """The types that a schema names, or that its keywords are about. In the latter case it names them hereafter."""
        named = schema.get("type")
        if isinstance(named, str):
            return {named}
        if isinstance(named, list):
            return {name for name in named if isinstance(name, str)}
        meant = [kind for kind, names in _TYPE_KEYWORDS.items() if any(name in schema for name in names)]
        if meant and self._narrows:
            schema["type"] = meant
            return set(meant)
        return set()

    def _bound_array(self, schema: dict[str, Any]) -> None:
        rest = "additionalItems" if isinstance(schema.get("items"), list) else "items"
        if rest not in schema:
            schema[rest] = self._any_value()

    def _bound_object(self, schema: dict[str, Any], *, alone: bool) -> None:
        required = schema.get("required")
        needed = len(set(map(str, required))) if isinstance(required, list) else 0
        least = schema.get("minProperties", 0)
        if isinstance(least, int | float) and least > max(1, needed):
            # llguidance lets an additional key come twice, and would count it twice.
            raise Refused("minProperties above 1 and above the number of required properties is not supported")
        if not alone:
            return  # llguidance multiplies out what is said of the same property twice
        if "additionalProperties" not in schema:
            closed = self._narrows and bool(schema.get("properties") or schema.get("patternProperties"))
            schema["additionalProperties"] = False if closed else self._any_value()
        extra = schema["additionalProperties"]
        # A pattern would apply to named properties too.
        if extra is not False and not schema.get("properties") and not schema.get("patternProperties"):
            schema["patternProperties"] = {_ANY_KEY: extra}
            schema["additionalProperties"] = False

    def _any_value(self) -> dict[str, Any]:
        self._uses_value = True
        return {"$ref": f"#/$defs/{_VALUE}{VALUE_DEPTH}"}

    def _resolved(self, reference: str) -> Any:
        """What a JSON pointer (RFC 6901) points at; None for nothing, which llguidance refuses."""
        value: Any = self._root
        for part in reference[2:].split("/") if reference != "#" else ():
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and key.isascii() and key.isdigit():
                value = value[int(key)] if len(key) < 9 and int(key) < len(value) else None
            else:
                value = value.get(key) if isinstance(value, dict) else None
        return value


def _has_one_of(value: Any) -> bool:
    return (isinstance(value, dict) and "oneOf" in value) or any(map(_has_one_of, _items(value)))


def _says_something(schema: Any) -> bool:
    return isinstance(schema, dict) and bool(schema)


def _bound_string(schema: dict[str, Any]) -> None:
    least, most = schema.get("minLength", 0), schema.get("maxLength", STRING_CHARS)
    if isinstance(least, int | float) and least > STRING_CHARS:
        raise Refused(f"minLength is {least:,}; strings are at most {STRING_CHARS:,} characters long")
    if isinstance(most, int | float) and not isinstance(most, bool):
        form = schema.get("format")
        schema["maxLength"] = min(most, FORMAT_CHARS.get(form, STRING_CHARS) if isinstance(form, str) else STRING_CHARS)


def _bound_number(schema: dict[str, Any], *, whole: bool, decimals: bool) -> None:
    for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        bound = schema.get(name, 0)
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            raise Refused(f"{name} must be a number")
        if not abs(bound) <= EXACT_NUMBER:
            raise Refused(f"{name} is beyond {EXACT_NUMBER:,}, where numbers are no longer exact")
    lows = [schema[name] for name in ("minimum", "exclusiveMinimum") if name in schema]
    highs = [schema[name] for name in ("maximum", "exclusiveMaximum") if name in schema]
    limit = 10 ** (INTEGER_DIGITS if whole else NUMBER_DIGITS) - 1
    if not lows:
        schema["minimum"] = -max([limit, *(-10 * high for high in highs)])
    if not highs:
        schema["maximum"] = max([limit, *(10 * low for low in lows)])
    if decimals and not whole and "multipleOf" not in schema:
        is_narrow = bool(lows and highs) and min(highs) - max(lows) < FINE_RANGE
        schema["multipleOf"] = FINE_DECIMALS if is_narrow else DECIMALS


def _values() -> dict[str, Any]:
    """Definitions of a value of any type, by how many levels it may still be deep."""
    defined: dict[str, Any] = {}
    for depth in range(VALUE_DEPTH + 1):
        number: dict[str, Any] = {"type": "number"}
        _bound_number(number, whole=False, decimals=True)
        kinds = [{"type": "null"}, {"type": "boolean"}, number, {"type": "string", "maxLength": STRING_CHARS}]
        if depth:
            inner = {"$ref": f"#/$defs/{_VALUE}{depth - 1}"}
            members = {"patternProperties": {_ANY_KEY: inner}, "additionalProperties": False}
            kinds += [{"type": "array", "items": inner}, {"type": "object", **members}]
        defined[f"{_VALUE}{depth}"] = {"anyOf": kinds}
    return defined
