"""The native attention and its pages: against recorded float64 results, and against the plain op for drawn shapes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from heedful.kernels import reference
from heedful.request import KV_ROW_BYTES

native = pytest.importorskip("heedful._native")

GOLDEN = Path(__file__).parent.parent / "golden" / "attention" / "attention.safetensors"
PAGE_LEN, ARENA_PAGES = 64, 1 << 20
VARIANTS = native.variants()
NUMBERS = ["f32", "f16", "q8", "q4"]
PAIRS = [("f32", "f32"), ("f16", "f16"), ("q8", "q8"), ("q4", "q4"), ("q8", "q4"), ("q4", "f16"), ("f32", "q8")]
# Of outputs relative to the largest value, and of log-sum-exp. Floats multiply in float32 (3e-6 seen). q8 rounds
# queries, q8 and q4 round weights to 16 bits, page by page: 8e-5 seen with drawn rows, 3.0e-4 with the recorded keys
# (outlier channels). That q4 rounds queries to 8 bits is part of what is expected here: see `met`.
TOLERANCE = {"f32": 2e-5, "f16": 2e-5, "q8": 4e-4, "q4": 4e-4}

Floats = npt.NDArray[np.float32]
Pair = tuple[str, str]


def tolerance(*pairs: Pair) -> float:
    return max(TOLERANCE[number] for pair in pairs for number in pair)


@dataclass
class Cache:
    """Pages of one layer in a shuffled order, every byte of them 0xFF at first: NaN as a scale and as a half.

    `pairs`: number formats of keys and values, one an arena; page i of the sequence lies in arena i % len(pairs).
    """

    variant: str
    pairs: tuple[Pair, ...]
    kv_heads: int
    head_dim: int
    tokens: int

    def __post_init__(self) -> None:
        pages = -(-self.tokens // PAGE_LEN)
        rows = np.random.default_rng(0).permutation(pages + 2)[:pages]
        self.list = (rows + np.arange(pages) % len(self.pairs) * ARENA_PAGES).astype(np.int32)
        self.page_bytes = [native.page_bytes(*pair, self.kv_heads, self.head_dim, self.variant) for pair in self.pairs]
        self.buffers = [np.full((pages + 2) * size, 0xFF, dtype=np.uint8) for size in self.page_bytes]

    @property
    def arenas(self) -> list[tuple[str, str, npt.NDArray[np.uint8]]]:
        return [(*pair, buffer) for pair, buffer in zip(self.pairs, self.buffers, strict=True)]

    def pair_at(self, position: int) -> Pair:
        return self.pairs[self.list[position // PAGE_LEN] // ARENA_PAGES]

    def store(self, start: int, k: Floats, v: Floats) -> None:
        native.store(self.arenas, self.list, start, k, v, self.variant)

    def read(self) -> tuple[Floats, Floats]:
        """Keys and values of all slots of all pages, (pages · 64, K, D) each."""
        pages = [native.read_page(self.arenas, page, self.kv_heads, self.head_dim, self.variant) for page in self.list]
        keys, values = (np.concatenate([page[side].transpose(1, 0, 2) for page in pages]) for side in (0, 1))
        return keys, values

    def attend(
        self,
        start: int,
        q: Floats,
        *,
        scale: float = 0.125,
        window: int = 0,
        softcap: float = 0.0,
        first_page: int = 0,
        query_tile: int = 16,
        sinks: int = 0,
        sink_q: Floats | None = None,
    ) -> tuple[Floats, Floats]:
        end = start + len(q)
        q = np.ascontiguousarray(q)
        pages = self.list[first_page : -(-end // PAGE_LEN)].copy()
        sink_pages = self.list[: -(-min(sinks, end) // PAGE_LEN)].copy()
        out, lse = native.attend(
            self.arenas, self.kv_heads, pages, start, end, window, sinks, sink_pages, q,
            q if sink_q is None else sink_q, scale, softcap, first_page, query_tile, self.variant,
        )  # fmt: skip
        return out, lse


def kept(x: Floats, number: str) -> Floats:
    """What the format keeps of rows (N, K, D): golden/README.md, section 6, has the codes."""
    if number == "f32":
        return x
    if number == "f16":
        return x.astype(np.float16).astype(np.float32)
    if number == "q4":
        return kept_nibbles(x)
    scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    return np.rint(x / np.where(scale > 0, scale, 1)) * scale


def blocks_of_32(x: Floats) -> Floats:
    """(..., blocks, 32): zeros where the last block is short."""
    missing = -x.shape[-1] % 32
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return padded.reshape(*x.shape[:-1], -1, 32)


def kept_nibbles(x: Floats) -> Floats:
    """ggml's Q4_0."""
    blocks = blocks_of_32(x)
    m = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1, keepdims=True), axis=-1)
    d = m / np.float32(-8)
    inverse = np.where(d != 0, 1 / np.where(d != 0, d, 1), 0).astype(np.float32)
    codes = np.minimum(15, np.trunc(blocks * inverse + np.float32(8.5)))
    values = (codes - 8) * d.astype(np.float16).astype(np.float32)
    return values.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]


