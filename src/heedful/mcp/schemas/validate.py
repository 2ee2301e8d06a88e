"""Values under a stranger's JSON schema, in bounded time: nothing is fetched, and no pattern is tried that could take
exponential time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_VALUES = 20_000
"""A result of more is not checked against its tool's output schema: a third of a second on the reference machine."""
_MAX_PATTERN_VALUE_CHARS = 128


def has_more_values(value: Any, most: int = MAX_VALUES) -> bool:
    """Whether a JSON value holds more than `most` values, itself counted; looks at no more than that."""
    open_values: list[Iterator[Any]] = [iter((value,))]
    seen = 0
    while open_values:
        for each in open_values[-1]:
            seen += 1
            if seen > most:
                return True
            if isinstance(each, dict | list):
                open_values.append(iter(each.values() if isinstance(each, dict) else each))
                break
        else:
            open_values.pop()
    return False


def schema_fault(value: Any, schema: Any) -> str:
    """The first thing that is wrong, on one line; "" for nothing."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match
    from jsonschema.validators import extend
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    checked = extend(Draft202012Validator, {"pattern": _pattern})
    try:
        error = best_match(checked(_without_name_patterns(schema), registry=Registry()).iter_errors(value))
    except RecursionError:
        return "it is nested too deep"
    except Unresolvable as found:
        return f"its schema points nowhere: {str(found)[:100]}"
    if error is None:
        return ""
    where = error.json_path.removeprefix("$").lstrip(".")[:80]
    return " ".join(f"{f'{where}: ' if where else ''}{error.message}"[:200].split())


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Any:
    """Python's matching can take exponential time, and the pattern is a stranger's: one that may is left to the
    server, which checks its own arguments again."""
    from jsonschema import ValidationError

    if not isinstance(value, str) or len(value) > _MAX_PATTERN_VALUE_CHARS or not is_quick(pattern):
        return
    if not re.search(pattern, value):
        yield ValidationError(f"{value!r:.60} does not match {pattern!r:.60}")


def is_quick(pattern: str) -> bool:
    """Few repetitions, none of a group, few alternatives: at worst the cube of a short value's length."""
    plain = re.sub(r"\\.", "x", pattern, flags=re.DOTALL)
    plain = re.sub(r"\[\^?\]?[^\]]*\]", "x", plain)
    plain = plain.replace("(?", "(")
    repeated_group = re.search(r"\)[*+{?]", plain)
    few = sum(map(plain.count, "*+{")) <= 2 and plain.count("?") + plain.count("|") <= 6
    return few and not repeated_group


def _without_name_patterns(schema: Any) -> Any:
    """Patterns of property names are the server's to check, and what depends on them."""
    if isinstance(schema, list):
        return [_without_name_patterns(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    if "patternProperties" in found:
        for key in ("patternProperties", "additionalProperties", "unevaluatedProperties"):
            found.pop(key, None)
    for key, each in found.items():
        if key in ("properties", "dependentSchemas") and isinstance(each, Mapping):
            found[key] = {name: _without_name_patterns(inner) for name, inner in each.items()}
        elif key not in ("enum", "const", "default", "examples", "required"):
            found[key] = _without_name_patterns(each)
    return found
