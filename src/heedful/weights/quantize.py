"""The number formats that weights are stored in, and their conversion to float32; that of some of them back.

Owns: how many weights and bytes a block of each format has, and what its bytes mean. Layouts are those of ggml
(ggml-common.h, block_q4_0 and so on): little endian, scales as float16, codes packed several to a byte.
Knows nothing of files, tensor names or models.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class BlockFormat:
    """A format stores `block_len` consecutive weights of a row in `block_bytes` bytes."""

    name: str
    ggml_type: int | None
    """The number that GGUF files know it by; None: does not occur in GGUF."""
    block_len: int
    block_bytes: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` weights, which must be whole blocks."""
        assert columns % self.block_len == 0, (self.name, columns, self.block_len)
        return columns // self.block_len * self.block_bytes


FORMATS = {
    f.name: f
    for f in (
        BlockFormat("F32", 0, 1, 4),
        BlockFormat("F16", 1, 1, 2),
        BlockFormat("Q4_0", 2, 32, 18),
        BlockFormat("Q4_1", 3, 32, 20),
        BlockFormat("Q5_0", 6, 32, 22),
        BlockFormat("Q5_1", 7, 32, 24),
        BlockFormat("Q8_0", 8, 32, 34),
        BlockFormat("Q2_K", 10, 256, 84),
        BlockFormat("Q3_K", 11, 256, 110),
        BlockFormat("Q4_K", 12, 256, 144),
        BlockFormat("Q5_K", 13, 256, 176),
        BlockFormat("Q6_K", 14, 256, 210),
        BlockFormat("IQ4_NL", 20, 32, 18),
        BlockFormat("I8", 24, 1, 1),
        BlockFormat("I16", 25, 1, 2),
        BlockFormat("I32", 26, 1, 4),
        BlockFormat("I64", 27, 1, 8),
        BlockFormat("F64", 28, 1, 8),
        BlockFormat("BF16", 30, 1, 2),
        BlockFormat("BOOL", None, 1, 1),
        BlockFormat("U8", None, 1, 1),
        BlockFormat("U16", None, 1, 2),
        BlockFormat("U32", None, 1, 4),
        BlockFormat("U64", None, 1, 8),
    )
}
FORMAT_BY_GGML_TYPE = {f.ggml_type: f for f in FORMATS.values() if f.ggml_type is not None}

TILE_WEIGHTS = 1 << 17
"""Weights converted at a time: 512 KiB of float32, so that several passes over a tile stay in the L2 cache."""

IQ4_NL_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)  # fmt: skip