def met(q: Floats) -> Floats:
    """Queries as 4-bit keys meet them: int8 with one scale a block of 32."""
    return kept(blocks_of_32(q), "q8").reshape(*q.shape[:-1], -1)[..., : q.shape[-1]]


def expected(
    cache: Cache,
    q: Floats,
    k: Floats,
    v: Floats,
    start: int,
    *,
    scale: float = 0.125,
    window: int = 0,
    softcap: float = 0.0,
    sinks: int = 0,
    sink_q: Floats | None = None,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The plain op in float64 on what the pages' formats keep. Each key meets one of four queries: the sinks' or its
    own, at 8 bits or not; it stands in that quarter of 4 · D channels.
    """
    position = np.arange(len(k))
    pairs = [cache.pair_at(p) for p in position]
    keys = np.stack([kept(row[None], pair[0])[0] for row, pair in zip(k, pairs, strict=True)])
    values = np.stack([kept(row[None], pair[1])[0] for row, pair in zip(v, pairs, strict=True)])
    quarter = (position < sinks) * 2 + np.array([pair[0] == "q4" for pair in pairs])
    wide_keys = np.concatenate([keys * (quarter == i)[:, None, None] for i in range(4)], axis=-1)
    sink_q = q if sink_q is None else sink_q
    wide_q = np.concatenate([q, met(q), sink_q, met(sink_q)], axis=-1)
    allowed = reference.attention_mask(start, len(q), 0, len(k), window or None, sinks)
    tensors = (torch.from_numpy(x).double() for x in (wide_q, wide_keys, values))
    out, lse = reference.attention(*tensors, allowed, scale=scale, softcap=softcap or None)
    return out.numpy(), lse.numpy()


def filled(
    variant: str, pairs: Pair | tuple[Pair, ...], heads: tuple[int, int], head_dim: int, tokens: int, seed: int = 0
) -> tuple[Cache, Floats, Floats, Floats]:
    """A cache of random rows, and q (N, H, D), k, v (N, K, D)."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((tokens, n, head_dim), dtype=np.float32) for n in (heads[0], heads[1], heads[1]))
    cache = Cache(variant, (pairs,) if isinstance(pairs[0], str) else pairs, heads[1], head_dim, tokens)
    cache.store(0, k, v)
    return cache, q, k, v


@pytest.fixture(scope="module")
def units() -> dict[str, npt.NDArray[Any]]:
    return load_file(GOLDEN)


def recorded_inputs(units: dict[str, npt.NDArray[Any]]) -> list[Floats]:
    return [np.ascontiguousarray(units[name].transpose(1, 0, 2)) for name in "qkv"]


def recorded_attention(units: dict[str, npt.NDArray[Any]], variant: str, pair: Pair, **options: Any) -> Floats:
    """Of the recorded inputs at the recorded positions, (H, positions, D)."""
    q, k, v = recorded_inputs(units)
    cache = Cache(variant, (pair,), 2, 64, len(k))
    cache.store(0, k, v)
    return np.ascontiguousarray(cache.attend(0, q, **options)[0][units["positions"]].transpose(1, 0, 2))


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=PAIRS, ids="-".join)
def pair(request: pytest.FixtureRequest) -> Pair:
    keys, values = request.param
    return keys, values


