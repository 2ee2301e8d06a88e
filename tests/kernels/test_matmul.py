"""Packing and matrix products of the native kernels.

Judges: the gguf package for what stored blocks mean, numpy in float64 for products. Panels are read back here by their
description (csrc/pack.cpp), not by our code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Ggml
from hypothesis import given, settings
from hypothesis import strategies as st

native = pytest.importorskip("heedful._native")

Array = np.ndarray[Any, Any]
VARIANTS = native.variants()
FORMATS = ("f32", "f16", "w4", "w8", "w6")
INTEGERS = ("w4", "w6", "w8")
BLOCK_BYTES = {"w4": 160, "w6": 288, "w8": 272}
BLOCK = 32
TINY = 2.0**-24
"""The smallest half above zero."""

HALF_FIELDS = {
    Ggml.Q4_0: (0,),
    Ggml.Q4_1: (0, 2),
    Ggml.Q5_0: (0,),
    Ggml.Q5_1: (0, 2),
    Ggml.Q8_0: (0,),
    Ggml.Q2_K: (80, 82),
    Ggml.Q3_K: (108,),
    Ggml.Q4_K: (0, 2),
    Ggml.Q5_K: (0, 2),
    Ggml.Q6_K: (208,),
    Ggml.IQ4_NL: (0,),
}
"""Where a block's float16 scales lie; every other byte may have any value."""
FLOAT_TYPES = {Ggml.F32: 4, Ggml.F16: 2, Ggml.BF16: 2}
EXACT = (Ggml.F32, Ggml.F16, Ggml.BF16, Ggml.Q4_0, Ggml.Q4_1, Ggml.Q5_0, Ggml.Q8_0, Ggml.IQ4_NL)


