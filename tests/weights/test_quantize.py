"""Every block format against the `gguf` package, to the bit, and the bounds on memory that the module promises."""

import tracemalloc

import gguf
import numpy as np
import pytest

from heedful.weights.gguf_file import read_gguf
from heedful.weights.quantize import ENCODED, FORMAT_BY_GGML_TYPE, FORMATS, TILE_WEIGHTS, dequantize, quantize

HALF_OFFSETS = {  # where a block has its float16 scale, and minimum
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
INTEGERS = {f"{sign}{8 * size}": f"<{sign.lower()}{size}" for sign in "IU" for size in (1, 2, 4, 8)}


def judge(format_name: str, blocks: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(np.ascontiguousarray(blocks), gguf.GGMLQuantizationType[format_name])


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), np.ascontiguousarray(b).view(np.uint32))


def random_blocks(format_name: str, rows: int, blocks_per_row: int, seed: int = 0) -> np.ndarray:
    """Random codes; scales are random float16 numbers of all sizes and signs, subnormal ones too, but finite."""
    rng = np.random.default_rng(seed)
    stored = FORMATS[format_name]
    blocks = rng.integers(0, 256, (rows * blocks_per_row, stored.block_bytes), dtype=np.uint8)
    for at in HALF_OFFSETS[format_name]:
        blocks[:, at + 1] = blocks[:, at + 1] & 0x83 | rng.integers(0, 31, len(blocks), dtype=np.uint8) << 2
    return blocks.reshape(rows, -1)


def test_block_sizes_are_those_of_ggml():
    for number, stored in FORMAT_BY_GGML_TYPE.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert (stored.name, (stored.block_len, stored.block_bytes)) == (theirs.name, gguf.GGML_QUANT_SIZES[theirs])
    wanted = "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL"
    assert set(wanted.split()) <= {f.name for f in FORMAT_BY_GGML_TYPE.values()}


def test_row_bytes():
    assert FORMATS["Q4_1"].row_bytes(576) == 360
    assert FORMATS["Q6_K"].row_bytes(512) == 420
    with pytest.raises(AssertionError, match="33"):
        FORMATS["Q8_0"].row_bytes(33)


@pytest.mark.parametrize("format_name", HALF_OFFSETS)
def test_random_blocks(format_name):
    blocks = random_blocks(format_name, rows=67, blocks_per_row=3)
    values = dequantize(format_name, blocks)
    assert np.isfinite(values).all()
    assert np.unique(values).size > 1000
    assert same_bits(values, judge(format_name, blocks))


@pytest.mark.parametrize("format_name", HALF_OFFSETS)
@pytest.mark.parametrize("scale", [0.0, -0.0, 1.0, -1.5, 65504.0, -65504.0, 2**-24, -(2**-24), 6e-5])
def test_extreme_scales_and_codes(format_name, scale):
    stored = FORMATS[format_name]
    codes = np.array([0x00, 0xFF, 0x0F, 0xF0, 0x80, 0x7F, 0x55, 0xAA], np.uint8)
    blocks = np.repeat(codes[:, None], stored.block_bytes, axis=1)
    for at in HALF_OFFSETS[format_name]:
        blocks[:, at : at + 2] = np.array([scale], "<f2").view(np.uint8)
    assert same_bits(dequantize(format_name, blocks), judge(format_name, blocks))


@pytest.mark.parametrize("format_name", HALF_OFFSETS)
def test_all_zero_blocks_are_zero(format_name):
    zeros = np.zeros((2, FORMATS[format_name].block_bytes), np.uint8)
    assert not dequantize(format_name, zeros).any()


def test_one_q4_1_block_by_hand():
    """0.5 · code + 3: the low nibbles are weights 0 to 15, the high ones 16 to 31."""
    low, high = np.arange(16, dtype=np.uint8), np.arange(16, dtype=np.uint8)[::-1]
    block = np.concatenate((np.array([0.5, 3], "<f2").view(np.uint8), low | high << 4))[None]
    expected = 0.5 * np.concatenate((low, high)).astype(np.float32) + 3
    assert dequantize("Q4_1", block)[0].tolist() == expected.tolist()


def test_scales_that_are_not_finite_pass_without_a_warning():
    """pytest turns warnings into errors here."""
    blocks = random_blocks("Q4_1", 1, 2)
    blocks[0, 0:2] = np.array([np.inf], "<f2").view(np.uint8)
    blocks[0, 20:22] = np.array([np.nan], "<f2").view(np.uint8)
    assert not np.isfinite(dequantize("Q4_1", blocks)).any()


@pytest.mark.parametrize("format_name", FLOATS)
def test_floats(format_name):
    bits = np.random.default_rng(0).integers(0, 256, (5, 64), dtype=np.uint8)
    stored = bits.view(FLOATS[format_name])
    with np.errstate(all="ignore"):
        expected = stored.astype(np.float32)
    np.testing.assert_array_equal(dequantize(format_name, bits), expected)