@pytest.mark.parametrize("number", ["int8_row", "q4_0"])
def test_recorded_codes_and_scales(units: dict[str, npt.NDArray[Any]], variant: str, number: str) -> None:
    """Row 17 of KV head 0 is all zero: its scale is 0. Code times scale, in float32, tells every code apart."""
    _, k, v = recorded_inputs(units)
    name = {"int8_row": "q8", "q4_0": "q4"}[number]
    cache = Cache(variant, ((name, name),), 2, 64, len(k))
    cache.store(0, k, v)
    for found, side in zip(cache.read(), "kv", strict=True):
        codes = units[f"{number}_{side}_codes"].astype(np.float32)
        scales = units[f"{number}_{side}_scales"].astype(np.float32)
        if number == "int8_row":
            recorded = codes * scales[..., None]
        else:
            recorded = ((codes.reshape(2, -1, 2, 32) - 8) * scales[..., None]).reshape(codes.shape)
        assert np.array_equal(found[: len(k)].transpose(1, 0, 2), recorded)


def test_recorded_attention_over_int8_rows(units: dict[str, npt.NDArray[Any]], variant: str) -> None:
    out = recorded_attention(units, variant, ("q8", "q8"))
    assert np.abs(out - units["int8_row_out_at"]).max() < TOLERANCE["q8"]
    # against exact attention the format's own error, recorded as 0.10055 (attention.json)
    assert np.abs(out - units["causal_out_at"]).max() < 0.1006


def test_recorded_attention_over_4_bit_values(units: dict[str, npt.NDArray[Any]], variant: str) -> None:
    out = recorded_attention(units, variant, ("q8", "q4"))
    assert np.abs(out - units["k_int8_row_v_q4_0_out_at"]).max() < 5e-4


def test_recorded_attention_over_4_bit_rows(units: dict[str, npt.NDArray[Any]], variant: str) -> None:
    """Keys have outlier channels up to 20: queries of 8 bits move a score by up to 0.1, an output by less."""
    out = recorded_attention(units, variant, ("q4", "q4"))
    assert np.abs(out - units["q4_0_out_at"]).max() < 0.1
    exact = units["causal_out_at"]
    own, recorded = (np.sqrt(np.mean((x - exact) ** 2)) for x in (out, units["q4_0_out_at"]))
    assert own == pytest.approx(recorded, rel=0.02)  # against exact attention the format's own error


@pytest.mark.parametrize(("number", "name", "allowed"), [("q8", "int8_row", 2e-3), ("q4", "q4_0", 0.1)])
def test_recorded_attention_over_rotated_rows(
    units: dict[str, npt.NDArray[Any]], variant: str, number: str, name: str, allowed: float
) -> None:
    """A rotation rounded otherwise may move a code by one step."""
    q, k, v = (rotated(x, variant) for x in recorded_inputs(units))
    assert np.abs(k[[0, 17, 100]].transpose(1, 0, 2) - units["hadamard_k_rows"]).max() < 4e-6
    cache = Cache(variant, ((number, number),), 2, 64, len(k))
    cache.store(0, k, v)
    out = rotated(cache.attend(0, q)[0], variant)[units["positions"]].transpose(1, 0, 2)
    assert np.abs(out - units[f"hadamard_{name}_out_at"]).max() < allowed


def rotated(x: Floats, variant: str) -> Floats:
    return np.asarray(native.hadamard(x.reshape(len(x), -1), 64, variant)).reshape(x.shape)


def test_recorded_attention_of_windows_with_sinks(units: dict[str, npt.NDArray[Any]], variant: str) -> None:
    q, k, v = recorded_inputs(units)
    cache = Cache(variant, (("f32", "f32"),), 2, 64, len(k))
    cache.store(0, k, v)
    out, lse = cache.attend(0, q, window=64, sinks=4)
    at = units["positions"]
    assert np.abs(out[at].transpose(1, 0, 2) - units["window_sinks_out_at"]).max() < 2e-5
    assert np.abs(lse[at].T - units["window_sinks_lse_at"]).max() < 2e-5


@pytest.mark.parametrize("window", [0, 64])
def test_recorded_attention_over_floats(units: dict[str, npt.NDArray[Any]], variant: str, window: int) -> None:
    """Rounding keys up to 20 to halves moves scores by up to 0.01 (measured on the outputs: 4.3e-3)."""
    recorded = units["window_out_at" if window else "causal_out_at"]
    assert np.abs(recorded_attention(units, variant, ("f32", "f32"), window=window) - recorded).max() < 2e-5
    assert np.abs(recorded_attention(units, variant, ("f16", "f16"), window=window) - recorded).max() < 6e-3


