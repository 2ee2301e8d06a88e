"""Stored responses: each caller's own, bounded in number and bytes, the longest unused leave first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.server.stored import ResponseStore, Stored


def stored(response_id: str, chars: int = 0) -> Stored:
    return Stored({"id": response_id}, [{"role": "user", "content": "x" * chars}])


def test_each_caller_has_their_own() -> None:
    store = ResponseStore()
    store.put("mine", stored("r"))
    assert store.get("mine", "r") == stored("r")
    assert store.get("theirs", "r") is None
    assert not store.drop("theirs", "r")
    assert store.drop("mine", "r")
    assert store.get("mine", "r") is None
    assert not store.drop("mine", "r")


def test_the_longest_unused_leaves() -> None:
    store = ResponseStore(most=2)
    store.put("", stored("a"))
    store.put("", stored("b"))
    store.get("", "a")
    store.put("", stored("c"))
    assert [name for name in "abc" if store.get("", name)] == ["a", "c"]


@pytest.mark.parametrize(("chars", "left"), [(10, ["a", "b", "c"]), (300, ["b", "c"]), (900, ["c"]), (9000, ["c"])])
def test_bytes_are_bounded_and_the_newest_stays(chars: int, left: list[str]) -> None:
    store = ResponseStore(most_bytes=1000)
    for name in "abc":
        store.put("", stored(name, chars))
    assert [name for name in "abc" if store.get("", name)] == left


@given(st.lists(st.tuples(st.sampled_from(["put", "get", "drop"]), st.integers(0, 6), st.integers(0, 40))))
def test_a_store_is_what_a_list_says(steps: list[tuple[str, int, int]]) -> None:
    """Against a list of (id, size), the longest unused first."""
    store = ResponseStore(most=4, most_bytes=300)
    kept: list[tuple[str, int]] = []
    overhead = len('[{"id":"0"},[{"role":"user","content":""}]]')
    for what, number, chars in steps:
        name = str(number)
        found = next((item for item in kept if item[0] == name), None)
        if what == "drop":
            assert store.drop("", name) == (found is not None)
        if found is not None and (what != "put"):
            kept.remove(found)
        if what == "get":
            assert (store.get("", name) is not None) == (found is not None)
            kept += [found] if found else []
        if what == "put" and found is None:  # ids are new ones, always
            store.put("", stored(name, chars))
            kept.append((name, overhead + chars))
            while len(kept) > 4 or sum(size for _, size in kept) > 300:
                kept.pop(0)
        assert len(store) == len(kept)
