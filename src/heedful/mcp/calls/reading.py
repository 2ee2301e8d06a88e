"""What a tool's result says, as rows, one record, or text: JSON as it is; text that is JSON, Python's notation, blocks
of "Key: value" lines, or a list of lines under a heading, read as such.

    read(output.value).rows         # [{"Commit": "…", "Author": "…"}, …], ["orders", "customers"], …
"""

from __future__ import annotations

import ast
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

MAX_CHARS = 1 << 18
"""Of a text that is looked at; a longer one is text."""
MAX_LITERAL_CHARS = 1 << 16
MAX_FIELDS = 64

_FIELD = re.compile(r"([A-Za-z][\w .-]{0,40}?)\s*:\s+(\S.*)|([A-Za-z][\w .-]{0,40}?):()")
_HEADING = re.compile(r"[A-Z][^:]{0,60}:")
_MARKED = re.compile(r"\[([A-Z]+)\]\s+(\S.*?)(?:\s{2,}(\S.*))?")
_ACTOR = re.compile(r"<[\w.]+ \"(.*)\">")

Form = Literal["rows", "record", "text", "value"]


@dataclass(frozen=True)
class Reading:
    form: Form
    rows: tuple[Any, ...] = ()
    """Of form rows: records, texts or numbers."""
    record: dict[str, Any] | None = None
    """Of form record: dotted key → single value."""
    text: str = ""
    """Of form text."""
    value: Any = None
    """Of form value: a number, true, false or null."""
    heading: str = ""

    @property
    def texts(self) -> list[str]:
        """The rows' own texts: those of one-field records, and the names of others."""
        return [text for row in self.rows if (text := row_name(row)) is not None]


def read(value: Any) -> Reading:
    """Of a result's value; never raises."""
    value = _unwrapped(value)
    if isinstance(value, str):
        return _read_text(value)
    return _read_json(value)


def row_name(row: Any) -> str | None:
    """What a row is called by: itself, its only field, or its name."""
    if isinstance(row, str):
        return row
    if isinstance(row, int | float):
        return str(row)
    if isinstance(row, dict) and row:
        if len(row) == 1:
            return row_name(next(iter(row.values())))
        for key in row:
            if str(key).lower() in ("name", "title", "id", "path"):
                return row_name(row[key])
    return None


def keys_of(row: Any) -> list[str]:
    return [str(key) for key in row] if isinstance(row, dict) else []


def _unwrapped(value: Any) -> Any:
    """{"content": x} alone is x."""
    while isinstance(value, dict) and len(value) == 1 and isinstance(inner := next(iter(value.values())), str | list):
        value = inner
    return value


def _read_json(value: Any) -> Reading:
    if isinstance(value, list):
        return Reading("rows", rows=tuple(value))
    if isinstance(value, dict):
        lists = [(key, each) for key, each in value.items() if isinstance(each, list)]
        if len(lists) == len(value) and lists:
            named = [str(key) for key, each in lists if each]
            return Reading("rows", rows=tuple(row for _, each in lists for row in each), heading=" ".join(named))
        return Reading("record", record=_flat(value))
    return Reading("value", value=value)


def _flat(value: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, each in value.items():
        name = f"{before}{key}"
        if isinstance(each, dict) and before.count(".") < 3:
            found |= _flat(each, f"{name}.")
        elif isinstance(each, list):
            found[name] = ", ".join(map(_plain, each[:50]))
        else:
            found[name] = each
        if len(found) > MAX_FIELDS:
            break
    return found


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _read_text(text: str) -> Reading:
    if len(text) > MAX_CHARS:
        return Reading("text", text=text)
    stripped = text.strip()
    if stripped[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):
            return read(json.loads(stripped)) if stripped[:1] != '"' else Reading("text", text=text)
        if len(stripped) <= MAX_LITERAL_CHARS:
            with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                found = ast.literal_eval(stripped)
                if isinstance(found, list | dict):
                    return _read_json(found)
    lines = [line.rstrip() for line in stripped.split("\n")]
    heading = ""
    if len(lines) == 1 and _HEADING.fullmatch(lines[0]):
        return Reading("rows", heading=lines[0].rstrip(":"))
    if len(lines) > 1 and _HEADING.fullmatch(lines[0]):
        heading, lines = lines[0].rstrip(":"), lines[1:]
    records = _blocks(lines)
    if records and (len(records) > 1 or heading):
        return Reading("rows", rows=tuple(records), heading=heading)
    if records:
        return Reading("record", record=records[0])
    rows = _line_rows(lines, bool(heading))
    if rows is not None:
        return Reading("rows", rows=tuple(rows), heading=heading)
    return Reading("text", text=text)


def _blocks(lines: list[str]) -> list[dict[str, Any]] | None:
    """Records of "Key: value" lines, parted by empty ones; None where any line is something else."""
    records: list[dict[str, Any]] = [{}]
    for line in lines:
        if not line.strip():
            if records[-1]:
                records.append({})
            continue
        match = _FIELD.fullmatch(line.strip())
        if match is None:
            return None
        key, value = (match[1], match[2]) if match[1] else (match[3], "")
        if key in records[-1]:
            return None
        records[-1][key] = _unquoted(value)
    found = [record for record in records if record]
    return found if found and all(len(record) > 1 for record in found) else None


def _unquoted(value: str) -> Any:
    """Without the quotes and wrappers of Python's repr."""
    if actor := _ACTOR.fullmatch(value):
        return actor[1]
    if value[:1] in ("'", '"') and value[-1:] == value[:1]:
        with suppress(ValueError, SyntaxError):
            found = ast.literal_eval(value)
            return found.strip() if isinstance(found, str) else value
    return value


def _line_rows(lines: list[str], has_heading: bool) -> list[Any] | None:
    """Lines that are a list: marked ones ("[FILE] a.txt", "* main"), paths, or any single words under a heading."""
    full = [line for line in lines if line.strip()]
    if not full:
        return [] if has_heading else None
    listed = full[: lines.index("")] if "" in lines[1:] else full  # a summary may follow
    marked = [_MARKED.fullmatch(line.strip()) for line in listed]
    if marked and all(marked):
        return [
            {"kind": match[1].lower(), "name": match[2], **({"size": match[3]} if match[3] else {})}
            for match in marked
            if match
        ]
    starred = [re.fullmatch(r"([*+-]|) *(\S+)", line.strip()) for line in full]
    if all(starred) and (len(full) > 1 or has_heading or full[0].strip()[0] in "*/"):
        if sum(match is not None and match[1] == "*" for match in starred) == 1:  # git's way to mark the current one
            return [{"name": match[2], "current": match[1] == "*"} for match in starred if match]
        return [match[2] for match in starred if match]
    return None