def test_recorded_sums(units: dict[str, npt.NDArray[Any]], variant: str) -> None:
    q, k, v = recorded_inputs(units)
    cache = Cache(variant, (("f32", "f32"),), 2, 64, len(k))
    cache.store(0, k, v)
    assert np.abs(cache.attend(0, q)[1].T - units["causal_lse"]).max() < 2e-5


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    head_dim = draw(st.sampled_from([8, 12, 16, 32, 40, 64, 80, 96, 128, 256]))
    start = draw(st.sampled_from([0, 1, 62, 63, 64, 65, 500, 511, 512, 513, 1500]))
    pair = st.tuples(st.sampled_from(NUMBERS), st.sampled_from(NUMBERS))
    window = draw(st.sampled_from([0, 0, 1, 16, 64, 65, 512]))
    return {
        "pairs": tuple(draw(st.lists(pair, min_size=1, max_size=3))),
        "heads": (kv_heads * draw(st.integers(1, 8)), kv_heads),
        "head_dim": head_dim,
        "start": start,
        "tokens": start + draw(st.integers(1, 70)),
        "window": window,
        "sinks": draw(st.sampled_from([0, 0, 1, 4, 64, 100, 600])) if window else 0,
        "softcap": draw(st.sampled_from([0.0, 0.0, 2.0, 50.0])),
        "query_tile": draw(st.sampled_from([1, 3, 16, 64])),
        "seed": draw(st.integers(0, 1000)),
    }


@pytest.mark.parametrize("variant_name", VARIANTS)
@settings(max_examples=80, deadline=None)
@given(case=shapes())
def test_equals_the_plain_op(variant_name: str, case: dict[str, Any]) -> None:
    """Every format of keys and of values, pages of several formats in turn, windows, sinks."""
    cache, q, k, v = filled(
        variant_name, case["pairs"], case["heads"], case["head_dim"], case["tokens"], seed=case["seed"]
    )
    start = case["start"]
    sink_q = np.random.default_rng(1).standard_normal(q[start:].shape, dtype=np.float32)
    options = {name: case[name] for name in ("window", "sinks", "softcap")}
    options |= {"scale": case["head_dim"] ** -0.5, "sink_q": sink_q}
    out, lse = cache.attend(start, q[start:], query_tile=case["query_tile"], **options)
    right, right_lse = expected(cache, q[start:], k, v, start, **options)
    assert np.abs(out - right).max() <= tolerance(*case["pairs"]) * np.abs(v).max()
    assert np.abs(lse - right_lse).max() <= tolerance(*case["pairs"])