def dequantize(format_name: str, blocks: Bytes, out: Floats | None = None) -> Floats:
    """float32 values of stored rows: `blocks` (rows, row_bytes) → (rows, columns), in `out` if given.

    `out` must be C-contiguous float32 of that shape. Temporaries are a few MB at most, whatever the size. Results equal
    ggml's to the bit; scales that are infinite or NaN give weights that are, and integers above 2^24 are rounded.
    """
    stored = FORMATS[format_name]
    rows, row_bytes = blocks.shape
    assert row_bytes % stored.block_bytes == 0, (format_name, blocks.shape)
    blocks_per_row = row_bytes // stored.block_bytes
    shape = (rows, blocks_per_row * stored.block_len)
    if out is None:
        out = np.empty(shape, np.float32)
    assert out.shape == shape, (out.shape, shape)
    assert out.dtype == np.float32, out.dtype
    assert out.flags.c_contiguous, out.strides
    if out.size == 0:
        return out
    tile_rows = max(1, TILE_WEIGHTS // shape[1])
    with np.errstate(all="ignore"):  # odd values are the file's business
        for row in range(0, rows, tile_rows):
            # A copy only where rows do not lie side by side in memory.
            tile = np.ascontiguousarray(blocks[row : row + tile_rows]).reshape(-1, stored.block_bytes)
            _decode(stored, tile, out[row : row + tile_rows].reshape(-1, stored.block_len))
    return out


def _decode(stored: BlockFormat, blocks: Bytes, out: Floats) -> None:
    """`blocks` (n, block_bytes) → `out` (n, block_len), both contiguous."""
    decode = _DECODERS[stored.name]
    tile_blocks = TILE_WEIGHTS // stored.block_len
    for first in range(0, len(blocks), tile_blocks):  # more than one pass only where a single row exceeds a tile
        decode(blocks[first : first + tile_blocks], out[first : first + tile_blocks])


# Parts of blocks. n: blocks; every function takes all n at once.


def _half(blocks: Bytes, at: int) -> Floats:
    """(n, 1): the float16 at byte `at` of each block."""
    return blocks[:, at : at + 2].view("<f2").astype(np.float32)


def _fields(packed: Bytes, run: int, bits: int) -> Bytes:
    """Codes of `bits` bits, (n, bytes) → (n, bytes · 8 / bits).

    Each `run` of bytes holds `run` codes in its lowest bits, then the next `run` codes in the bits above, and so on.
    """
    n = len(packed)
    runs = packed.reshape(n, -1, run)
    codes = np.empty((n, runs.shape[1], 8 // bits, run), np.uint8)
    for field in range(8 // bits):
        np.right_shift(runs, field * bits, out=codes[:, :, field])
    codes &= np.uint8((1 << bits) - 1)
    return codes.reshape(n, -1)


def _five_bits(low: Bytes, high: Bytes) -> Bytes:
    """(n, 32): 16 bytes of low nibbles and 4 bytes whose bit i is the fifth bit of code i."""
    codes = _fields(low, 16, 4)
    codes |= np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4)
    return codes


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """Eight 6-bit scales and eight 6-bit minima, (n, 12) → two of (n, 8): the first four of each in six low bits, the
    others as a nibble of the last four bytes and the two bits that the first eight have left."""
    scale, minimum, nibbles = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.hstack((scale & 63, (nibbles & 15) | (scale >> 2 & 48)))
    minima = np.hstack((minimum & 63, (nibbles >> 4) | (minimum >> 2 & 48)))
    return scales.astype(np.float32), minima.astype(np.float32)


def _scale(codes: Bytes, zero: int, scale: Floats, out: Floats) -> Floats:
    """`out` = (code - zero) · scale; `scale` (n, s) has a number for each 1/s of a block. Returns `out` (n, s, -1)."""
    out[...] = codes
    if zero:
        out -= zero  # exact: small integers
    parts = out.reshape(*scale.shape, -1)
    parts *= scale[:, :, None]
    return parts


# Formats. b: blocks (n, block_bytes), out: (n, block_len); d: scale, m: minimum.


def _plain(dtype: str) -> Callable[[Bytes, Floats], None]:
    def decode(b: Bytes, out: Floats) -> None:
        out[...] = b.view(dtype)

    return decode


def _bool(b: Bytes, out: Floats) -> None:
    out[...] = b != 0


def _bf16(b: Bytes, out: Floats) -> None:
    bits = out.view(np.uint32)
    bits[...] = b.view("<u2")
    bits <<= np.uint32(16)


def _q8_0(b: Bytes, out: Floats) -> None:
    out[...] = b[:, 2:].view(np.int8)
    out *= _half(b, 0)


def _q4_0(b: Bytes, out: Floats) -> None:
    _scale(_fields(b[:, 2:], 16, 4), 8, _half(b, 0), out)


def _q4_1(b: Bytes, out: Floats) -> None:
    _scale(_fields(b[:, 4:], 16, 4), 0, _half(b, 0), out)
    out += _half(b, 2)


def _q5_0(b: Bytes, out: Floats) -> None:
    _scale(_five_bits(b[:, 6:], b[:, 2:6]), 16, _half(b, 0), out)


def _q5_1(b: Bytes, out: Floats) -> None:
    _scale(_five_bits(b[:, 8:], b[:, 4:8]), 0, _half(b, 0), out)
    out += _half(b, 2)


def _q2_k(b: Bytes, out: Floats) -> None:
    scales, codes = b[:, :16], _fields(b[:, 16:80], 32, 2)
    d, m = _half(b, 80) * (scales & 15), _half(b, 82) * (scales >> 4)
    parts = _scale(codes, 0, d, out)
    parts -= m[:, :, None]


def _q3_k(b: Bytes, out: Floats) -> None:
    codes = _fields(b[:, 32:96], 32, 2)
    codes |= _fields(b[:, :32], 32, 1) << np.uint8(2)
    scales = _fields(b[:, 96:104], 8, 4) | _fields(b[:, 104:108], 4, 2) << np.uint8(4)
    _scale(codes, 4, _half(b, 108) * (scales.astype(np.float32) - 32), out)


def _q4_k(b: Bytes, out: Floats) -> None:
    scales, minima = _k_scales(b[:, 4:16])
    parts = _scale(_fields(b[:, 16:], 32, 4), 0, _half(b, 0) * scales, out)
    parts -= (_half(b, 2) * minima)[:, :, None]


def _q5_k(b: Bytes, out: Floats) -> None:
    scales, minima = _k_scales(b[:, 4:16])
    codes = _fields(b[:, 48:], 32, 4)
    codes |= _fields(b[:, 16:48], 32, 1) << np.uint8(4)
    parts = _scale(codes, 0, _half(b, 0) * scales, out)
    parts -= (_half(b, 2) * minima)[:, :, None]


def _q6_k(b: Bytes, out: Floats) -> None:
    codes = _fields(b[:, :128], 64, 4)
    codes |= _fields(b[:, 128:192], 32, 2) << np.uint8(4)
    _scale(codes, 32, _half(b, 208) * b[:, 192:208].view(np.int8), out)


def _iq4_nl(b: Bytes, out: Floats) -> None:
    np.take(IQ4_NL_VALUES, _fields(b[:, 2:], 16, 4), out=out, mode="clip")  # "clip": without a buffer
    out *= _half(b, 0)


_DECODERS: dict[str, Callable[[Bytes, Floats], None]] = {
    **{name: _plain(dtype) for name, dtype in (("F64", "<f8"), ("F32", "<f4"), ("F16", "<f2"))},
    **{f"I{8 * size}": _plain(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": _plain(f"<u{size}") for size in (1, 2, 4, 8)},
    "BOOL": _bool,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
}


def quantize(format_name: str, values: Floats) -> Bytes:
    """Stored rows of float32 ones, (rows, columns) → (rows, row_bytes), in a format of ENCODED. Rows are whole blocks.

    Equals ggml's reference quantizers to the bit (ggml-quants.c, quantize_row_q8_0_ref). Weights beyond float16's range
    become infinite in F16.
    """
    stored = FORMATS[format_name]
    rows, columns = values.shape
    assert values.dtype == np.float32, values.dtype
    out = np.empty((rows, stored.row_bytes(columns)), np.uint8)
    if out.size == 0:
        return out
    tile_rows = max(1, TILE_WEIGHTS // columns)
    with np.errstate(all="ignore"):
        for row in range(0, rows, tile_rows):
            tile = np.ascontiguousarray(values[row : row + tile_rows]).reshape(-1, stored.block_len)
            out[row : row + tile_rows] = _ENCODERS[format_name](tile).reshape(-1, out.shape[1])
    return out


def _to_bf16(x: Floats) -> Bytes:
    bits = x.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16  # to the nearest, on a tie to the even one
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, bits >> 16 | 64, rounded).astype("<u2").view(np.uint8)


def _to_q8_0(x: Floats) -> Bytes:
    """(n, 32) → (n, 34)."""
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = x * np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    codes = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))  # C's roundf: half away from zero
    return np.hstack((scale.astype("<f2").view(np.uint8), codes.astype(np.int8).view(np.uint8)))


_ENCODERS: dict[str, Callable[[Floats], Bytes]] = {
    "F32": lambda x: x.astype("<f4").view(np.uint8),
    "F16": lambda x: x.astype("<f2").view(np.uint8),
    "BF16": _to_bf16,
    "Q8_0": _to_q8_0,
}
ENCODED = tuple(_ENCODERS)
