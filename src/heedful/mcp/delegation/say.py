"""An answer in words from a tool's result, by rules: the number that is asked for, the field, the names, the text.

    said(request, arguments, read(output.value))        # "7", "Ana <ana@example.org>", "reports, notes.txt", …

None where the result does not plainly hold what was asked; then a model reads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from heedful.mcp.calls.reading import Reading, row_name
from heedful.mcp.catalogue.bm25 import split_name, words
from heedful.mcp.catalogue.thesaurus import with_synonyms
from heedful.mcp.delegation.mentions import Request

MOST_ROWS = 50
MOST_CHARS = 2000
"""Of an answer; a longer one is for reading by handle."""
MOST_FIELDS = 12

ORDERING = frozenset(["first", "oldest", "earliest", "last", "latest", "newest"])
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d")
_WHO = frozenset(words("author owner user customer person people name by sender creator"))
_TOPICS = frozenset(words("message subject title description summary text content"))
_FILES, _FOLDERS = ("file",), ("dir", "directory", "folder")


@dataclass(frozen=True)
class _Asked:
    """With what a tool was called, and the words that name what is wanted of its result."""

    arguments: Mapping[str, Any]
    about: tuple[str, ...]


def said(request: Request, arguments: Mapping[str, Any], reading: Reading, *, about: Sequence[str] = ()) -> str | None:
    """`about`: the words that name what is asked for; default: all of the request's."""
    found = _said(request, _Asked(arguments, tuple(about)), reading)
    return found if found is not None and 0 < len(found) <= MOST_CHARS else None


def _said(request: Request, asked: _Asked, reading: Reading) -> str | None:
    if reading.form == "value":
        return _plain(reading.value)
    if reading.form == "text":
        return _of_text(request, reading.text)
    if reading.form == "record":
        return _of_record(request, asked, reading.record or {})
    return _of_rows(request, asked, list(reading.rows))


def _of_text(request: Request, text: str) -> str | None:
    if request.asks_whether and request.mentions("path"):
        return "yes"
    if request.has(r"\bhow many lines\b|\bnumber of lines\b"):
        return str(len(text.splitlines()))
    if request.has(r"\bhow many words\b|\bnumber of words\b"):
        return str(len(text.split()))
    if request.asks_count and not re.fullmatch(r"\D*\d+\D*", text):
        return None
    return text.strip() or "It is empty."


def moment_key(rows: Sequence[Any]) -> str | None:
    """The field by which rows stand in time."""
    if len(rows) < 2 or not all(isinstance(row, Mapping) for row in rows):
        return None
    return next((key for key in rows[0] if all(_MOMENT.match(str(row.get(key))) for row in rows)), None)


def _in_time(request: Request, rows: list[Any]) -> list[Any]:
    """The one row that is asked for by its place in time, else all."""
    key = moment_key(rows)
    is_oldest = request.has(r"\b(?:first|oldest|earliest)\b")
    if key is None or not (is_oldest or request.newest):
        return rows
    return [(min if is_oldest else max)(rows, key=lambda row: str(row[key]))]


def _of_rows(request: Request, asked: _Asked, rows: list[Any]) -> str | None:
    rows = _in_time(request, _of_kind(request, rows))
    if request.asks_whether and request.mentions("path"):
        return "yes"
    if request.has(r"\bhow many (?:lines|words)\b|\bnumber of (?:lines|words)\b") and _are_texts(rows):
        return str(sum(len(row.split()) for row in rows) if request.has(r"\bwords\b") else len(rows))
    single = _single(rows[0]) if len(rows) == 1 else _NOTHING
    if single is not _NOTHING and (not isinstance(single, str) or not request.asks_count):
        return _plain(single)
    if request.asks_count and not _are_counts(rows):
        names = [name for row in rows if (name := row_name(row)) is not None]
        listed = f": {', '.join(names)}" if 0 < len(names) == len(rows) <= 20 else ""
        return f"{len(rows)}{listed}"
    if not rows:
        return "no" if request.asks_whether else "none"
    if request.has(r"\bcurrent|\bcurrently\b|\bchecked out\b|\b(?:am i|are we|we're|i'm) on\b"):
        current = [row for row in rows if isinstance(row, Mapping) and row.get("current") is True]
        rows = current or rows
    if len(rows) == 1 and isinstance(rows[0], Mapping) and set(rows[0]) - {"current", "kind"} != {"name"}:
        return _of_record(request, asked, dict(rows[0]))
    if len(rows) > MOST_ROWS:
        return None
    return _listed(request, asked, rows)


def _listed(request: Request, asked: _Asked, rows: list[Any]) -> str | None:
    names = [row_name(row) for row in rows]
    if all(name is not None for name in names) and (not isinstance(rows[0], Mapping) or _is_named_list(rows)):
        separator = "\n" if any(len(str(name)) > 60 or "," in str(name) for name in names) else ", "
        return separator.join(str(name) for name in names)
    fields = _asked_fields(request, asked, rows[0]) if isinstance(rows[0], Mapping) else []
    if fields and all(isinstance(row, Mapping) for row in rows):
        return ("\n" if len(fields) > 1 else ", ").join(
            ", ".join(_told(row.get(field)) for field in fields) for row in rows
        )
    return "\n".join(_fields(row) if isinstance(row, Mapping) else _told(row) for row in rows)