def random_stored(ggml_type: Ggml, rows: int, cols: int, seed: int = 0) -> Array:
    """Valid stored rows, uint8 (rows, row_bytes): random codes, scales of either sign and widely different sizes."""
    rng = np.random.default_rng(seed)
    if ggml_type in FLOAT_TYPES:
        values = rng.standard_normal((rows, cols), np.float32) * np.exp2(rng.integers(-12, 3, (rows, 1)))
        return np.asarray(gguf.quants.quantize(values.astype(np.float32), ggml_type)).view(np.uint8).reshape(rows, -1)
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    blocks = rng.integers(0, 256, (rows * cols // block_len, block_bytes), np.uint8)
    for at in HALF_FIELDS[ggml_type]:
        scales = rng.choice((-1.0, 1.0), len(blocks)) * np.exp2(rng.uniform(-10, 0, len(blocks)))
        blocks[:, at : at + 2] = scales.astype("<f2")[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def meaning(ggml_type: Ggml, stored: Array) -> Array:
    """float32 (rows, cols), by the gguf package."""
    return np.asarray(gguf.quants.dequantize(stored, ggml_type), np.float32).reshape(len(stored), -1)


def unpack(packed: Array, panel_format: str, rows: int, cols: int) -> Array:
    """float64 (rows rounded up to whole panels, cols) of panels."""
    panels = math.ceil(rows / 8)
    if panel_format == "f32":
        pairs = packed.view("<f4").reshape(panels, math.ceil(cols / 2), 8, 2)
        return pairs.transpose(0, 2, 1, 3).reshape(panels * 8, -1)[:, :cols].astype(np.float64)
    if panel_format == "f16":
        lanes = packed.view("<f2").reshape(panels, cols, 8)
        return lanes.transpose(0, 2, 1).reshape(panels * 8, cols).astype(np.float64)
    blocks = packed.reshape(panels, cols // BLOCK, BLOCK_BYTES[panel_format])
    scales = blocks[:, :, :16].copy().view("<f2").astype(np.float64)
    mins = blocks[:, :, 16:32].copy().view("<f2").astype(np.float64) if panel_format != "w8" else np.zeros_like(scales)
    if panel_format == "w4":
        vectors = blocks[:, :, 32:].reshape(panels, -1, 4, 8, 4).transpose(0, 3, 1, 2, 4)
        parts = [half.reshape(panels, 8, -1, 16) for half in (vectors & 15, vectors >> 4)]
        codes = np.concatenate(parts, axis=-1)
    else:
        vectors = blocks[:, :, -256:].reshape(panels, -1, 8, 8, 4).transpose(0, 3, 1, 2, 4)
        codes = vectors.reshape(panels, 8, -1, BLOCK).view(np.int8)
    values = scales.transpose(0, 2, 1)[..., None] * codes + mins.transpose(0, 2, 1)[..., None]
    return values.reshape(panels * 8, cols)


def per_block(values: Array, reduce: Any) -> Array:
    """`reduce` over each 32 columns, given back at every column."""
    blocks = values.reshape(len(values), -1, BLOCK)
    return np.repeat(reduce(blocks, axis=-1), BLOCK, axis=-1)


def largest(weights: Array) -> Array:
    return per_block(np.abs(weights), np.max)


@pytest.mark.parametrize("ggml_type", [*FLOAT_TYPES, *HALF_FIELDS], ids=lambda t: t.name)
def test_rows_as_floats(ggml_type: Ggml) -> None:
    """Up to one rounding, which types with minima have between product and sum."""
    stored = random_stored(ggml_type, 5, 768)
    right = meaning(ggml_type, stored)
    np.testing.assert_allclose(native.unpack(ggml_type, stored, 768), right, rtol=1e-6, atol=1e-6 * np.abs(right).max())
    with pytest.raises(ValueError, match="bytes a row"):
        native.unpack(ggml_type, stored, 512)


# Packing


@pytest.mark.parametrize("ggml_type", EXACT, ids=lambda t: t.name)
@given(rows=st.integers(1, 40), blocks=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_types_whose_codes_fit_are_packed_exactly(ggml_type: Ggml, rows: int, blocks: int, seed: int) -> None:
    cols = blocks * BLOCK
    stored = random_stored(ggml_type, rows, cols, seed)
    values = unpack(native.Packer().pack(ggml_type, stored, cols), native.packed_format(ggml_type), rows, cols)
    np.testing.assert_array_equal(values[:rows].astype(np.float32), meaning(ggml_type, stored))
    assert not values[rows:].any()


@pytest.mark.parametrize("ggml_type", sorted(HALF_FIELDS), ids=lambda t: t.name)
def test_every_type_means_what_gguf_says(ggml_type: Ggml) -> None:
    stored = random_stored(ggml_type, 11, 768)
    values = unpack(native.Packer().pack(ggml_type, stored, 768, "f32"), "f32", 11, 768)[:11]
    np.testing.assert_allclose(values, meaning(ggml_type, stored), rtol=0, atol=1e-6 * np.abs(values).max())


def test_q4_k_keeps_its_codes_and_rounds_scales_to_halves() -> None:
    stored = random_stored(Ggml.Q4_K, 19, 1024)
    blocks = stored.reshape(-1, 144)
    scales, mins = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16])
    factors = np.abs(blocks[:, :4].copy().view("<f2").astype(np.float64))
    bound = (15 * factors[:, :1] * scales + factors[:, 1:] * mins) * 2.0**-11 + 8 * TINY
    values = unpack(native.Packer().pack(Ggml.Q4_K, stored, 1024), "w4", 19, 1024)[:19]
    assert (
        np.abs(values - meaning(Ggml.Q4_K, stored)) <= 1.001 * np.repeat(bound, BLOCK, axis=1).reshape(19, 1024)
    ).all()


@pytest.mark.parametrize("ggml_type", [Ggml.Q5_1, Ggml.Q2_K, Ggml.Q3_K, Ggml.Q5_K, Ggml.Q6_K], ids=lambda t: t.name)
def test_other_types_are_requantized_within_half_a_step(ggml_type: Ggml) -> None:
    stored = random_stored(ggml_type, 19, 1024)
    exact = meaning(ggml_type, stored).astype(np.float64)
    assert native.packed_format(ggml_type) == "w8"
    values = unpack(native.Packer().pack(ggml_type, stored, 1024), "w8", 19, 1024)[:19]
    assert (np.abs(values - exact) <= largest(exact) / 254 * (1 + 2.0**-9) + TINY).all()


@pytest.mark.parametrize("ggml_type", FLOAT_TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("panel_format", ["f16", "w8", "w6", "w4"])
def test_floats_are_quantized_on_request(ggml_type: Ggml, panel_format: str) -> None:
    stored = random_stored(ggml_type, 21, 128)
    exact = meaning(ggml_type, stored).astype(np.float64)
    values = unpack(native.Packer().pack(ggml_type, stored, 128, panel_format), panel_format, 21, 128)[:21]
    span = per_block(exact, np.max) + per_block(-exact, np.max)
    bounds = {
        "f16": np.abs(exact) * 2.0**-11 + TINY,
        "w8": largest(exact) / 254 * (1 + 2.0**-9) + TINY,
        "w6": span / 126 + largest(exact) * 2.0**-10 + TINY,
        "w4": span / 30 + largest(exact) * 2.0**-10 + TINY,
    }
    assert (np.abs(values - exact) <= bounds[panel_format]).all()


def test_halves_round_to_nearest_even_as_numpy_does() -> None:
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[:-1] + halves[1:]) / 2
    values = np.concatenate(
        [halves, middles, np.nextafter(middles, 9e9), np.nextafter(middles, 0), [65519, 65520, 1e9]]
    )
    values = np.concatenate([values, -values]).astype(np.float32)
    packed = native.Packer().pack(Ggml.F32, values.view(np.uint8).reshape(1, -1), len(values), "f16")
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    np.testing.assert_array_equal(
        packed.view(np.float16).reshape(-1, 8)[:, 0].view(np.uint16), expected.view(np.uint16)
    )


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-30, 1e-7, -2e-5])
@pytest.mark.parametrize("panel_format", INTEGERS)
def test_blocks_of_one_value_are_quantized(value: float, panel_format: str) -> None:
    weights = np.full((1, BLOCK), value, np.float32)
    values = unpack(
        native.Packer().pack(Ggml.F32, weights.view(np.uint8), BLOCK, panel_format), panel_format, 1, BLOCK
    )[:1]
    assert (np.abs(values - weights) <= abs(value) * 2.0**-8 + TINY).all()


@pytest.mark.parametrize("ggml_type", [Ggml.Q4_1, Ggml.Q6_K, Ggml.F32], ids=lambda t: t.name)
def test_alignment_and_threads_do_not_matter(ggml_type: Ggml) -> None:
    stored = random_stored(ggml_type, 37, 512)
    shifted = np.frombuffer(b"\xff" + stored.tobytes(), np.uint8)[1:].reshape(stored.shape)
    assert shifted.ctypes.data % 2 == 1
    expected = native.Packer().pack(ggml_type, stored, 512)
    for threads in (1, 2, 3):
        np.testing.assert_array_equal(native.Packer(threads).pack(ggml_type, shifted, 512), expected)


def test_matrices_of_one_packer_lie_together_and_outlive_it() -> None:
    stored = [random_stored(Ggml.Q4_1, rows, 64) for rows in (8, 37, 1, 64)]
    packer = native.Packer(2)
    panels = [packer.pack(Ggml.Q4_1, blocks, 64) for blocks in stored]
    places = [array.ctypes.data for array in panels]
    del packer
    dropped = panels.pop(0)
    del dropped
    for blocks, array in zip(stored[1:], panels, strict=True):
        np.testing.assert_array_equal(array, native.Packer().pack(Ggml.Q4_1, blocks, 64))
    assert [place % 64 for place in places] == [0] * 4
    assert places == sorted(places)
    assert places[-1] - places[0] < 1 << 20


def test_wrong_shapes_are_refused() -> None:
    stored = random_stored(Ggml.Q4_1, 8, 64)
    packed = native.Packer().pack(Ggml.Q4_1, stored, 64)
    x = np.zeros((1, 64), np.float32)
    with pytest.raises(ValueError, match="bytes a row"):
        native.Packer().pack(Ggml.Q4_1, stored, 96)
    with pytest.raises(ValueError, match="whole blocks"):
        native.Packer().pack(Ggml.F32, np.zeros((1, 160), np.uint8), 40, "w8")
    with pytest.raises(ValueError, match="cannot be packed"):
        native.Packer().pack(99, stored, 64)
    with pytest.raises(ValueError, match="number of bytes"):
        native.matmul(packed, "w4", 9, 64, x, 1, "portable")
    with pytest.raises(ValueError, match="number of columns"):
        native.matmul(packed, "w4", 8, 64, x[:, :32].copy(), 1, "portable")
    with pytest.raises(ValueError, match="variant"):
        native.matmul(packed, "w4", 8, 64, x, 1, "quantum")


# Activations


@pytest.mark.parametrize("variant", VARIANTS)
@given(tokens=st.integers(1, 9), blocks=st.integers(1, 5), exponent=st.integers(-40, 40), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_activations_are_rounded_by_their_block(
    variant: str, tokens: int, blocks: int, exponent: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((tokens, blocks * BLOCK)) * 2.0**exponent).astype(np.float32)
    x[rng.random(x.shape) < 0.2] = 0
    codes, scales, sums = native.quantize_activations(x, variant)
    grouped = x.reshape(tokens, blocks, BLOCK)
    peak = np.abs(grouped).max(-1)
    np.testing.assert_array_equal(scales, peak / np.float32(127))
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    np.testing.assert_array_equal(codes.reshape(grouped.shape), np.rint(grouped * inverse[..., None]))
    totals = codes.reshape(grouped.shape).astype(np.int32).sum(-1)
    np.testing.assert_array_equal(sums, scales * totals.astype(np.float32))


@pytest.mark.parametrize("variant", VARIANTS)
def test_halfway_activations_round_to_even(variant: str) -> None:
    x = np.arange(-15.5, 16.5, dtype=np.float32)[None]
    x[0, 0] = 127  # the scale is then 1
    codes, _, _ = native.quantize_activations(x, variant)
    np.testing.assert_array_equal(codes, np.rint(x))


@pytest.mark.parametrize("variant", VARIANTS)
def test_vanishing_blocks_are_zero(variant: str) -> None:
    x = np.zeros((1, 64), np.float32)
    x[0, 40] = 1e-38
    codes, scales, sums = native.quantize_activations(x, variant)
    assert not codes.any()
    assert not scales.any()
    assert not sums.any()


# Products


@dataclass(frozen=True)
class Case:
    panel_format: str
    rows: int
    cols: int
    packed: Array
    weights: Array
    """float64 (rows, cols): what the panels mean."""
    x: Array


def make_case(panel_format: str, rows: int, cols: int, tokens: int, seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((rows, cols), np.float32)
    packed = native.Packer().pack(Ggml.F32, weights.view(np.uint8).reshape(rows, -1), cols, panel_format)
    x = rng.standard_normal((tokens, cols), np.float32)
    return Case(panel_format, rows, cols, packed, unpack(packed, panel_format, rows, cols)[:rows], x)


def multiply(case: Case, variant: str, x: Array | None = None, threads: int = 1, **extra: Any) -> Array:
    x = case.x if x is None else x
    return np.asarray(native.matmul(case.packed, case.panel_format, case.rows, case.cols, x, threads, variant, **extra))


def seen_activations(case: Case, variant: str) -> Array:
    """float64 (T, C): what the kernel multiplies with: the rounded codes for the integer formats."""
    if case.panel_format in ("f32", "f16"):
        return case.x.astype(np.float64)
    codes, scales, _ = native.quantize_activations(case.x, variant)
    return codes * np.repeat(scales.astype(np.float64), BLOCK, axis=-1)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    panel_format = draw(st.sampled_from(FORMATS))
    block_cols = st.integers(1, 12).map(lambda n: n * BLOCK)
    cols = draw(block_cols if panel_format in INTEGERS else st.integers(1, 200))
    return make_case(panel_format, draw(st.integers(1, 40)), cols, draw(st.integers(1, 130)), draw(st.integers(0, 99)))


@pytest.mark.parametrize("variant", VARIANTS)
@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_product_equals_float64(variant: str, case: Case) -> None:
    x = seen_activations(case, variant)
    terms = np.abs(x) @ np.abs(case.weights).T
    y = multiply(case, variant, threads=2)
    assert (np.abs(y - x @ case.weights.T) <= 1e-6 * terms).all()


@pytest.mark.parametrize("panel_format", FORMATS)
@given(rows=st.integers(1, 40), blocks=st.integers(1, 6), tokens=st.integers(1, 30), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_vector_variants_and_tile_shapes_agree_to_the_bit(
    panel_format: str, rows: int, blocks: int, tokens: int, seed: int
) -> None:
    case = make_case(panel_format, rows, blocks * BLOCK, tokens, seed)
    found = [multiply(case, variant) for variant in VARIANTS[1:]]
    for y in found:
        np.testing.assert_array_equal(y, found[0])
        np.testing.assert_array_equal(y[-1:], multiply(case, VARIANTS[1], case.x[-1:]))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("panel_format", INTEGERS)
def test_rounded_activations_cost_little(variant: str, panel_format: str) -> None:
    case = make_case(panel_format, 64, 576, 16)
    expected = case.x.astype(np.float64) @ case.weights.T
    error = np.linalg.norm(multiply(case, variant) - expected) / np.linalg.norm(expected)
    assert error < 0.01  # int8 in blocks of 32 normal values: about 0.0056


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6, 7, 9])
def test_extreme_codes_never_saturate(variant: str, tokens: int) -> None:
    """All scales are 1, so the product is an integer and exact. Q8_0 blocks may hold -128."""
    signs = np.where(np.random.default_rng(0).random((tokens, 64)) < 0.5, -1, 1)
    x = np.concatenate([np.full((tokens, 64), 127), np.full((tokens, 64), -127), 127 * signs], axis=1).astype(
        np.float32
    )
    one = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    for ggml_type, code, value in ((Ggml.Q8_0, 0x80, -128), (Ggml.Q8_0, 0x7F, 127), (Ggml.Q4_1, 0xFF, 15)):
        zero_min = [np.zeros(2, np.uint8)] if ggml_type == Ggml.Q4_1 else []
        block = np.concatenate([one, *zero_min, np.full(16 if zero_min else 32, code, np.uint8)])
        stored = np.tile(block, (9, 6))
        packed = native.Packer().pack(ggml_type, stored, 192)
        y = native.matmul(packed, native.packed_format(ggml_type), 9, 192, x, 1, variant)
        np.testing.assert_array_equal(y, np.repeat(x.sum(1, keepdims=True) * value, 9, axis=1))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6, 7, 9])
