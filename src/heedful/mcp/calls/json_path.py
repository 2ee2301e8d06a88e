"""A small, safe part of JSONPath: `.key`, `["key"]`, `[i]`, `[a:b]`, `[*]`, after an optional `$`.

    at(value, ".rows[0:3].name")           # a list of up to three names

After `[a:b]` or `[*]` the rest is asked of each element; elements that lack it are left out, and the answer is one
list. Each step looks at every value of the last one once: linear in the data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from heedful.errors import McpHandleError

MAX_PATH_CHARS = 500
_STEP = re.compile(
    r"""\.(?P<name>[^\s.\[\]"'*]{1,200})|\[(?:(?P<all>\*)|(?P<index>-?[0-9]{1,12})"""
    r"""|(?P<start>-?[0-9]{0,12}):(?P<stop>-?[0-9]{0,12})|(?P<quoted>"(?:[^"\\]|\\.)*"))\]""",
    re.DOTALL,
)
_SHAPES = 'It is made of .key, ["key"], [3], [0:10] and [*].'


@dataclass(frozen=True)
class Key:
    name: str


@dataclass(frozen=True)
class Index:
    index: int


@dataclass(frozen=True)
class Each:
    """Elements `start:stop` as Python counts, or all."""

    start: int | None = None
    stop: int | None = None


Step = Key | Index | Each


def parse_path(path: str) -> tuple[Step, ...]:
    """Raises McpHandleError naming what is not understood."""
    if len(path) > MAX_PATH_CHARS:
        raise McpHandleError(f"a path of {len(path):,} characters; at most {MAX_PATH_CHARS} are read", _SHAPES)
    text = path.strip()
    position = 1 if text.startswith("$") else 0
    if text[position : position + 1] not in ("", ".", "["):
        raise McpHandleError(f"the path {path!r:.80} does not begin with . or [", _SHAPES)
    steps: list[Step] = []
    while position < len(text):
        found = _STEP.match(text, position)
        if found is None:
            if text[position:] == "." and not steps:
                break  # jq's name for the whole
            raise McpHandleError(f"the path {path!r:.80} is not understood at {text[position:]!r:.40}", _SHAPES)
        steps.append(_step(found, path))
        position = found.end()
    return tuple(steps)


def at(value: Any, path: str) -> Any:
    """What `path` names in a JSON value. Raises McpHandleError where there is nothing, naming what there is."""
    steps = parse_path(path)
    values, many = [value], False
    for number, step in enumerate(steps):
        if isinstance(step, Each):
            if not many and not isinstance(values[0], list):
                raise McpHandleError(f"the path {path!r:.80}: {_kind(values[0])} is no array", _there(values[0]))
            values = [inner for each in values if isinstance(each, list) for inner in each[step.start : step.stop]]
            many = True
            continue
        found = [inner for each in values for inner in _inside(each, step)]
        if not many and not found:
            what = f"step {number + 1} finds nothing in {_kind(values[0])}"
            raise McpHandleError(f"the path {path!r:.80}: {what}", _there(values[0]))
        values = found
    return values if many else values[0]


def _step(found: re.Match[str], path: str) -> Step:
    if found["name"] is not None:
        return Key(found["name"])
    if found["quoted"] is not None:
        try:
            return Key(json.loads(found["quoted"]))
        except ValueError:
            raise McpHandleError(f"the path {path!r:.80}: {found['quoted']!r:.40} is no JSON string") from None
    if found["index"] is not None:
        return Index(int(found["index"]))
    if found["all"]:
        return Each()
    bounds = [None if text in ("", "-") else int(text) for text in (found["start"], found["stop"])]
    return Each(*bounds)


def _inside(value: Any, step: Key | Index) -> Iterator[Any]:
    if isinstance(step, Key):
        if isinstance(value, dict) and step.name in value:
            yield value[step.name]
    elif isinstance(value, list) and -len(value) <= step.index < len(value):
        yield value[step.index]


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return f"an array of {len(value):,}"
    return "an object" if isinstance(value, dict) else "a single value"


def _there(value: Any) -> str:
    if not isinstance(value, dict):
        return ""
    return f"Its keys: {', '.join(str(key)[:40] for key in list(value)[:20])}{', …' if len(value) > 20 else ''}."
