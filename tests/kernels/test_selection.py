"""Native page selection: bounds, their products with queries, and the choice, against brute force in numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

native = pytest.importorskip("heedful._native")

GOLDEN = Path(__file__).parent.parent / "golden" / "attention" / "attention.safetensors"
PAGE_LEN = 64
ARENA_PAGES = 1 << 20
VARIANTS = ["portable", native.variant()] if native.variant() != "portable" else ["portable"]
HEAD_DIMS = [8, 12, 32, 40, 64, 80, 96, 128, 256]
QUERY_STEPS = 32767  # of half the range that queries are rounded in

Floats = npt.NDArray[np.float32]


class Bounds:
    """Bounds of one layer's pages, every byte of them 0xFF at first."""

    def __init__(self, variant: str, pages: int, kv_heads: int, head_dim: int) -> None:
        self.variant, self.kv_heads, self.head_dim = variant, kv_heads, head_dim
        self.bytes = np.full((pages, native.bounds_bytes(kv_heads, head_dim, variant)), 0xFF, dtype=np.uint8)

    def store(self, page: int, keys: Floats) -> None:
        """keys (64, K, D)."""
        for head in range(self.kv_heads):
            rows = np.ascontiguousarray(keys[:, head])
            native.store_bounds(self.bytes, self.kv_heads, page, head, rows, self.variant)

    def codes(self) -> tuple[npt.NDArray[np.int8], Floats]:
        """int8 (pages, K, D up to a multiple of 8, 2), least and largest, and scales (pages, K)."""
        padded = -(-self.head_dim // 8) * 8
        rows = self.bytes.reshape(len(self.bytes), self.kv_heads, -1)
        codes = rows[..., : 2 * padded].view(np.int8).reshape(*rows.shape[:2], padded, 2)
        return codes, rows[..., 2 * padded : 2 * padded + 4].copy().view(np.float32)[..., 0]


def quantized(keys: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
    """What is to be stored of the keys (pages, 64, K, D)."""
    least, largest = keys.min(axis=1), keys.max(axis=1)
    scale = (np.maximum(abs(least), abs(largest)).max(axis=-1) / np.float32(127)).astype(np.float32)
    divisor = np.where(scale > 0, scale, np.float32(1))[..., None]
    codes = np.stack([np.floor(least / divisor), np.ceil(largest / divisor)], axis=-1)
    return codes.clip(-127, 127).astype(np.int8), scale


def best(bounds: npt.NDArray[np.floating[Any]], count: int) -> list[int]:
    """The `count` largest, of equals the first, ascending."""
    return sorted(sorted(range(len(bounds)), key=lambda i: (-bounds[i], i))[:count])


def choose(bounds: Any, local_pages: int, chosen: list[int], variant: str) -> list[int]:
    renewed = np.array(chosen, dtype=np.int32)
    scores = np.array(bounds, dtype=np.float32)
    native.choose_pages(scores, len(scores) + 2 + local_pages, local_pages, renewed, variant)
    return [int(page) for page in renewed]


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def units() -> dict[str, npt.NDArray[Any]]:
    return load_file(GOLDEN)


@pytest.fixture
def recorded(units: dict[str, npt.NDArray[Any]], variant: str) -> Bounds:
    """Bounds of the recorded pages of 16 keys, each key four times; the last page is partial: its last key oftener."""
    keys = units["k"].transpose(1, 0, 2)  # (300, 2, 64)
    bounds = Bounds(variant, 19, 2, 64)
    for page in range(19):
        bounds.store(page, keys[np.minimum(16 * page + np.arange(PAGE_LEN) // 4, len(keys) - 1)])
    return bounds


def test_recorded_bounds_lie_inside_the_stored_ones(units: dict[str, npt.NDArray[Any]], recorded: Bounds) -> None:
    codes, scales = recorded.codes()
    values = codes * scales[..., None, None].astype(np.float64)  # (19, 2, 64, 2)
    step = scales[..., None] * 1.0001
    for at, name in enumerate(("quest_kmin", "quest_kmax")):
        slack = (values[..., at] - units[name].transpose(1, 0, 2)) * (1 if at else -1)
        assert (slack >= -1e-4 * step).all()  # float32: 127 times the scale is not the largest to the bit
        assert (slack <= step).all()


def test_recorded_upper_bounds(units: dict[str, npt.NDArray[Any]], recorded: Bounds) -> None:
    """Of exact bounds, for the last query: rounding the bounds outwards adds at most a step a channel."""
    q = units["q"][:, -1]
    _, scales = recorded.codes()
    exact = units["quest_upper_bound"].reshape(2, 3, 19)
    for head in range(6):  # each query head alone with the keys of its KV head
        both = np.ascontiguousarray(np.stack([q[head], q[head]]))
        pages = np.arange(19, dtype=np.int32)
        bound = native.bound_pages([recorded.bytes], 2, pages, both, recorded.variant)[head // 3] / 8
        slack = bound - exact[head // 3, head % 3]
        assert (slack >= -1e-3).all()
        assert (slack <= scales[:, head // 3] * np.abs(q[head]).sum() / 8 + 1e-3).all()
        assert (bound >= units["quest_true_page_max"][head] - 1e-3).all()
    together = native.bound_pages([recorded.bytes], 2, pages, np.ascontiguousarray(q), recorded.variant) / 8
    assert (together >= exact.max(axis=1) - 1e-3).all()


def test_recorded_choice(units: dict[str, npt.NDArray[Any]], variant: str) -> None:
    """Six pages of 19 by the recorded bounds, the first and the last forced."""
    bounds = units["quest_upper_bound"].reshape(2, 3, 19).max(axis=1)
    for head in (0, 1):
        chosen = choose(bounds[head, 1:18], 0, [0] * 6, variant)
        assert chosen == units["quest_per_kv_head_forced_pages"][head].tolist()


@st.composite
def key_pages(draw: st.DrawFn) -> Floats:
    """(pages, 64, K, D)."""
    shape = (draw(st.integers(1, 3)), PAGE_LEN, draw(st.integers(1, 3)), draw(st.sampled_from(HEAD_DIMS)))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    keys = rng.standard_normal(shape, dtype=np.float32) + rng.standard_normal(shape[2:], dtype=np.float32) * 2
    if draw(st.booleans()):  # an outlier channel
        keys[..., 0] *= np.float32(draw(st.sampled_from([0.0, 20.0, 1e4])))
    return keys * np.float32(draw(st.sampled_from([1.0, 1.0, 1e-6, 1e6, 0.0])))


@pytest.mark.parametrize("variant_name", VARIANTS)
@settings(max_examples=40, deadline=None)
@given(keys=key_pages())
def test_bounds_are_rounded_outwards(variant_name: str, keys: Floats) -> None:
    pages, _, kv_heads, head_dim = keys.shape
    bounds = Bounds(variant_name, pages, kv_heads, head_dim)
    for page in range(pages):
        bounds.store(page, keys[page])
    codes, scales = bounds.codes()
    right_codes, right_scales = quantized(keys)
    assert np.array_equal(codes[:, :, :head_dim], right_codes)
    assert not codes[:, :, head_dim:].any()
    assert np.array_equal(scales, right_scales)
    values = right_codes * scales[..., None, None].astype(np.float64)
    assert (values[..., 0] <= keys.min(axis=1) + 1e-6 * np.abs(keys).max()).all()
    assert (values[..., 1] >= keys.max(axis=1) - 1e-6 * np.abs(keys).max()).all()


def test_bounds_of_other_heads_and_pages_stay(variant: str) -> None:
    bounds = Bounds(variant, 3, 3, 40)
    keys = np.ones((PAGE_LEN, 40), np.float32)
    native.store_bounds(bounds.bytes, 3, 1, 1, keys, variant)
    rows = bounds.bytes.reshape(3, 3, -1)
    touched = (rows != 0xFF).any(axis=-1)
    assert np.argwhere(touched).tolist() == [[1, 1]]


@st.composite
def selections(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "kv_heads": draw(st.integers(1, 3)),
        "group": draw(st.integers(1, 9)),
        "head_dim": draw(st.sampled_from(HEAD_DIMS)),
        "pages": draw(st.integers(1, 20)),
        "seed": draw(st.integers(0, 1000)),
        "strength": draw(st.sampled_from([1.0, 1e-4, 1e3, 0.0])),
    }


def drawn(variant: str, case: dict[str, Any]) -> tuple[list[Bounds], npt.NDArray[np.int32], Floats]:
    """Pages in two arenas, in a shuffled order, and queries of which one head in three is small."""
    rng = np.random.default_rng(case["seed"])
    kv_heads, head_dim, count = case["kv_heads"], case["head_dim"], case["pages"]
    arenas = [Bounds(variant, count, kv_heads, head_dim) for _ in range(2)]
    pages = rng.permutation(count).astype(np.int32) + rng.integers(0, 2, count, dtype=np.int32) * ARENA_PAGES
    for page in pages:
        keys = rng.standard_normal((PAGE_LEN, kv_heads, head_dim), dtype=np.float32)
        keys += 2 * rng.standard_normal((kv_heads, head_dim), dtype=np.float32)
        arenas[page // ARENA_PAGES].store(page % ARENA_PAGES, keys)
    q = rng.standard_normal((kv_heads * case["group"], head_dim), dtype=np.float32) * np.float32(case["strength"])
    q[::3] *= np.float32(0.01)
    return arenas, pages, q


@pytest.mark.parametrize("variant_name", VARIANTS)
@settings(max_examples=40, deadline=None)
@given(case=selections())
def test_bounds_of_queries(variant_name: str, case: dict[str, Any]) -> None:
    """Against float64 on the bounds as stored; off by what rounding the group's queries to 16 bits can make."""
    arenas, pages, q = drawn(variant_name, case)
    kv_heads = case["kv_heads"]
    seen = native.bound_pages([a.bytes for a in arenas], kv_heads, pages, q, variant_name)
    rows = [arenas[page // ARENA_PAGES].codes() for page in pages]
    codes = np.stack([codes[page % ARENA_PAGES] for (codes, _), page in zip(rows, pages, strict=True)])
    scales = np.stack([scale[page % ARENA_PAGES] for (_, scale), page in zip(rows, pages, strict=True)])
    values = codes[:, :, : case["head_dim"]] * scales[..., None, None].astype(np.float64)
    values = values.transpose(1, 0, 2, 3)  # (K, pages, D, 2)
    groups = q.astype(np.float64).reshape(kv_heads, case["group"], 1, -1, 1)
    exact = (groups * values[:, None]).max(axis=-1).sum(axis=-1).max(axis=1)
    half_step = np.abs(groups).max(axis=(1, 2, 3, 4)) / QUERY_STEPS / 2
    allowed = half_step[:, None] * np.abs(values).max(axis=-1).sum(axis=-1) + 1e-6 * np.abs(exact)
    assert (np.abs(seen - exact) <= allowed * 1.001 + 1e-30).all()


@pytest.mark.parametrize("head_dim", [12, 64, 256])
def test_variants_store_and_bound_the_same_to_the_bit(head_dim: int) -> None:
    case = {"kv_heads": 2, "group": 5, "head_dim": head_dim, "pages": 9, "seed": 3, "strength": 1.0}
    results = []
    for name in VARIANTS:
        arenas, pages, q = drawn(name, case)
        results.append(([a.bytes for a in arenas], native.bound_pages([a.bytes for a in arenas], 2, pages, q, name)))
    for arrays, bounds in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(arrays, results[0][0], strict=True))
        assert np.array_equal(bounds, results[0][1])


def test_no_bound_is_below_a_product(variant: str) -> None:
    """The largest product of a query with the keys that the bounds were made of, up to rounding."""
    rng = np.random.default_rng(5)
    keys = rng.standard_normal((8, PAGE_LEN, 2, 64), dtype=np.float32)
    bounds = Bounds(variant, 8, 2, 64)
    for page in range(8):
        bounds.store(page, keys[page])
    q = rng.standard_normal((6, 64), dtype=np.float32)
    seen = native.bound_pages([bounds.bytes], 2, np.arange(8, dtype=np.int32), q, variant)
    products = np.einsum("kgd,pskd->kpgs", q.reshape(2, 3, 64).astype(np.float64), keys).max(axis=(2, 3))
    assert (seen >= products - 1e-3).all()


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    """Bounds of few different values, so that many are equal."""
    count = draw(st.integers(1, 150))
    value = draw(st.sampled_from([st.integers(-3, 3), st.integers(-1000, 1000), st.sampled_from([0.0, -0.0])]))
    return {
        "bounds": draw(st.lists(value, min_size=count, max_size=count)),
        "wanted": draw(st.integers(0, count)),
        "local": draw(st.integers(0, 4)),
        "seed": draw(st.integers(0, 1000)),
    }


@pytest.mark.parametrize("variant_name", VARIANTS)
@settings(max_examples=200, deadline=None)
@given(case=choices())
def test_first_choice(variant_name: str, case: dict[str, Any]) -> None:
    bounds, wanted, local = case["bounds"], case["wanted"], case["local"]
    chosen = choose(bounds, local, [0] * (wanted + local + 2), variant_name)
    middle = [1 + i for i in best(np.array(bounds, dtype=np.float64), wanted)]
    assert chosen == [0, *middle, *range(len(bounds) + 1, len(bounds) + 2 + local)]


@pytest.mark.parametrize("variant_name", VARIANTS)
@settings(max_examples=200, deadline=None)
@given(case=choices())
def test_renewed_choice(variant_name: str, case: dict[str, Any]) -> None:
    """Pages chosen last time, local ones among them that are candidates now, count a tenth of the range more."""
    bounds, wanted, local = np.array(case["bounds"], dtype=np.float32), case["wanted"], case["local"]
    before = np.random.default_rng(case["seed"]).permutation(len(bounds) + 1 + local)[: wanted + local + 1] + 1
    chosen = choose(bounds, local, [0, *sorted(before.tolist())], variant_name)
    was_chosen = np.isin(np.arange(len(bounds)) + 1, before)
    favoured = bounds + np.where(was_chosen, np.float32(0.1) * (bounds.max() - bounds.min()), np.float32(0))
    middle = [1 + i for i in best(favoured, wanted)]
    assert chosen == [0, *middle, *range(len(bounds) + 1, len(bounds) + 2 + local)]


def test_a_chosen_page_stays_until_another_is_clearly_better(variant: str) -> None:
    assert choose([10, 0, 5, 5.5], 0, [0, 1, 3, 5], variant) == [0, 1, 3, 5]  # 5 + 1 beats 5.5
    assert choose([10, 0, 5, 6.5], 0, [0, 1, 3, 5], variant) == [0, 1, 4, 5]
    assert choose([10, 0, 5, 5.5], 0, [0, 0, 0, 0], variant) == [0, 1, 4, 5]  # nothing was chosen before


def test_ties_go_to_the_earlier_page(variant: str) -> None:
    assert choose([1, 1, 1, 1], 1, [0] * 5, variant) == [0, 1, 2, 5, 6]
    assert choose([-0.0, 0.0, -0.0], 0, [0] * 3, variant) == [0, 1, 4]


def test_bounds_that_are_no_numbers_end_the_choice_nevertheless(variant: str) -> None:
    chosen = choose([np.nan, 1.0, np.inf, -np.inf, np.nan, 2.0], 1, [0] * 5, variant)
    assert chosen[0] == 0
    assert chosen[-2:] == [7, 8]
    assert chosen == sorted(set(chosen))


def test_bad_arguments_are_refused(variant: str) -> None:
    bounds = Bounds(variant, 2, 1, 8)
    with pytest.raises(ValueError, match="no such page"):
        native.bound_pages([bounds.bytes], 1, np.array([2], np.int32), np.zeros((1, 8), np.float32), variant)
    with pytest.raises(ValueError, match="no such arena"):
        native.bound_pages([bounds.bytes], 1, np.array([ARENA_PAGES], np.int32), np.zeros((1, 8), np.float32), variant)
    with pytest.raises(ValueError, match="chosen <= pages"):
        choose([1.0], 1, [0] * 5, variant)
