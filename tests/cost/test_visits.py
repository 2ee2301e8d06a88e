"""Counts of a plan against the mask itself, written out entry by entry."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from heedful.cost.visits import dense_visits, rows_read, rows_written, visits
from heedful.request import KeySpan

windows = st.none() | st.integers(1, 40)


def mask(start: int, end: int, window: int | None) -> list[tuple[int, int]]:
    """(query, key) pairs that attention computes: no key after the query, none `window` or more before it."""
    return [
        (query, key)
        for query in range(start, end)
        for key in range(end)
        if key <= query and in_reach(query - key, window)
    ]


def in_reach(distance: int, window: int | None) -> bool:
    return window is None or distance < window


def span_of(start: int, end: int, window: int | None, layers: int) -> KeySpan:
    first_key = min(key for _, key in mask(start, end, window))
    return KeySpan(tuple(range(layers)), window, first_key, start, end, pages=(), first_page=0)


@given(
    start=st.integers(0, 60),
    tokens=st.integers(1, 30),
    window=windows,
    layers=st.integers(1, 4),
    heads=st.integers(1, 5),
)
def test_visits_are_the_entries_of_the_mask(
    start: int, tokens: int, window: int | None, layers: int, heads: int
) -> None:
    end = start + tokens
    span = span_of(start, end, window, layers)
    assert visits(span, heads) == len(mask(start, end, window)) * heads * layers
    assert dense_visits(span, heads) == len(mask(start, end, None)) * heads * layers


@given(
    start=st.integers(0, 60),
    tokens=st.integers(1, 30),
    window=windows,
    layers=st.integers(1, 4),
    heads=st.integers(1, 5),
)
def test_rows_are_the_keys_and_values_of_the_columns_in_use(
    start: int, tokens: int, window: int | None, layers: int, heads: int
) -> None:
    end = start + tokens
    span = span_of(start, end, window, layers)
    columns = {key for _, key in mask(start, end, window)}
    assert rows_read(span, heads) == 2 * len(columns) * heads * layers
    assert rows_written(span, heads) == 2 * tokens * heads * layers


@given(cuts=st.lists(st.integers(1, 20), min_size=1, max_size=6), window=windows)
def test_cutting_into_chunks_changes_no_visit(cuts: list[int], window: int | None) -> None:
    ends = [sum(cuts[: i + 1]) for i in range(len(cuts))]
    chunks = [span_of(start, end, window, layers=2) for start, end in zip([0, *ends], ends, strict=False)]
    whole = span_of(0, ends[-1], window, layers=2)
    assert sum(visits(chunk, 3) for chunk in chunks) == visits(whole, 3)
    assert sum(rows_written(chunk, 3) for chunk in chunks) == rows_written(whole, 3)


def test_by_hand() -> None:
    # queries 4, 5, 6 with a window of 3 see keys 2-4, 3-5, 4-6: 9 entries, 5 columns; dense they see 5 + 6 + 7 = 18
    span = KeySpan(layers=(0, 2), window=3, first_key=2, start=4, end=7, pages=(), first_page=0)
    assert visits(span, heads=8) == 9 * 8 * 2
    assert dense_visits(span, heads=8) == 18 * 8 * 2
    assert rows_read(span, kv_heads=2) == 2 * 5 * 2 * 2
    assert rows_written(span, kv_heads=2) == 2 * 3 * 2 * 2


def test_a_million_tokens_are_counted_exactly() -> None:
    last = KeySpan(tuple(range(80)), None, first_key=0, start=999_999, end=1_000_000, pages=(), first_page=0)
    assert visits(last, heads=64) == 5_120_000_000  # the number of design.md
    whole = KeySpan((0,), None, first_key=0, start=0, end=10**15, pages=(), first_page=0)
    assert visits(whole, heads=1) == 500_000_000_000_000_500_000_000_000_000
