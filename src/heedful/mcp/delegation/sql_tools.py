"""The queries that a request may mean to a tool that takes SQL: its server's tables, columns and values, as its own
reading tools tell them, put together by select_sql.py.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from heedful.mcp.calls.reading import Reading
from heedful.mcp.catalogue.bm25 import words
from heedful.mcp.catalogue.catalog import CatalogTool
from heedful.mcp.delegation.mentions import Request, occurrences
from heedful.mcp.delegation.select_sql import Column, Query, Table, compose, named_tables, quoted

MOST_TABLES, MOST_COLUMNS, MOST_VALUES, MOST_VALUE_CHARS, SAMPLE_ROWS = 3, 8, 500, 60, 50

Ask = Callable[[CatalogTool, Mapping[str, Any]], Awaitable[Reading | None]]
"""Calls a tool of the server, where that needs no question; None where it may not or fails."""
Rows = Callable[[str], Awaitable[Sequence[Any]]]


def takes_select(tool: CatalogTool, told: str) -> bool:
    """Whether a parameter, by its words, is SQL of a tool that only reads."""
    changes = re.search(r"\b(?:INSERT|UPDATE|DELETE|CREATE|DROP|ALTER)\b", f"{told} {tool.description}")
    return is_sql(told) and changes is None


def takes_query(tool: CatalogTool) -> bool:
    """Whether a required parameter is a SELECT."""
    properties = tool.parameters["properties"]
    return any(
        takes_select(tool, f"{name} {properties[name].get('description', '')}")
        for name in tool.parameters.get("required", [])
        if isinstance(properties.get(name), Mapping)
    )


def is_sql(told: str) -> bool:
    return re.search(r"\bSQL\b", told) is not None


async def queries(
    request: Request,
    tool: CatalogTool,
    parameter: str,
    siblings: Sequence[CatalogTool],
    ask: Ask,
    known: dict[str, Table],
) -> list[Query]:
    """One for each table that the request may mean. `known`: tables whose columns were read before; new ones are
    added."""

    async def rows(sql: str) -> Sequence[Any]:
        reading = await ask(tool, {parameter: sql})
        return reading.rows if reading is not None and reading.form == "rows" else ()

    found = []
    for table in named_tables(request, await _tables(request, tool, siblings, ask, rows, known)):
        query = compose(request, table, await _values(table, rows))
        if query is not None:
            found.append(query)
    return found


async def _tables(
    request: Request,
    tool: CatalogTool,
    siblings: Sequence[CatalogTool],
    ask: Ask,
    rows: Rows,
    known: dict[str, Table],
) -> list[Table]:
    listers = [each for each in siblings if not each.parameters.get("required") and "tabl" in words(each.name)]
    listing = await ask(listers[0], {}) if listers else None
    names = [text for text in (listing.texts if listing else ()) if not text.startswith("sqlite_")]
    named = [name for name in names if occurrences(name, request.text)]
    found = []
    for name in (named or names)[:MOST_TABLES]:
        key = f"{tool.server}/{name}"
        if key not in known or not known[key].columns:  # an empty one may have got rows
            known[key] = _table(name, await rows(f"SELECT * FROM {quoted(name)} LIMIT {SAMPLE_ROWS}"))
        found.append(known[key])
    return found


def _table(name: str, sample: Sequence[Any]) -> Table:
    rows = [row for row in sample if isinstance(row, Mapping)]

    def is_number(column: str) -> bool:
        values = [row.get(column) for row in rows if row.get(column) is not None]
        return bool(values) and all(isinstance(value, int | float) for value in values)

    return Table(name, tuple(Column(column, is_number(column)) for column in (rows[0] if rows else ())))


async def _values(table: Table, rows: Rows) -> dict[str, list[str]]:
    """Text column → the short texts that stand in it."""
    found = {}
    for column in [each for each in table.columns if not each.is_number][:MOST_COLUMNS]:
        name = quoted(column.name)
        where = f"WHERE length({name}) <= {MOST_VALUE_CHARS} LIMIT {MOST_VALUES}"
        told = await rows(f"SELECT DISTINCT {name} FROM {quoted(table.name)} {where}")
        values = [next(iter(row.values()), None) for row in told if isinstance(row, Mapping)]
        found[column.name] = [value for value in values if isinstance(value, str)]
    return found
