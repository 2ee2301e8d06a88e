"""A question about one table as a SELECT: counts, sums, averages, extremes, conditions that the question names.

    table = Table("orders", (Column("id", True), Column("customer", False), Column("amount", True)))
    compose(Request.of("How many rows has table orders?"), table, {})     # SELECT COUNT(*) FROM "orders"

One table, no joins; None where a word of the question is left over, for then something else was asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from heedful.mcp.catalogue.bm25 import stem, words
from heedful.mcp.delegation.mentions import Mention, Request, Word, is_within, occurrences

MOST_ROWS = 50

Span = tuple[int, int]

_HIGH = r"highest|largest|biggest|greatest|maximum|max|most|top|best|longest|heaviest|tallest"
_LOW = r"lowest|smallest|least|minimum|min|fewest|worst|shortest|lightest"
_PRICED = {"most expensive": True, "dearest": True, "cheapest": False, "least expensive": False}
_DATED = {"latest": True, "newest": True, "most recent": True, "last": True, "earliest": False, "first": False}
_AGED = {"oldest": True, "youngest": False}
_PRICES = ("price", "cost", "amount", "total")
_HINTED = (
    (_PRICED, _PRICES),
    (_DATED, ("date", "time", "created", "day", "year")),
    (_AGED, ("age",)),
)
_OVER = r"(?:more(?:\s+expensive)?|greater|higher|larger|bigger|dearer)\s+than|over|above|at\s+least|exceeding"
_UNDER = r"(?:less(?:\s+expensive)?|fewer|lower|smaller|cheaper)\s+than|under|below|at\s+most"
_PEOPLE = frozenset(words("customer user author owner person people client member employee buyer seller"))
_FILLERS = frozenset(
    words(
        "table tables database db sqlite sql query row rows record records entry entries value values overall "
        "place placed buy bought order ordered purchase purchased sell sold belong belongs own owns get got go come "
        "altogether together different distinct unique"
    )
)


@dataclass(frozen=True)
class Column:
    name: str
    is_number: bool

    @property
    def is_key(self) -> bool:
        return re.fullmatch(r"(?:.*_)?(?:id|key|rowid)", self.name, re.IGNORECASE) is not None


@dataclass(frozen=True)
class Table:
    name: str
    columns: tuple[Column, ...]


@dataclass(frozen=True)
class Query:
    sql: str
    spans: tuple[Span, ...]
    """Of the question, what the query says."""


@dataclass
class _Parts:
    """What was found of one question over one table."""

    request: Request
    table: Table
    spans: list[Span] = field(default_factory=list)
    wheres: list[str] = field(default_factory=list)
    columns: list[Column] = field(default_factory=list)
    """That the question names, in its order, conditions aside."""


def named_tables(request: Request, tables: Sequence[Table]) -> list[Table]:
    """Those that the question names; where it names none, those one of whose columns it names."""
    named = [table for table in tables if _mentions_of(table.name, request)]
    if named:
        return named
    by_column = [table for table in tables if any(occurrences(each.name, request.text) for each in table.columns)]
    if by_column or not request.has(r"\bcosts?\b"):
        return by_column
    return [table for table in tables if any(each.name.lower() in ("price", "cost") for each in table.columns)]


def compose(request: Request, table: Table, values: Mapping[str, Sequence[str]]) -> Query | None:
    """`values`: text column → what stands in it."""
    parts = _Parts(request, table)
    parts.spans += _mentions_of(table.name, request)
    _find_equal(parts, values)
    _find_columns(parts)
    _find_compared(parts)
    _find_key(parts)
    sql = _select(parts)
    if sql is None or not _says_all(parts):
        return None
    return Query(sql, tuple(parts.spans))


def _mentions_of(name: str, request: Request) -> list[Span]:
    """Of a table: its name, or another word of the same stem (who "ordered" is in orders)."""
    found = occurrences(name, request.text)
    return found or [(word.start, word.end) for word in request.words if _root(word.text) == _root(name)]


def _root(word: str) -> str:
    """orders, ordered and order have one."""
    return stem(stem(word.lower()))


def _find_equal(parts: _Parts, values: Mapping[str, Sequence[str]]) -> None:
    """A text that stands in a column and in the question is a condition."""
    for column, texts in values.items():
        found = [(text, spans) for text in texts if text and (spans := occurrences(text, parts.request.text))]
        longest = [
            (text, spans)
            for text, spans in found
            if not any(text != other and text.lower() in other.lower() for other, _ in found)
        ]
        for _, spans in longest:
            if any(start <= spans[0][0] < end for start, end in parts.spans):
                continue  # the table's name
            parts.spans += spans
        kept = [text for text, spans in longest if spans[0] in parts.spans]
        if kept:
            told = ", ".join(_literal(text) for text in kept)
            parts.wheres.append(f"{quoted(column)} = {told}" if len(kept) == 1 else f"{quoted(column)} IN ({told})")


def _find_columns(parts: _Parts) -> None:
    places = []
    for column in parts.table.columns:
        spans = [span for span in occurrences(column.name, parts.request.text) if not _overlaps(span, parts.spans)]
        places += [(span, column) for span in spans]
    if not any(column.is_number and not column.is_key for _, column in places):
        places += _priced(parts)
    for span, column in sorted(places, key=lambda each: each[0]):
        parts.spans.append(span)
        if column not in parts.columns:
            parts.columns.append(column)


def _priced(parts: _Parts) -> list[tuple[Span, Column]]:
    """What something costs is its price, its amount, …"""
    match = re.search(r"\b(?:costs?|prices?|priced|cost of)\b", parts.request.text, re.IGNORECASE)
    column = _price_of(parts.table)
    return [(match.span(), column)] if match and column else []


def _price_of(table: Table) -> Column | None:
    numbers = [column for column in table.columns if column.is_number]
    return next((each for name in _PRICES for each in numbers if name in each.name.lower()), None)


def _find_compared(parts: _Parts) -> None:
    for pattern, sign in ((_OVER, ">"), (_UNDER, "<")):
        for match in re.finditer(rf"\b(?:{pattern})\s+(?:[$€£]\s*)?(?=-?\d)", parts.request.text, re.IGNORECASE):
            number = _number_at(parts.request, match.end())
            before = [column for column in parts.columns if column.is_number]
            of_price = re.search("expens|cheap|dear", match[0], re.IGNORECASE)
            column = before[-1] if before else _price_of(parts.table) if of_price else _only_number(parts.table)
            if number is None or column is None:
                continue
            wide = "=" if re.match(r"at", match[0], re.IGNORECASE) else ""
            parts.wheres.append(f"{quoted(column.name)} {sign}{wide} {number.value}")
            parts.spans += [match.span(), (number.start, number.end)]
            parts.columns = [each for each in parts.columns if each != column]


def _find_key(parts: _Parts) -> None:
    """ "order 7", "id 7", "product number 7": the row of this key."""
    keys = [column for column in parts.table.columns if column.is_key and column.is_number]
    key = next((column for column in keys if column.name.lower() in ("id", "rowid")), keys[0] if keys else None)
    for number in parts.request.mentions("number"):
        if key is None or _overlaps((number.start, number.end), parts.spans):
            continue
        before = parts.request.text[: number.start]
        match = re.search(r"(?:\bid|\bnumber|\bno\.?|#|\w+)\s*(?:is|=|:)?\s*$", before, re.IGNORECASE)
        if match and (match[0].strip() in ("#", "number", "no", "no.") or _overlaps(match.span(), parts.spans)):
            parts.wheres.append(f"{quoted(key.name)} = {number.value}")
            parts.spans += [(number.start, number.end), match.span()]
            parts.columns = [each for each in parts.columns if each != key]


def _select(parts: _Parts) -> str | None:
    request, table = parts.request, parts.table
    where = f" WHERE {' AND '.join(parts.wheres)}" if parts.wheres else ""
    source = f"FROM {quoted(table.name)}{where}"
    group = _group(parts)
    numbers = [column for column in parts.columns if column.is_number and not column.is_key]
    most = re.search(rf"\bmost\s+{_words_of(table.name)}", request.text, re.IGNORECASE)
    if most:
        column = _whose(parts)
        if column is None:
            return None
        parts.spans.append(most.span())
        by = quoted(column.name)
        return f"SELECT {by}, COUNT(*) AS n {source} GROUP BY {by} ORDER BY n DESC LIMIT 1"
    if request.asks_count:
        return _count(parts, source, group)
    for pattern, function in ((r"average|mean", "AVG"), (r"total|sum", "SUM")):
        match = re.search(rf"\b(?:{pattern})\b(?:\s+of)?", request.text, re.IGNORECASE)
        column = numbers[0] if numbers else _only_number(table)
        if match and column is not None:
            parts.spans.append(match.span())
            return _aggregate(f"{function}({quoted(column.name)})", source, group)
    extreme = _extreme(parts, numbers)
    if extreme is not None:
        column, is_high, span = extreme
        parts.spans.append(span)
        told = [each for each in parts.columns if each != column]
        if group is None and not told and column in parts.columns and not request.has(r"\b(?:which|who|whose)\b"):
            return f"SELECT {'MAX' if is_high else 'MIN'}({quoted(column.name)}) {source}"
        shown = ", ".join(quoted(each.name) for each in [*told, column]) if told else "*"
        return f"SELECT {shown} {source} ORDER BY {quoted(column.name)} {'DESC' if is_high else 'ASC'} LIMIT 1"
    whose = _whose(parts) if request.has(r"\bwho\b") and not parts.columns else None
    if whose is not None:
        return f"SELECT DISTINCT {quoted(whose.name)} {source} LIMIT {MOST_ROWS}"
    if parts.columns or parts.wheres or request.has(r"\b(?:rows|records|entries|content|contents|everything|all)\b"):
        shown = ", ".join(quoted(column.name) for column in parts.columns) or "*"
        distinct = "DISTINCT " if request.has(r"\b(?:different|distinct|unique)\b") else ""
        return f"SELECT {distinct}{shown} {source} LIMIT {MOST_ROWS}"
    return None


def _whose(parts: _Parts) -> Column | None:
    """The text column that is asked for; for "who" the one that names people."""
    named = [column for column in parts.columns if not column.is_number]
    if not named and parts.request.has(r"\bwho\b"):
        named = [column for column in parts.table.columns if set(words(column.name)) & _PEOPLE and not column.is_number]
    return named[0] if named else None


def _count(parts: _Parts, source: str, group: Column | None) -> str:
    """Of rows; where something else than rows is counted that is a column, of its different values."""
    match = re.search(
        r"\b(?:how many|number of|count(?: of)?)\s+(?:different\s+|distinct\s+|unique\s+)?", parts.request.text, re.I
    )
    for column in parts.columns if match else ():
        starts = [start for start, _ in occurrences(column.name, parts.request.text)]
        if match and match.end() in starts and column != group:
            return _aggregate(f"COUNT(DISTINCT {quoted(column.name)})", source, group)
    return _aggregate("COUNT(*)", source, group)


def _aggregate(told: str, source: str, group: Column | None) -> str:
    if group is None:
        return f"SELECT {told} {source}"
    by = quoted(group.name)
    return f"SELECT {by}, {told} {source} GROUP BY {by} ORDER BY {by}"


def _group(parts: _Parts) -> Column | None:
    for column in parts.columns:
        match = re.search(
            rf"\b(?:per|by|for each|of each|in each)\s+{_words_of(column.name)}", parts.request.text, re.I
        )
        if match:
            parts.spans.append(match.span())
            return column
    return None


def _extreme(parts: _Parts, numbers: list[Column]) -> tuple[Column, bool, Span] | None:
    """The column, whether its highest is asked for, and the word that says so."""
    text = parts.request.text
    for hints, names in _HINTED:
        match = re.search(rf"\b(?:{'|'.join(hints)})\b", text, re.IGNORECASE)
        if match:
            columns = [column for column in parts.table.columns if not column.is_key]
            column = next((each for name in names for each in columns if name in each.name.lower()), None)
            if column is not None:
                return column, hints[" ".join(match[0].lower().split())], match.span()
    for pattern, is_high in ((_HIGH, True), (_LOW, False)):
        match = re.search(rf"\b(?:{pattern})\b", text, re.IGNORECASE)
        column = numbers[0] if numbers else _only_number(parts.table)
        if match and column is not None:
            return column, is_high, match.span()
    return None


def _says_all(parts: _Parts) -> bool:
    return all(_is_filler(word) or is_within(word, parts.spans) for word in parts.request.words)


def _is_filler(word: Word) -> bool:
    return set(word.stems) <= _FILLERS


def _only_number(table: Table) -> Column | None:
    numbers = [column for column in table.columns if column.is_number and not column.is_key]
    return numbers[0] if len(numbers) == 1 else None


def _number_at(request: Request, position: int) -> Mention | None:
    return next((each for each in request.mentions("number") if each.start == position), None)


def _overlaps(span: Span, others: Sequence[Span]) -> bool:
    return any(span[0] < end and start < span[1] for start, end in others)


def _words_of(name: str) -> str:
    return r"[\s_]*".join(re.escape(part) for part in re.findall(r"[^\W_]+", name))


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
