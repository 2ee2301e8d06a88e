"""A big value in few words: the shape of JSON and its first rows, head and tail of a text."""

from __future__ import annotations

import json
from typing import Any

SAMPLE_ROWS = 50
MAX_KEYS = 20
MAX_NESTING = 3
_KEY_CHARS = 40
_ROWS_SHOWN = 5


def preview(value: Any, text: str, most_chars: int) -> str:
    """At most about `most_chars` characters; `text` is all of it, for a value that is no array of rows."""
    if not isinstance(value, list | dict):
        return head_and_tail(text, most_chars)
    told = _cut(shape(value), most_chars // 3)
    path, rows = _rows(value)
    if rows is None:
        return f"{told}\n{head_and_tail(text, most_chars - len(told))}"
    room = most_chars - len(told)
    each_chars = max(20, room // (_ROWS_SHOWN + 1))
    first = [_cut(json.dumps(_sample(row), ensure_ascii=False), each_chars) for row in rows[:_ROWS_SHOWN]]
    last = [_cut(json.dumps(_sample(row), ensure_ascii=False), each_chars) for row in rows[_ROWS_SHOWN:][-1:]]
    where = f" of {path}" if path else ""
    shown = [told, f"first{where}:", *first, *([f"last{where}:", *last] if last else [])]
    return "\n".join(shown)


def head_and_tail(text: str, most_chars: int) -> str:
    """The beginning and a third as much of the end, and how much is between."""
    if len(text) <= most_chars:
        return text
    head, tail = most_chars * 3 // 4, most_chars // 4
    return f"{text[:head]}\n[… {len(text) - head - tail:,} characters …]\n{text[len(text) - tail :]}"


def shape(value: Any, depth: int = 0) -> str:
    """`{rows: [5,000 × {id: int, name?: str}], total: int}`, from the first rows of each array."""
    if isinstance(value, dict):
        return _shape_of_objects([value], depth)
    if isinstance(value, list):
        if not value:
            return "[]"
        rows = value[:SAMPLE_ROWS]
        objects = [row for row in rows if isinstance(row, dict)]
        kinds = [_shape_of_objects(objects, depth + 1)] if objects else []
        kinds += dict.fromkeys(shape(row, depth + 1) for row in rows if not isinstance(row, dict))
        return f"[{len(value):,} × {'|'.join(kinds[:4])}{'|…' if len(kinds) > 4 else ''}]"
    if value is None:
        return "null"
    return {bool: "bool", int: "int", float: "float", str: "str"}[type(value)]


def _shape_of_objects(objects: list[dict[str, Any]], depth: int) -> str:
    if depth > MAX_NESTING:
        return "object"
    keys: dict[str, list[Any]] = {}
    for each in objects:
        for key in list(each)[: MAX_KEYS * 2]:
            keys.setdefault(key, []).append(each[key])
    told = [
        f"{_cut(key, _KEY_CHARS)}{'?' if len(values) < len(objects) else ''}: {_kinds(values, depth)}"
        for key, values in list(keys.items())[:MAX_KEYS]
    ]
    more = max(len(each) for each in objects) - MAX_KEYS
    return "{" + ", ".join(told) + (f", … {more:,} more keys" if more > 0 else "") + "}"


def _kinds(values: list[Any], depth: int) -> str:
    kinds = list(dict.fromkeys(shape(value, depth + 1) for value in values[:SAMPLE_ROWS]))
    return kinds[0] if len(kinds) == 1 else "|".join(dict.fromkeys(kind.split(" ", 1)[0] for kind in kinds))[:60]


def _rows(value: list[Any] | dict[str, Any]) -> tuple[str, list[Any] | None]:
    """The longest array, itself or one step in, and its path."""
    if isinstance(value, list):
        return "", value
    arrays = [(key, each) for key, each in value.items() if isinstance(each, list) and len(each) >= _ROWS_SHOWN]
    if not arrays:
        return "", None
    key, rows = max(arrays, key=lambda pair: len(pair[1]))
    return (f".{key}" if key.isidentifier() else f"[{json.dumps(key, ensure_ascii=False)}]")[:100], rows


def _sample(value: Any, depth: int = 0) -> Any:
    """Little of a row that may itself be big."""
    if isinstance(value, str):
        return _cut(value, 400)
    if isinstance(value, list):
        return [_sample(each, depth + 1) for each in value[:20]] if depth < MAX_NESTING else f"[{len(value):,}]"
    if isinstance(value, dict):
        if depth >= MAX_NESTING:
            return f"{{{len(value):,} keys}}"
        return {_cut(str(key), _KEY_CHARS): _sample(value[key], depth + 1) for key in list(value)[:MAX_KEYS]}
    return value


def _cut(text: str, most_chars: int) -> str:
    return text if len(text) <= most_chars else text[: max(0, most_chars - 1)] + "…"
