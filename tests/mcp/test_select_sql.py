"""Questions as queries, run by sqlite3: what comes out is what Python computes from the same rows."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest

from heedful.mcp.delegation.mentions import Request
from heedful.mcp.delegation.select_sql import Column, Table, compose, named_tables

ROWS = [
    (1, "Ana", "tea", 14.5, "paid", "2026-01-03"),
    (2, "Bo", "green tea", 31.0, "open", "2026-01-05"),
    (3, "Ana", "O'Hara's mix", 2.5, "paid", "2026-02-01"),
    (4, "Chen", "tea", 7.0, "open", "2025-12-24"),
]
NAMES = ("id", "customer", "product", "amount", "status", "placed_on")
TABLE = Table("orders", tuple(Column(name, name in ("id", "amount")) for name in NAMES))
VALUES = {name: sorted({str(row[at]) for row in ROWS}) for at, name in enumerate(NAMES) if name not in ("id", "amount")}


def test_tables_that_are_meant() -> None:
    stock = Table("stock", (Column("item", False), Column("price", True)))
    for question, tables in (
        ("How many orders are there?", [TABLE]),
        ("Who ordered tea?", [TABLE]),
        ("Which item is it?", [stock]),
        ("What does tea cost?", [stock]),
        ("What is the weather?", []),
    ):
        assert named_tables(Request.of(question), [TABLE, stock]) == tables, question


def asked(question: str) -> list[tuple[Any, ...]] | None:
    query = compose(Request.of(question), TABLE, VALUES)
    if query is None:
        return None
    database = sqlite3.connect(":memory:")
    database.execute(f"CREATE TABLE orders ({', '.join(NAMES)})")
    database.executemany("INSERT INTO orders VALUES (?, ?, ?, ?, ?, ?)", ROWS)
    return database.execute(query.sql).fetchall()


@pytest.mark.parametrize(
    ("question", "rows"),
    [
        ("How many rows has table orders?", [(4,)]),
        ("How many orders are paid?", [(2,)]),
        ("How many orders did Ana place on 2026-01-03?", [(1,)]),
        ("How many orders has Ana?", [(2,)]),
        ("How many different customers are in orders?", [(3,)]),
        ("How many orders have an amount over 7?", [(2,)]),
        ("How many orders with an amount of at least 7 are open?", [(2,)]),
        ("Number of orders of green tea", [(1,)]),
        ("Number of orders of tea", [(2,)]),
        ("How many orders of O'Hara's mix are there?", [(1,)]),
        ("What is the average amount of the orders?", [(13.75,)]),
        ("What is the total amount of orders by Ana?", [(17.0,)]),
        ("total amount per customer in orders", [("Ana", 17.0), ("Bo", 31.0), ("Chen", 7.0)]),
        ("What is the highest amount in table orders?", [(31.0,)]),
        ("What is the smallest amount in orders?", [(2.5,)]),
        ("Which order has the lowest amount?", [ROWS[2]]),
        ("Which order is the most expensive?", [ROWS[1]]),
        ("Which customer has the most orders?", [("Ana", 2)]),
        ("What is the status of order 4?", [("open",)]),
        ("Which customers are in table orders?", [("Ana",), ("Bo",), ("Ana",), ("Chen",)]),
        ("Show all orders of Chen", [ROWS[3]]),
        ("How many orders are cheaper than 10?", [(2,)]),
        ("Which orders are more expensive than 20?", [ROWS[1]]),
        ("Who has the most orders?", [("Ana", 2)]),
        ("Who ordered tea?", [("Ana",), ("Chen",)]),
        ("How many columns has table orders?", None),
        ("What is the weather in orders?", None),
        ("Why are orders paid late?", None),
        ("Which supplier has the most orders?", None),
    ],
)
def test_questions(question: str, rows: list[tuple[Any, ...]] | None) -> None:
    assert asked(question) == rows