def test_the_largest_codes_of_w6_never_saturate(variant: str, tokens: int) -> None:
    """A zero beside them makes the scale 1: codes 63, and the product is an integer and exact."""
    signs = np.where(np.random.default_rng(0).random((tokens, 64)) < 0.5, -1, 1)
    x = np.concatenate([np.full((tokens, 64), 127), np.full((tokens, 64), -127), 127 * signs], axis=1)
    weights = np.full((9, 192), 63, np.float32)
    weights[:, ::BLOCK] = 0
    packed = native.Packer().pack(Ggml.F32, weights.view(np.uint8), 192, "w6")
    assert packed.reshape(-1, 288)[:, 32:].max() == 63
    y = native.matmul(packed, "w6", 9, 192, x.astype(np.float32), 1, variant)
    np.testing.assert_array_equal(y, x @ weights.T.astype(np.int64))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("panel_format", FORMATS)
def test_a_pool_of_threads_changes_no_bit(variant: str, panel_format: str) -> None:
    case = make_case(panel_format, 70, 64, 37)
    pool = native.Pool(3)
    alone = multiply(case, variant)
    for _ in range(3):
        np.testing.assert_array_equal(multiply(case, variant, pool=pool), alone)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("panel_format", FORMATS)
@pytest.mark.parametrize(("rows", "cols", "tokens"), [(37, 64, 23), (24, 3072, 130)])
def test_a_token_is_the_same_to_the_bit_in_any_company(
    variant: str, panel_format: str, rows: int, cols: int, tokens: int
) -> None:
    case = make_case(panel_format, rows, cols, tokens)
    together = multiply(case, variant)
    for threads in (2, 3):
        np.testing.assert_array_equal(multiply(case, variant, threads=threads), together)
    for token in range(0, tokens, 1 if tokens < 50 else 13):
        np.testing.assert_array_equal(multiply(case, variant, case.x[token : token + 1]), together[token : token + 1])
    for count in range(2, 15):
        np.testing.assert_array_equal(multiply(case, variant, case.x[3 : 3 + count]), together[3 : 3 + count])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("panel_format", FORMATS)
