"""Policies as text: what is read, what is refused and how, and that one policy has one name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.cache.policy import resolve
from heedful.cache.policy_text import is_exact, parse_policy, policy_name, with_format
from heedful.errors import BadParameter
from heedful.request import KV_ROW_BYTES, CachePolicy, KVFormat

NUMBERS = tuple(KV_ROW_BYTES)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("kv=q8", CachePolicy(kv_format="q8")),
        ("q4", CachePolicy(kv_format="q4")),
        ("kv=k:q8/v:q4", CachePolicy(kv_format="k=q8,v=q4")),
        ("kv=v:f16/k:f16", CachePolicy(kv_format="f16")),
        ("kv=q4,precise=0", CachePolicy(kv_format="q4", precise=0)),
        (" window=1024, sinks=4 ", CachePolicy(window=1024, sinks=4)),
        ("sinks=4,window=1024", CachePolicy(window=1024, sinks=4)),
        ("budget=1024", CachePolicy(budget=1024)),
        ("kv=q8,prefill=sparse", CachePolicy(kv_format="q8", sparse_prefill=True)),
        ("prefill=dense", CachePolicy()),
    ],
)
def test_what_is_read(text: str, policy: CachePolicy) -> None:
    assert parse_policy(text) == policy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is not a part"),
        ("kv=q8,,sinks=4", "'' is not a part"),
        ("q5", "'q5' is not a part"),
        ("kv=q5", "'kv=q5': kv takes one of f32, f16, q8, q4"),
        ("kv=", "'kv=' is not a part"),
        ("kv=k:q8", "'kv=k:q8': kv takes"),
        ("kv=k:q8/q4", "'kv=k:q8/q4': kv takes"),
        ("kv=q8,windw=9", "'windw=9' is not a part"),
        ("window", "'window': window takes a whole number"),
        ("window=1e3", "'window=1e3': window takes a whole number"),
        ("window=-5", "'window=-5': window takes a whole number"),
        ("window=٣", "window takes a whole number"),
        ("budget=9999999999", "budget takes a whole number"),
        ("prefill=fast", "'prefill=fast': prefill takes sparse or dense"),
        ("budget=512,budget=1024", "'budget=1024' comes after another budget"),
        ("q8,kv=q4", "'kv=q4' comes after another kv"),
        ("window=0", "window: must be at least 1"),
        ("sinks=4", "sinks: mean something only with a window"),
        ("window=64,budget=512", "budget: cannot be combined with a window"),
        ("window=99999999", "window: must be at most 16,777,216"),
        ("window=64,sinks=99999999", "sinks: must be at most 16,777,216"),
        ("budget=16777217", "budget: must be at most 16,777,216"),
    ],
)
def test_what_is_refused_names_its_part(text: str, said: str) -> None:
    with pytest.raises(BadParameter) as refused:
        parse_policy(text)
    assert said in refused.value.message


@st.composite
def policies(draw: st.DrawFn) -> CachePolicy:
    numbers = st.sampled_from(NUMBERS)
    window = draw(st.none() | st.integers(1, 5000))
    return CachePolicy(
        kv_format=draw(st.none() | numbers | st.builds("k={},v={}".format, numbers, numbers)),
        precise=draw(st.none() | st.integers(0, 700)),
        window=window,
        sinks=draw(st.integers(0, 200)) if window else 0,
        budget=None if window else draw(st.none() | st.integers(256, 5000)),
        sparse_prefill=False if window else draw(st.booleans()),
    )


@given(policies(), policies())
def test_a_name_says_what_the_cache_does_and_no_more(one: CachePolicy, other: CachePolicy) -> None:
    """Two policies have the same name exactly when they resolve to the same work; the name reads back."""

    def work(policy: CachePolicy) -> object:
        return resolve(policy, KVFormat.parse("q8"), NUMBERS, 64)

    assert (policy_name(one) == policy_name(other)) == (work(one) == work(other))
    assert work(parse_policy(policy_name(one))) == work(one)
    assert policy_name(parse_policy(policy_name(one))) == policy_name(one)


def test_names() -> None:
    assert policy_name(CachePolicy()) == "kv=q8"
    assert policy_name(parse_policy("sinks=4,kv=q4,precise=100,window=1024")) == "kv=q4,window=1024,sinks=4"
    assert policy_name(parse_policy("kv=v:q4/k:q8,precise=0")) == "kv=k:q8/v:q4,precise=0"
    assert policy_name(parse_policy("budget=1000,prefill=sparse")) == "kv=q8,budget=1024,prefill=sparse"
    assert policy_name(with_format(CachePolicy(budget=512), KVFormat("f16", "f16"))) == "kv=f16,budget=512"


def test_float32_without_anything_else_is_exact() -> None:
    assert is_exact(parse_policy("f32"))
    assert not is_exact(parse_policy("f32,window=100"))
    assert not is_exact(CachePolicy())
