"""The texts of a GGUF array, read natively and by the plain loop: alike, for whole, damaged and cut data."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.weights.gguf_file import texts_at

native = pytest.importorskip("heedful._native")


def written(texts: list[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", len(text)) + text for text in texts)


@given(
    texts=st.lists(st.one_of(st.binary(max_size=12), st.text(max_size=6).map(lambda t: t.encode("utf-8")))),
    head=st.binary(max_size=9),
    tail=st.one_of(st.binary(max_size=20), st.integers(0, 2**64 - 1).map(lambda n: struct.pack("<Q", n) + b"abc")),
    extra=st.integers(0, 3),
)
def test_native_and_plain_read_the_same(texts: list[bytes], head: bytes, tail: bytes, extra: int) -> None:
    data = np.frombuffer(head + written(texts) + tail, np.uint8)
    found = native.texts_at(data, len(head), len(texts) + extra)
    assert found == texts_at(data, len(head), len(texts) + extra)
    assert [text.encode("utf-8", "surrogateescape") for text in found[0][: len(texts)]] == texts


@pytest.mark.parametrize("read", [native.texts_at, texts_at], ids=["native", "plain"])
@pytest.mark.parametrize("length", [4, 2**63, 2**64 - 8, 2**64 - 1])
def test_a_text_beyond_the_data_is_not_read(read: Callable[..., tuple[list[str], int]], length: int) -> None:
    data = np.frombuffer(written([b"one"]) + struct.pack("<Q", length) + b"two", np.uint8)
    assert read(data, 0, 2) == (["one"], 11)
    assert read(data, len(data) + 1, 1) == ([], len(data) + 1)
