"""What a request says: values in its text, places as zones, words that mean something."""

from __future__ import annotations

from zoneinfo import available_timezones

import pytest

from heedful.mcp.delegation.mentions import Request, occurrences, orders_change
from heedful.mcp.delegation.places import places_in


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("What time is it in Tokyo?", [("zone", "Asia/Tokyo")]),
        (
            "time in new york when it is 9:30 pm in london",
            [("zone", "America/New_York"), ("clock", "21:30"), ("zone", "Europe/London")],
        ),
        ("At noon UTC, or 12 am?", [("clock", "12:00"), ("zone", "UTC"), ("clock", "00:00")]),
        ("25:00 is no time and 13 pm is none", [("number", 13)]),
        ("What is 1,234 plus -4321.5?", [("number", 1234), ("number", -4321.5)]),
        ("three commits since 2026-01-31", [("number", 3), ("date", "2026-01-31")]),
        ("How big is docs/plan.md?", [("path", "docs/plan.md")]),
        ("What's in /srv/data?", [("path", "/srv/data")]),
        ("How many files are in the folder reports?", [("folder", "reports")]),
        ("Open the reports folder.", [("folder", "reports")]),
        ("Which folders are there in this folder?", []),
        ('Echo "two words" and `x`', [("quoted", "two words"), ("quoted", "x")]),
        ("Read https://a.example/b.html.", [("url", "https://a.example/b.html")]),
        ("It's Ana's and Bo's", []),
    ],
)
def test_values(text: str, found: list[tuple[str, object]]) -> None:
    assert [(each.kind, each.value) for each in Request.of(text).found] == found


def test_spans_are_of_the_text() -> None:
    text = "What time is it in Tokyo when it is 7 pm in Rio de Janeiro?"
    assert [text[each.start : each.end] for each in Request.of(text).found] == ["Tokyo", "7 pm", "Rio de Janeiro"]


def test_places() -> None:
    assert [zone for zone, _, _ in places_in("Germany, San Francisco, Asia/Kolkata and Mars")] == [
        *("Europe/Berlin", "America/Los_Angeles", "Asia/Kolkata"),
    ]
    assert places_in("when do I wake up in the center of it, nelson said") == []
    assert places_in("What time is it in Brazil?") == [], "several times hold there"
    assert {zone for zone, _, _ in places_in("Delhi Cairo Lima Oslo Perth")} <= available_timezones()


def test_words_that_mean_something() -> None:
    assert [word.text for word in Request.of("How many rows has table orders?").words] == ["rows", "table", "orders"]
    assert [word.text for word in Request.of("Please tell me: who's Ana?").words] == ["Ana"]


def test_occurrences_are_whole_words_in_any_number_and_case() -> None:
    assert occurrences("orders", "Orders of this order_id") == [(0, 6)]
    assert occurrences("order_items", "the order items") == [(4, 15)]
    assert occurrences("orders", "which order is it") == [(6, 11)]
    assert occurrences("city", "the cities") == []
    assert occurrences("cities", "which city") == [(6, 10)]
    assert occurrences("ana", "banana") == []
    assert occurrences("C++", "is it C++ or C") == [(6, 9)]


def test_orders_to_change_something() -> None:
    for text in ("Delete notes.txt", "please, can you create a file", "commit this", "I want to rename it"):
        assert orders_change(text), text
    for text in ("What was deleted?", "Show the last commit", "Who created it?", "Settings?"):
        assert not orders_change(text), text
