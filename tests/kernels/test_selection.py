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
        """int8 (pages, K, 2, D up to a multiple of 16), means and variances, and scales (pages, K, 2)."""
        padded = -(-self.head_dim // 16) * 16
        rows = self.bytes.reshape(len(self.bytes), self.kv_heads, -1)
        codes = rows[..., : 2 * padded].view(np.int8).reshape(*rows.shape[:2], 2, padded)
        return codes, rows[..., 2 * padded :].copy().view(np.float32)

    def values(self) -> npt.NDArray[np.float64]:
        """Means and variances as they are stored, (pages, K, 2, D)."""
        codes, scales = self.codes()
        return codes[..., : self.head_dim] * scales[..., None].astype(np.float64)


def moments_of(keys: Floats) -> npt.NDArray[np.float64]:
    """Means and variances, (pages, K, 2, D), of keys (pages, 64, K, D)."""
    exact = keys.astype(np.float64)
    return np.stack([exact.mean(axis=1), exact.var(axis=1)], axis=2)


def best(bounds: npt.NDArray[np.floating[Any]], count: int) -> list[int]:
    """The `count` largest, of equals the first, ascending."""
    return sorted(sorted(range(len(bounds)), key=lambda i: (-bounds[i], i))[:count])


def choose(bounds: Any, local_pages: int, chosen: list[int], variant: str, scale: float = 1.0) -> list[int]:
    """bounds: of one query head, or (group, candidates)."""
    renewed = np.array(chosen, dtype=np.int32)
    scores = np.atleast_2d(np.array(bounds, dtype=np.float32))
    native.choose_pages(scores, scale, scores.shape[1] + 2 + local_pages, local_pages, renewed, variant)
    return [int(page) for page in renewed]


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def units() -> dict[str, npt.NDArray[Any]]:
    return load_file(GOLDEN)


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
def test_means_and_variances_are_stored_within_half_a_step(variant_name: str, keys: Floats) -> None:
    pages, _, kv_heads, head_dim = keys.shape
    bounds = Bounds(variant_name, pages, kv_heads, head_dim)
    for page in range(pages):
        bounds.store(page, keys[page])
    codes, scales = bounds.codes()
    right = moments_of(keys)
    assert not codes[..., head_dim:].any()
    assert scales == pytest.approx(np.abs(right).max(axis=-1) / 127, rel=1e-4, abs=1e-30)
    largest = np.abs(keys).max(initial=0.0)
    rounding = np.array([largest, float(largest) ** 2])[:, None] * 1e-6
    assert (np.abs(bounds.values() - right) <= 0.501 * scales[..., None] + rounding + 1e-37).all()


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
    """Against float64 on means and variances as stored; off by what rounding to 16 bits can make of a query."""
    arenas, pages, q = drawn(variant_name, case)
    seen = native.bound_pages([a.bytes for a in arenas], case["kv_heads"], pages, q, variant_name)
    values = np.stack([arenas[page // ARENA_PAGES].values()[page % ARENA_PAGES] for page in pages])  # (P, K, 2, D)
    for head, query in enumerate(q.astype(np.float64)):
        means, variances = values[:, head // case["group"]].transpose(1, 0, 2)
        half_step = np.abs(query).max() / QUERY_STEPS / 2, (query**2).max() / QUERY_STEPS / 2
        mean, off = means @ query, half_step[0] * np.abs(means).sum(axis=1)
        variance, off_squared = variances @ query**2, half_step[1] * variances.sum(axis=1)
        exact = mean + 2 * np.sqrt(variance)
        allowed = off + 2 * (np.sqrt(variance + off_squared) - np.sqrt(variance)) + 1e-6 * (np.abs(mean) + exact)
        below = 2 * (np.sqrt(variance) - np.sqrt(np.maximum(variance - off_squared, 0)))
        assert (np.abs(seen[head] - exact) <= np.maximum(allowed, off + below) * 1.01 + 1e-30).all()


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


def test_what_a_page_promises_is_shared_by_the_heads(variant: str) -> None:
    """Each head's softmax has one share to give; a head that is sure of one page outweighs two that are not."""
    sure, unsure = [0, 9, 0, 0, 0], [0.6, 0, 0.6, 0, 0]
    assert choose([sure, unsure, unsure], 0, [0] * 3, variant) == [0, 2, 6]
    assert choose([sure, unsure, unsure], 0, [0] * 3, variant, scale=0.01) == [0, 2, 6]
    assert choose([sure, unsure, unsure], 0, [0] * 5, variant) == [0, 1, 2, 3, 6]
    assert choose([[0, 4, 0], [4.1, 0, 0], [4.1, 0, 0]], 0, [0] * 3, variant) == [0, 1, 4]


@pytest.mark.parametrize("variant_name", VARIANTS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1000), group=st.integers(1, 9), count=st.integers(1, 120), scale=st.sampled_from([1.0, 0.1]))
def test_choice_by_shares_of_every_head(variant_name: str, seed: int, group: int, count: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    bounds = (20 * rng.standard_normal((group, count))).astype(np.float32)
    shares = np.exp(scale * (bounds.astype(np.float64) - bounds.max(axis=1, keepdims=True)))
    promises = (shares / shares.sum(axis=1, keepdims=True)).sum(axis=0)
    wanted = int(rng.integers(0, count + 1))
    chosen = np.array(choose(bounds, 1, [0] * (wanted + 3), variant_name, scale))[1 : 1 + wanted] - 1
    others = np.delete(promises, chosen)
    assert len(set(chosen.tolist())) == wanted
    assert not wanted or not len(others) or promises[chosen].min() >= others.max() * (1 - 1e-4) - 1e-30


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
    chosen = choose(bounds, local, [0] * (wanted + local + 2), variant_name, scale=1e-3)
    middle = [1 + i for i in best(np.array(bounds, dtype=np.float64), wanted)]
    assert chosen == [0, *middle, *range(len(bounds) + 1, len(bounds) + 2 + local)]


@pytest.mark.parametrize("variant_name", VARIANTS)
@settings(max_examples=200, deadline=None)
@given(case=choices())
def test_renewed_choice(variant_name: str, case: dict[str, Any]) -> None:
    """Pages chosen last time, local ones among them that are candidates now, count a quarter more."""
    wanted, local = case["wanted"], case["local"]
    bounds = np.array(case["bounds"], dtype=np.float64) / 1000  # so that shares differ by more than their rounding
    before = np.random.default_rng(case["seed"]).permutation(len(bounds) + 1 + local)[: wanted + local + 1] + 1
    chosen = choose(bounds, local, [0, *sorted(before.tolist())], variant_name)
    was_chosen = np.isin(np.arange(len(bounds)) + 1, before)
    promises = np.exp(bounds) * np.where(was_chosen, 1.25, 1.0)
    middle = np.array(chosen[1 : 1 + wanted], dtype=np.int64) - 1
    others = np.delete(promises, middle)
    assert chosen == [0, *sorted(set(chosen[1 : 1 + wanted])), *range(len(bounds) + 1, len(bounds) + 2 + local)]
    assert not wanted or not len(others) or promises[middle].min() >= others.max() * (1 - 1e-5)


def test_a_chosen_page_stays_until_another_is_clearly_better(variant: str) -> None:
    assert choose([2, 0, 1, 1.2], 0, [0, 1, 3, 5], variant) == [0, 1, 3, 5]  # e^0.2 is less than 1.25
    assert choose([2, 0, 1, 1.25], 0, [0, 1, 3, 5], variant) == [0, 1, 4, 5]
    assert choose([2, 0, 1, 1.2], 0, [0, 0, 0, 0], variant) == [0, 1, 4, 5]  # nothing was chosen before


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
