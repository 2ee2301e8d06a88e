"""Conditions mean what Python's own and, or, not and comparisons mean, and whatever else is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.errors import PolicyError
from heedful.router.expression import Value, parse

KNOWN = {"tokens": "number", "score": "number", "has_pii": "bool", "ok": "bool", "intent": "text"}
VALUES = {
    "tokens": st.integers(0, 9).map(float),
    "score": st.integers(0, 9).map(float),
    "has_pii": st.booleans(),
    "ok": st.booleans(),
    "intent": st.sampled_from(["a", "b"]),
}

numbers = st.one_of(st.sampled_from(["tokens", "score"]), st.integers(0, 9).map(str), st.just("2.5"))
texts = st.one_of(st.just("intent"), st.sampled_from(["'a'", '"b"']))
signs = st.sampled_from(["==", "!=", "<", "<=", ">", ">="])
comparisons = st.one_of(
    st.tuples(numbers, signs, numbers).map(" ".join),
    st.tuples(texts, st.sampled_from(["==", "!="]), texts).map(" ".join),
)
leaves = st.one_of(st.sampled_from(["has_pii", "ok", "true", "false"]), comparisons)
conditions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        inner.map(lambda text: f"not {text}"),
        inner.map(lambda text: f"({text})"),
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(" ".join),
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(conditions, st.fixed_dictionaries(VALUES))
def test_it_means_what_python_means(text: str, values: dict[str, Value]) -> None:
    names = {**values, "true": True, "false": False}
    assert parse(text, KNOWN).holds(values) == eval(text, {"__builtins__": {}}, names)


@settings(deadline=None)
@given(st.text(max_size=60), st.fixed_dictionaries(VALUES))
def test_any_text_is_a_condition_or_a_named_error(text: str, values: dict[str, Value]) -> None:
    try:
        condition = parse(text, KNOWN)
    except PolicyError:
        return
    assert condition.holds(values) in (True, False)


@given(
    st.lists(
        st.sampled_from(["tokens", "intent", "ok", "and", "or", "not", "(", ")", "==", "<", "1", "'a'"]), max_size=9
    )
)
def test_any_words_are_a_condition_or_a_named_error(words: list[str]) -> None:
    try:
        condition = parse(" ".join(words), KNOWN)
    except PolicyError:
        return
    assert condition.holds({"tokens": 1.0, "intent": "a", "ok": True}) in (True, False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "value should stand"),
        ("tokens", "number"),
        ("intent", "text"),
        ("tokens > 'a'", "compares number with text"),
        ("intent < 'a'", "only numbers have an order"),
        ("ok == 1", "compares bool with number"),
        ("1 < tokens < 3", "twice in a row"),
        ("tokens > 3 4", "where it should end"),
        ("(ok", ") is missing"),
        ("ok = true", "compare with =="),
        ("__import__('os')", "asks for '__import__'"),
        ("tokens.real > 1", "cannot be read"),
        ("not " * 40 + "ok", "nested more than"),
        ("ok or " * 400 + "ok", "characters"),
        ("has_pi", "has_pi"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse(text, KNOWN)
    assert said in str(caught.value)


def test_a_misspelt_name_or_option_comes_with_the_nearest() -> None:
    with pytest.raises(PolicyError) as caught:
        parse("tokenz > 1", KNOWN)
    assert caught.value.remedy == "Did you mean tokens?"
    options: dict[str, Any] = {"intent": ["lookup", "other"]}
    with pytest.raises(PolicyError) as caught:
        parse("intent == 'lokup'", KNOWN, options=options)
    assert caught.value.remedy == "Did you mean 'lookup'?"
    assert parse("'lookup' == intent", KNOWN, options=options).holds({"intent": "lookup"})