def test_bias_is_added_first_and_then_what_was_there(variant: str, panel_format: str) -> None:
    case = make_case(panel_format, 21, 96, 7)
    rng = np.random.default_rng(5)
    bias, before = rng.standard_normal(21, np.float32), rng.standard_normal((7, 21), np.float32)
    plain = multiply(case, variant)
    np.testing.assert_array_equal(multiply(case, variant, bias=bias), plain + bias)
    np.testing.assert_array_equal(multiply(case, variant, add_to=before), before + plain)
    np.testing.assert_array_equal(multiply(case, variant, bias=bias, add_to=before), before + (plain + bias))


@pytest.mark.skipif("avx2" not in VARIANTS, reason="this processor has no AVX2")
@given(case=cases())
@settings(max_examples=30, deadline=None)
def test_variants_agree(case: Case) -> None:
    for plain, fast in (
        zip(*(native.quantize_activations(case.x, v) for v in ("portable", "avx2")), strict=True)
        if (case.cols % BLOCK == 0)
        else ()
    ):
        np.testing.assert_array_equal(plain, fast)
    terms = np.abs(case.x).astype(np.float64) @ np.abs(case.weights).T
    assert (np.abs(multiply(case, "portable") - multiply(case, "avx2")) <= 2e-6 * terms + 1e-30).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_zero_activations_give_the_bias(variant: str) -> None:
    bias = np.arange(10, dtype=np.float32)
    for panel_format in FORMATS:
        case = make_case(panel_format, 10, 64, 3)
        np.testing.assert_array_equal(multiply(case, variant, np.zeros_like(case.x), bias=bias), np.tile(bias, (3, 1)))


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_packed_in_the_background_is_there_when_it_has_finished(threads: int) -> None:
    matrices = [(t, random_stored(t, rows, 512)) for t in (Ggml.Q4_1, Ggml.Q8_0, Ggml.F16) for rows in (1, 37, 4096)]
    packer = native.Packer(threads)
    for _ in range(2):  # it goes on after a finish
        panels = [packer.start(ggml_type, stored.copy(), 512) for ggml_type, stored in matrices]
        packer.finish()
        for (ggml_type, stored), array in zip(matrices, panels, strict=True):
            values = unpack(array, native.packed_format(ggml_type), len(stored), 512)[: len(stored)]
            np.testing.assert_array_equal(values.astype(np.float32), meaning(ggml_type, stored))


def test_a_packer_may_go_before_it_has_finished() -> None:
    packer, stored = native.Packer(2), random_stored(Ggml.Q4_1, 4096, 2048)
    panels = [packer.start(Ggml.Q4_1, stored, 2048) for _ in range(20)]
    del packer
    assert len(panels) == 20
    native.Packer(2).finish()  # nothing to wait for