@settings(max_examples=60, deadline=None)
@given(
    pair=st.tuples(st.sampled_from(NUMBERS), st.sampled_from(NUMBERS)),
    head_dim=st.sampled_from([8, 12, 32, 40, 64, 80, 96, 128, 256]),
    kv_heads=st.integers(1, 3),
    tokens=st.integers(1, 130),
    strength=st.sampled_from([1e-30, 1e-6, 1.0, 1e4]),
)
def test_pages_hold_what_the_format_keeps(
    pair: Pair, head_dim: int, kv_heads: int, tokens: int, strength: float
) -> None:
    """To the bit, for every variant; stale bytes (0xFF) of other slots stay out."""
    rng = np.random.default_rng(tokens)
    k, v = (rng.standard_normal((tokens, kv_heads, head_dim), dtype=np.float32) * strength for _ in "kv")
    v[tokens // 2, 0] = 0
    for variant in VARIANTS:
        cache = Cache(variant, (pair,), kv_heads, head_dim, tokens)
        cache.store(0, k.astype(np.float32), v.astype(np.float32))
        for found, rows, number in zip(cache.read(), (k, v), pair, strict=True):
            assert np.array_equal(found[:tokens], kept(rows.astype(np.float32), number))


@pytest.mark.parametrize("source", NUMBERS)
@pytest.mark.parametrize("target", NUMBERS)
@pytest.mark.parametrize("head_dim", [40, 64])
def test_a_moved_page_is_read_and_written(variant: str, source: str, target: str, head_dim: int) -> None:
    other = NUMBERS[NUMBERS.index(source) - 1]
    cache, _, k, v = filled(variant, ((source, other), (target, source)), (2, 2), head_dim, 64)
    page = ARENA_PAGES + 1
    native.move(cache.arenas, int(cache.list[0]), page, 2, head_dim, variant)
    found = native.read_page(cache.arenas, page, 2, head_dim, variant)
    for side, rows, (old, new) in zip(found, (k, v), ((source, target), (other, source)), strict=True):
        assert np.array_equal(side.transpose(1, 0, 2), kept(kept(rows, old), new))


@pytest.mark.parametrize("group", [1, 3, 8, 16])
@pytest.mark.parametrize(("window", "sinks"), [(0, 0), (65, 0), (65, 70)])
def test_a_token_is_the_same_to_the_bit_in_any_company(
    variant: str, pair: Pair, group: int, window: int, sinks: int
) -> None:
    """Stored and attended one by one, or as a chunk over page and segment borders in tiles of any size."""
    start, end, pairs = 500, 590, (pair, ("q4", "q8"))
    cache, q, k, v = filled(variant, pairs, (2 * group, 2), 40, end)
    options = {"window": window, "sinks": sinks}
    whole = cache.attend(start, q[start:], query_tile=90, **options)
    for tile in (1, 7, 32):
        for a, b in zip(cache.attend(start, q[start:], query_tile=tile, **options), whole, strict=True):
            assert np.array_equal(a, b)
    growing = Cache(variant, pairs, 2, 40, end)
    growing.store(0, k[:start], v[:start])
    for t in range(start, end):
        growing.store(t, k[t : t + 1], v[t : t + 1])
        first_page = max(0, t - window + 1) // PAGE_LEN if window else 0
        alone = growing.attend(t, q[t : t + 1], first_page=first_page, **options)
        for a, b in zip(alone, whole, strict=True):
            assert np.array_equal(a[0], b[t - start])


@pytest.mark.parametrize("sinks", [0, 5, 200])
def test_a_cut_of_the_chunk_changes_no_bit(variant: str, pair: Pair, sinks: int) -> None:
    cache, q, _, _ = filled(variant, (pair, ("q8", "q4")), (3, 1), 64, 1100)
    options = {"window": 130 if sinks else 0, "sinks": sinks}
    whole, _ = cache.attend(0, q, **options)
    for cut in (1, 4, 63, 64, 199, 511, 512, 513, 1099):
        parts = [cache.attend(0, q[:cut], **options)[0], cache.attend(cut, q[cut:], query_tile=32, **options)[0]]
        assert np.array_equal(np.concatenate(parts), whole)


def test_keys_that_no_query_sees_may_hold_anything(variant: str, pair: Pair) -> None:
    cache, q, _, _ = filled(variant, pair, (4, 2), 32, 200)
    seen, _ = cache.attend(190, q[190:], window=60)  # positions 131 and on: the third page has three behind it
    with_sinks, _ = cache.attend(190, q[190:], window=60, sinks=3)
    second = cache.list[1] * cache.page_bytes[0]
    cache.buffers[0][second : second + cache.page_bytes[0]] = 0xFF
    assert np.array_equal(cache.attend(190, q[190:], window=60, sinks=3)[0], with_sinks)
    first = cache.list[0] * cache.page_bytes[0]
    cache.buffers[0][first : first + cache.page_bytes[0]] = 0xFF
    assert np.array_equal(cache.attend(190, q[190:], window=60)[0], seen)
    assert np.array_equal(cache.attend(190, q[190:], window=60, first_page=2)[0], seen)


def test_pages_before_the_first_are_not_there(variant: str, pair: Pair) -> None:
    cache, q, k, v = filled(variant, pair, (2, 1), 16, 1200)
    out, _ = cache.attend(1190, q[1190:], first_page=9)
    right, _ = expected(cache, q[1190:], k[9 * PAGE_LEN :], v[9 * PAGE_LEN :], 1190 - 9 * PAGE_LEN)
    assert np.abs(out - right).max() < tolerance(pair) * np.abs(v).max()


@pytest.mark.parametrize("strength", [1e-6, 30.0, 1e4])
def test_flat_and_sharp_scores(variant: str, pair: Pair, strength: float) -> None:
    """Weights nearly equal, mostly tiny, or all on one key: the scores' rounding grows with them, so judge by it."""
    cache, q, k, v = filled(variant, pair, (2, 1), 64, 600)
    q *= np.float32(strength)
    out, _ = cache.attend(599, q[599:])
    right, _ = expected(cache, q[599:], k, v, 599)
    assert np.isfinite(out).all()
    if strength < 1e4:
        assert np.abs(out - right).max() < tolerance(pair) * max(1.0, strength) * 4
    else:  # the winning key leads by more than any rounding
        assert np.allclose(out, right, atol=2e-4)


def test_equal_keys_give_the_mean(variant: str, pair: Pair) -> None:
    rng = np.random.default_rng(3)
    k = np.ones((130, 1, 8), np.float32)
    v = rng.integers(-7, 8, (130, 1, 8)).astype(np.float32)
    v[:, :, 0] = 127 if pair[1] == "q8" else -8  # the scale is 1, so every format holds the values exactly
    cache = Cache(variant, (pair,), 1, 8, 130)
    cache.store(0, k, v)
    out, lse = cache.attend(129, np.full((1, 1, 8), 3.0, np.float32))
    assert np.allclose(out[0, 0], v[:, 0].mean(axis=0), atol=127 * 2e-5)
    assert lse[0, 0] == pytest.approx(3.0 + np.log(130), abs=1e-5)


def test_rows_of_zeros(variant: str, pair: Pair) -> None:
    k = np.zeros((70, 1, 16), np.float32)
    cache = Cache(variant, (pair,), 1, 16, 70)
    cache.store(0, k, k)
    out, lse = cache.attend(69, np.zeros((1, 2, 16), np.float32))
    assert not out.any()
    assert np.allclose(lse, np.log(70), atol=1e-6)


def test_the_exponential(variant: str) -> None:
    """Weights of two keys whose scores differ by an exact x: 2^x / (1 + 2^x), to 4 units in the last place."""
    x = -np.arange(0.0, 24.0, 1 / 64, dtype=np.float32)  # halves hold them
    log_2 = float(np.log(2.0))
    seen = np.empty_like(x)
    for i, difference in enumerate(x):
        k, v = np.zeros((2, 1, 8), np.float32), np.zeros((2, 1, 8), np.float32)
        k[1, 0, 0], v[1, 0, 0] = difference, 1
        cache = Cache(variant, (("f16", "f16"),), 1, 8, 2)
        cache.store(0, k, v)
        seen[i] = cache.attend(1, np.ones((1, 1, 8), np.float32), scale=log_2)[0][0, 0, 0]
    power = np.exp2(x.astype(np.float64))
    # the scale log 2, rounded to float32, moves the exponent by 3e-8 of itself
    allowed = 4 * 2.0**-24 + 1e-7 * np.abs(x)
    assert (np.abs(seen / (power / (1 + power)) - 1) <= allowed).all()


@pytest.mark.parametrize("head_dim", [12, 64])
def test_variants_store_the_same_and_agree(head_dim: int, pair: Pair) -> None:
    results = []
    for name in VARIANTS:
        cache, q, k, v = filled(name, pair, (6, 2), head_dim, 150)
        k[3] *= 1e-7  # halves below 2^-14, codes as any
        v[4, 0] = 0
        cache.store(0, k, v)
        results.append((cache.buffers[0], *cache.attend(70, q[70:])))
    for buffer, out, lse in results[1:]:
        assert np.array_equal(buffer, results[0][0])
        assert np.abs(out - results[0][1]).max() < 5e-5
        assert np.abs(lse - results[0][2]).max() < 5e-6


def test_stored_halves_are_the_nearest(variant: str) -> None:
    x = np.array([1.0, -2.5, 65504.0, 65520.0, 6e-8, 2.9e-8, 1.00048828125, np.nan], np.float32)
    halves = np.clip(x, -65504, 65504).astype(np.float16)  # never infinite, which would end in NaN
    cache = Cache(variant, (("f16", "f16"),), 1, 8, 1)
    cache.store(0, x[None, None], x[None, None])
    for side in cache.read():
        assert np.array_equal(side[0, 0].astype(np.float16), halves, equal_nan=True)


def test_a_page_takes_no_more_than_its_rows() -> None:
    """Where blocks and vectors divide the head, and its keys and values each a cache line."""
    for number, row_bytes in KV_ROW_BYTES.items():
        assert native.page_bytes(number, number, 3, 64, "portable") == 2 * 3 * PAGE_LEN * row_bytes(64)


def test_bad_arguments_are_refused() -> None:
    cache, q, _, _ = filled("portable", ("q8", "q8"), (2, 2), 8, 64)
    for page, message in ((99, "outside the buffer"), (ARENA_PAGES, "no arena")):
        with pytest.raises(ValueError, match=message):
            native.store(cache.arenas, np.array([page], np.int32), 0, q, q, "portable")
    with pytest.raises(ValueError, match="not q5"):
        native.page_bytes("q5", "q8", 1, 8, "portable")
    with pytest.raises(ValueError, match="no such variant"):
        native.page_bytes("q8", "q8", 1, 8, "sse9")
