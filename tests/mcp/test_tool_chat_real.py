"""Questions to smollm2 with real servers, judged by zoneinfo and sqlite3: the small version of docs/delegation.md."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from real_servers import RealServers

from heedful.engine.llm import LLM
from heedful.mcp.chat.loop import ToolChat
from heedful.mcp.chat.turn import ToolTurn
from heedful.mcp.client.blocking import McpThread
from heedful.mcp.client.connection import Patience
from heedful.mcp.settings.config import config_from_json

READING = ["list_tables", "describe_table", "read_query"]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    with sqlite3.connect(folder / "data.db") as shop:
        shop.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT, amount REAL)")
        shop.executemany(
            "INSERT INTO orders (customer, amount) VALUES (?, ?)", [("Ana", 14.5), ("Bo", 63.2), ("Ana", 7)]
        )
    shop.close()
    return folder


@pytest.fixture(scope="module")
def chat(real_servers: RealServers, database: Path, smollm2_path: Path) -> Iterator[ToolChat]:
    entries = {name: each for name, each in real_servers.entries(database).items() if name in ("time", "sqlite")}
    entries["time"]["x-heedful"], entries["sqlite"]["x-heedful"] = {"trusted": True}, {"allow": READING}
    with McpThread(config_from_json({"mcpServers": entries}), trust=True, patience=Patience(start_s=120)) as tools:
        yield ToolChat(LLM(str(smollm2_path), context_len=2048), tools)


def asked(chat: ToolChat, question: str) -> ToolTurn:
    turn = chat.turn([{"role": "user", "content": question}], max_tokens=40, temperature=0.0)
    list(turn)
    return turn


def test_the_time_somewhere(chat: ToolChat) -> None:
    before = datetime.now(ZoneInfo("Asia/Tokyo"))
    turn = asked(chat, "What time is it in Tokyo?")
    minutes = {(before + timedelta(minutes=more)).strftime("%H:%M on %A %Y-%m-%d") for more in range(3)}
    assert any(turn.text.startswith(minute) for minute in minutes), turn.text
    assert turn.receipt is not None
    assert (turn.receipt.way, turn.receipt.output_tokens) == ("rules", 0)


def test_a_time_converted(chat: ToolChat) -> None:
    here = datetime.now(ZoneInfo("Europe/London")).replace(hour=9, minute=30)
    there = here.astimezone(ZoneInfo("America/New_York")).strftime("%H:%M")
    assert asked(chat, "If it is 9:30 in London, what time is it in New York?").text.startswith(there)


@pytest.mark.parametrize(
    ("question", "sql"),
    [
        ("How many rows has table orders?", "SELECT COUNT(*) FROM orders"),
        ("What is the highest amount in table orders?", "SELECT MAX(amount) FROM orders"),
        ("How many orders has Ana?", "SELECT COUNT(*) FROM orders WHERE customer = 'Ana'"),
        ("Which tables are in the database?", "SELECT name FROM sqlite_master WHERE type = 'table'"),
    ],
)
def test_what_is_in_a_database(question: str, sql: str, chat: ToolChat, database: Path) -> None:
    with sqlite3.connect(database / "data.db") as shop:
        ((truth,),) = shop.execute(sql).fetchall()
    shop.close()
    turn = asked(chat, question)
    assert turn.text == str(truth)
    assert turn.receipt is not None
    assert (turn.receipt.said_by, turn.receipt.output_tokens, turn.receipt.schema_tokens) == ("rules", 0, 0)


def test_where_no_tool_fits_the_model_answers(chat: ToolChat) -> None:
    turn = asked(chat, "Write a short poem about the sea.")
    assert turn.receipt is not None
    assert (turn.receipt.way, turn.receipt.calls) == ("none", ())
    assert turn.receipt.output_tokens > 5