def _is_named_list(rows: Sequence[Any]) -> bool:
    """Whether names alone say enough: rows of a name and a mark, or descriptions of columns."""
    keys = {str(key).lower() for key in rows[0]}
    return keys <= {"name", "kind", "current", "type", "id"} or {"name", "type", "pk"} <= keys


def _of_record(request: Request, asked: _Asked, record: Mapping[str, Any]) -> str | None:
    fields = _asked_fields(request, asked, record)
    if len(fields) == 1 and isinstance(record[fields[0]], int | float) and request.has(r"\b(?:which|who)\b"):
        fields = []  # the number is by what it was chosen; asked for is who or which it is
    if len(fields) == 1:
        told = _told(record[fields[0]])
        return told if re.search(r"[^\W\d]", told) else f"{split_name(fields[0])}: {told}"
    shown = {key: record[key] for key in fields} if fields else _news(asked, record)
    return _fields(shown) if 0 < len(shown) <= MOST_FIELDS else None


def _asked_fields(request: Request, asked: _Asked, record: Mapping[str, Any]) -> list[str]:
    """Keys of what the question is about; [] where none is nearer to it than the others."""
    news = _news(asked, record)
    asks_length = request.has(r"\bdifference\b|\bhow (?:many|long|much)\b|\bahead\b|\bbehind\b")
    if request.has(r"\btime\b|\bo.clock\b|\bconvert\b") and not asks_length and not asked.about:
        moments = [key for key, value in news.items() if _MOMENT.match(str(value))]
        if moments:
            return moments[:1]
    if request.has(r"\bwhen\b") and not request.has(r"\bwhat\b"):
        news = {key: value for key, value in news.items() if _MOMENT.search(str(value)) or _is_date(str(value))} or news
    if request.has(r"\bwho\b|\bwhose\b"):
        people = [key for key in news if set(words(split_name(key))) & _WHO]
        if people:
            return people[:1]
    if request.has(r"\babout\b") and (topics := [key for key in news if set(words(split_name(key))) & _TOPICS]):
        return topics[:1]
    stems = words(" ".join(asked.about)) or [stem for word in request.words for stem in word.stems]
    scores = {key: _nearness(key, set(with_synonyms(stems)), set(stems)) for key in news}
    best = max(scores.values(), default=0.0)
    nearest = [key for key, score in scores.items() if score == best and best > 0]
    return nearest if nearest and len(nearest) < max(2, len(record)) else ([*news] if len(news) == 1 else [])


def _nearness(key: str, asked: set[str], exact: set[str]) -> float:
    own = words(split_name(key))
    return 2.0 * len(exact & set(own)) + len(asked & set(with_synonyms(own)))


def _news(asked: _Asked, record: Mapping[str, Any]) -> dict[str, Any]:
    """What does not only say again what was asked with."""
    given = [str(value) for value in asked.arguments.values() if isinstance(value, str | int | float)]
    return {
        key: value
        for key, value in record.items()
        if not any(
            str(value) == each or (re.fullmatch(r"\d\d:\d\d", each) and f"T{each}" in str(value)) for each in given
        )
    }


def _of_kind(request: Request, rows: list[Any]) -> list[Any]:
    """Only files, or only folders, where the question is about them."""
    if not rows or not all(isinstance(row, Mapping) and "kind" in row for row in rows):
        return rows
    asks_files = request.has(r"\b(?:how many|which|what|list|show|number of|the|all)\b[\w\s]{0,12}\bfiles\b")
    asks_folders = request.has(r"\b(?:subfolders|folders|directories|subdirectories)\b")
    if asks_files == asks_folders:
        return rows
    return [row for row in rows if row["kind"] in (_FILES if asks_files else _FOLDERS)]


def _are_texts(rows: Sequence[Any]) -> bool:
    return all(isinstance(row, str) for row in rows)


_NOTHING = object()


def _single(row: Any) -> Any:
    if isinstance(row, Mapping):
        return next(iter(row.values())) if len(row) == 1 else _NOTHING
    return row


def _are_counts(rows: Sequence[Any]) -> bool:
    """Rows of a query that has counted by itself."""
    return bool(rows) and all(isinstance(row, Mapping) and any("COUNT(" in str(key) for key in row) for row in rows)


def _fields(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {_told(value)}" for key, value in row.items())


def _told(value: Any) -> str:
    """As a person reads it: a moment with its weekday."""
    text = _plain(value)
    if isinstance(value, str) and re.fullmatch(
        r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?", value
    ):
        moment = datetime.fromisoformat(value)
        offset = f" (UTC{moment:%z}" if moment.tzinfo else ""
        return f"{moment:%H:%M on %A %Y-%m-%d}{offset[:-2] + ':' + offset[-2:] + ')' if offset else ''}"
    return text


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}" if not value.is_integer() else f"{value:.0f}"
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return "none" if value is None else str(value)


def _is_date(value: str) -> bool:
    return re.search(r"\b(?:19|20)\d\d\b", value) is not None and re.search(r"[A-Z][a-z]{2}|\d-\d", value) is not None