def test_bf16_is_the_upper_half_of_f32():
    bits = np.arange(1 << 16, dtype="<u2").reshape(4, -1)
    assert same_bits(dequantize("BF16", bits.view(np.uint8)), judge("BF16", bits.view(np.uint8)))
    numbers = np.array([[1.0, -2.5, 3.140625]], np.float32)
    assert dequantize("BF16", (numbers.view(np.uint32) >> 16).astype("<u2").view(np.uint8)).tolist() == numbers.tolist()


@pytest.mark.parametrize("format_name", INTEGERS)
def test_integers(format_name):
    info = np.iinfo(INTEGERS[format_name])
    stored = np.array([[info.min, info.max, 0, 1, 100]], INTEGERS[format_name])
    assert dequantize(format_name, stored.view(np.uint8)).tolist() == stored.astype(np.float32).tolist()


def test_bool():
    assert dequantize("BOOL", np.array([[0, 1, 255]], np.uint8)).tolist() == [[0, 1, 1]]


@pytest.mark.parametrize("format_name", ["Q4_1", "Q6_K", "F16"])
def test_rows_of_any_length_meet_at_the_tile_borders(format_name):
    stored = FORMATS[format_name]
    num_blocks = 3 * TILE_WEIGHTS // stored.block_len + 6  # three whole tiles and a bit
    codes = np.random.default_rng(1).integers(0, 60, (num_blocks, stored.block_bytes), dtype=np.uint8)
    expected = judge(format_name, codes).reshape(-1)
    for rows in (1, 2, 3, 6, num_blocks):
        if num_blocks % rows == 0:
            assert np.array_equal(dequantize(format_name, codes.reshape(rows, -1)).reshape(-1), expected)


def test_rows_that_do_not_lie_side_by_side():
    blocks = random_blocks("Q4_K", 300, 4)
    for view in (blocks[::2], blocks[::-1], blocks[:, 144:432], np.asfortranarray(blocks)):
        assert same_bits(dequantize("Q4_K", view), judge("Q4_K", view))


def test_blocks_at_an_odd_address():
    blocks = random_blocks("Q5_1", 4, 2)
    shifted = np.empty(blocks.size + 1, np.uint8)[1:].reshape(blocks.shape)
    shifted[...] = blocks
    assert same_bits(dequantize("Q5_1", shifted), judge("Q5_1", blocks))


def test_out_is_filled_and_returned():
    blocks = random_blocks("Q8_0", 5, 2)
    whole = np.full((9, 64), 7, np.float32)
    returned = dequantize("Q8_0", blocks, whole[2:7])
    assert np.shares_memory(returned, whole)
    assert same_bits(whole[2:7], judge("Q8_0", blocks))
    assert (whole[:2] == 7).all()
    assert (whole[7:] == 7).all()


@pytest.mark.parametrize("out", [np.empty((5, 32), np.float32), np.empty((5, 64)), np.empty((64, 5), np.float32).T])
def test_an_out_that_does_not_fit_is_refused(out):
    with pytest.raises(AssertionError):
        dequantize("Q8_0", random_blocks("Q8_0", 5, 2), out)


@pytest.mark.parametrize("format_name", [*HALF_OFFSETS, "F16", "BF16"])
def test_temporaries_stay_small_whatever_the_tensor(format_name):
    """2^22 weights, 16 MB as float32, in one row and in many, in two layouts: never above 4 MB beside the result."""
    stored = FORMATS[format_name]
    blocks = np.zeros((1 << 22) // stored.block_len * stored.block_bytes, np.uint8)
    for rows, step in ((1, 1), (1 << 11, 1), (1 << 11, 2)):
        view = blocks.reshape(rows, -1)[::step]
        out = np.empty((len(view), (1 << 22) // rows), np.float32)
        tracemalloc.start()
        dequantize(format_name, view, out)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 << 20, (rows, step, peak)


@pytest.mark.parametrize("model", ["smollm2_path", "gemma_path"])
def test_tensors_of_a_real_model(model, request):
    """The smallest and the largest tensor of each format; of the largest, rows from the beginning and the end."""
    tensors = read_gguf(request.getfixturevalue(model)).tensors.values()
    seen = {tensor.format_name for tensor in tensors}
    assert seen == ({"F32", "Q4_1", "Q8_0"} if model == "smollm2_path" else {"F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"})
    for format_name in seen:
        by_size = sorted((t for t in tensors if t.format_name == format_name), key=lambda t: t.num_bytes)
        for blocks in (by_size[0].blocks[:1000], by_size[-1].blocks[:1000], by_size[-1].blocks[-1000:]):
            assert same_bits(dequantize(format_name, blocks), judge(format_name, blocks))


@pytest.mark.parametrize("name", ENCODED)
def test_stored_rows_equal_those_of_the_gguf_package(name: str) -> None:
    draw = np.random.default_rng(3)
    values = (draw.normal(size=(300, 512)) * 10.0 ** draw.integers(-6, 4, (300, 512))).astype(np.float32)
    values[0] = 0
    values[1, :32] = np.arange(32) / 2  # halves: rounded away from zero
    values[1, 32:64] = -np.arange(32) * 127 / 62
    found = quantize(name, values)
    wanted = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
    assert np.array_equal(found, wanted.view(np.uint8).reshape(found.shape))
    assert quantize(name, values[:0]).shape == (0, found.shape[1])
