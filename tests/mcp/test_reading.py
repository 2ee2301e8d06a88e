"""Results as rows, records and texts, and what is said of them; results as real servers write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.mcp.calls.reading import read
from heedful.mcp.delegation.mentions import Request
from heedful.mcp.delegation.say import said

JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
NOW = {"timezone": "Asia/Tokyo", "datetime": "2026-12-01T10:05:00+09:00", "day_of_week": "Tuesday", "is_dst": False}
CONVERTED = {
    "source": {"timezone": "Europe/London", "datetime": "2026-12-01T09:30:00+00:00"},
    "target": {"timezone": "America/New_York", "datetime": "2026-12-01T04:30:00-05:00"},
    "time_difference": "-5.0h",
}
COMMIT = (
    "Commit: 'ab1'\nAuthor: <git.Actor \"Ana <a@example.org>\">\nDate: 2026-03-02 09:15:00+00:00\nMessage: 'start\\n'\n"
)
LOG = f"Commit history:\n{COMMIT}\n{COMMIT.replace('Ana', 'Bo')}"
INFO = "size: 12\ncreated: Mon Nov 30 2026\nmodified: Tue Dec 01 2026\nisFile: true"
LISTING = {"content": "[FILE] a.txt\n[DIR] old\n[FILE] b.txt"}
COLUMNS = "[{'cid': 0, 'name': 'id', 'type': 'INTEGER', 'pk': 1}, {'cid': 1, 'name': 'who', 'type': 'TEXT', 'pk': 0}]"
GRAPH = {"entities": [{"name": "Ana", "entityType": "person", "observations": ["plays chess"]}], "relations": []}


@pytest.mark.parametrize(
    ("question", "arguments", "value", "answer"),
    [
        ("What time is it in Tokyo?", {"timezone": "Asia/Tokyo"}, NOW, "10:05 on Tuesday 2026-12-01 (UTC+09:00)"),
        ("What day of the week is it in Tokyo?", {"timezone": "Asia/Tokyo"}, NOW, "Tuesday"),
        (
            "What time is it in New York when it is 9:30 in London?",
            {"source_timezone": "Europe/London", "time": "09:30", "target_timezone": "America/New_York"},
            CONVERTED,
            "04:30 on Tuesday 2026-12-01 (UTC-05:00)",
        ),
        ("Who made the last commit?", {}, f"Commit history:\n{COMMIT}", "Ana <a@example.org>"),
        ("When was the last commit?", {}, f"Commit history:\n{COMMIT}", "09:15 on Monday 2026-03-02 (UTC+00:00)"),
        ("What is the message of the last commit?", {}, f"Commit history:\n{COMMIT}", "start"),
        ("How many commits are there?", {}, LOG, "2"),
        (
            "Who made the first commit?",
            {},
            LOG.replace("Bo", "Chen").replace("2026-03-02 09:15", "2026-03-01 09:15", 1),
            "Ana <a@example.org>",
        ),
        (
            "What was the last commit about?",
            {},
            LOG.replace("start", "end", 1).replace("2026-03-02", "2026-03-03", 1),
            "end",
        ),
        ("How many words has todo.txt?", {}, {"content": "buy milk\nsee Bo\nrun"}, "5"),
        ("Which branches are there?", {}, "* main\n  dev", "main, dev"),
        ("Which branch is the current one?", {}, "* main\n  dev", "main"),
        ("How big is notes.txt?", {}, INFO, "size: 12"),
        ("When was notes.txt modified?", {}, INFO, "Tue Dec 01 2026"),
        ("How many files are in the folder?", {}, LISTING, "2: a.txt, b.txt"),
        ("How many subfolders are there?", {}, LISTING, "1: old"),
        ("What is in the folder?", {}, LISTING, "a.txt, old, b.txt"),
        ("Which tables are there?", {}, "[{'name': 'orders'}, {'name': 'products'}]", "orders, products"),
        ("Which columns has table orders?", {}, COLUMNS, "id, who"),
        ("How many rows has table orders?", {}, "[{'COUNT(*)': 7}]", "7"),
        ("What is the highest amount?", {}, "[{'MAX(amount)': None}]", "none"),
        ("Which order is the cheapest?", {}, "[{'id': 3, 'amount': 2.4}]", "id: 3, amount: 2.4"),
        ("What do you know about Ana?", {"query": "Ana"}, GRAPH, "entityType: person, observations: plays chess"),
        ("Which orders are open?", {}, "[]", "none"),
        ("Which product has the largest stock?", {}, "[{'name': 'tea', 'stock': 300}]", "name: tea, stock: 300"),
        ("What does todo.txt say?", {}, {"content": "milk, eggs"}, "milk, eggs"),
        ("How many lines has todo.txt?", {}, {"content": "buy milk\nsee Bo\nrun"}, "3"),
        ("What is 2 plus 3?", {}, "The sum of 2 and 3 is 5.", "The sum of 2 and 3 is 5."),
        ("How many people work there?", {}, "Some do, and some do not.", None),
        ("What does it say?", {}, "x" * 5000, None),
        ("How many packets?", {}, {"item": "tea", "stock": 0}, "item: tea, stock: 0"),
    ],
)
def test_answers(question: str, arguments: dict[str, Any], value: Any, answer: str | None) -> None:
    assert said(Request.of(question), arguments, read(value)) == answer


@given(JSON)
def test_anything_can_be_read(value: Any) -> None:
    reading = read(value)
    answer = said(Request.of("How many are there?"), {}, reading)
    assert answer is None or len(answer) <= 2000
    assert all(isinstance(text, str) for text in reading.texts)


def test_what_only_looks_like_a_list_is_text() -> None:
    for text in ("Repository status:\nOn branch main\nnothing to commit", "a: 1\nnot a field", "[1, 2", "x\ny z"):
        assert read(text).form == "text", text
