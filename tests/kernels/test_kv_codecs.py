"""Rows of keys and values in few bits, their rotation and the choice of pages: the reference ops against golden codes
and outputs recorded in float64, and against the formulas written a second time in numpy."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.torch import load_file

from heedful.kernels import reference
from heedful.request import KV_ROW_BYTES

GOLDEN = Path(__file__).parent.parent / "golden" / "attention" / "attention.safetensors"
TOLERANCE = 2e-5
N, D = 300, 64
SCALE = 1 / 8
ROTATED_ROWS = (0, 17, 100)


@pytest.fixture(scope="module")
def units() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN)


def q4_codes(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (..., 32 · blocks) and scales (..., blocks) read from Q4_0 rows with numpy."""
    blocks = rows.numpy().reshape(*rows.shape[:-1], -1, 18)
    nibbles = blocks[..., 2:]
    codes = np.concatenate((nibbles & 15, nibbles >> 4), axis=-1).reshape(*rows.shape[:-1], -1)
    return torch.from_numpy(codes), torch.from_numpy(blocks[..., :2].copy().view(np.float16)[..., 0])


def q8_codes(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = rows.numpy()
    scales = numbers[..., -4:].copy().view(np.float32)[..., 0]
    return torch.from_numpy(numbers[..., :-4].copy().view(np.int8)), torch.from_numpy(scales)


@pytest.mark.parametrize("side", ["k", "v"])
def test_codes_and_scales_are_the_recorded_ones(units: dict[str, torch.Tensor], side: str) -> None:
    codes, scales = q8_codes(reference.encode("q8", units[side]))
    assert torch.equal(codes, units[f"int8_row_{side}_codes"])
    assert torch.equal(scales, units[f"int8_row_{side}_scales"])
    codes, scales = q4_codes(reference.encode("q4", units[side]))
    assert torch.equal(codes, units[f"q4_0_{side}_codes"])
    assert torch.equal(scales, units[f"q4_0_{side}_scales"])


def test_rotated_rows_and_their_codes_are_the_recorded_ones(units: dict[str, torch.Tensor]) -> None:
    """To one code step: the rotation's sums are rounded in another order than the recorded ones."""
    turned = reference.hadamard(units["k"][:, ROTATED_ROWS], D)
    assert (turned - units["hadamard_k_rows"]).abs().max() < 1e-5
    codes, scales = q8_codes(reference.encode("q8", turned))
    assert (codes.int() - units["hadamard_int8_row_k_codes_rows"].int()).abs().max() <= 1
    assert torch.allclose(scales, units["hadamard_int8_row_k_scales_rows"], rtol=1e-5)
    codes, scales = q4_codes(reference.encode("q4", turned))
    assert (codes.int() - units["hadamard_q4_0_k_codes_rows"].int()).abs().max() <= 1
    assert torch.allclose(scales, units["hadamard_q4_0_k_scales_rows"], rtol=1e-3)


@pytest.mark.parametrize(
    ("keys", "values", "block", "recorded"),
    [
        ("q8", "q8", 1, "int8_row_out_at"),
        ("q4", "q4", 1, "q4_0_out_at"),
        ("q8", "q4", 1, "k_int8_row_v_q4_0_out_at"),
        ("q8", "q8", D, "hadamard_int8_row_out_at"),
        ("q4", "q4", D, "hadamard_q4_0_out_at"),
    ],
)
def test_attention_over_stored_rows(
    units: dict[str, torch.Tensor], keys: str, values: str, block: int, recorded: str
) -> None:
    q, k, v = (reference.hadamard(units[name].transpose(0, 1), block) for name in "qkv")
    k, v = (
        reference.decode(keys, reference.encode(keys, k), D),
        reference.decode(values, reference.encode(values, v), D),
    )
    allowed = reference.attention_mask(0, N, 0, N, None)
    out = reference.hadamard(reference.attention(q, k, v, allowed, scale=SCALE)[0], block)
    # a rotated row's code may be one step off where float32 rounds the rotation differently
    tolerance = TOLERANCE if block == 1 else 2e-3
    assert (out[units["positions"].long()].transpose(0, 1) - units[recorded]).abs().max() < tolerance


def test_sinks_may_meet_queries_of_their_own(units: dict[str, torch.Tensor]) -> None:
    """With the same queries: the recorded window with sinks. With others: every score written out."""
    q, k, v = (units[name].transpose(0, 1).contiguous() for name in "qkv")
    allowed = reference.attention_mask(0, N, 0, N, 64, 4)
    out, lse = reference.attention(q, k, v, allowed, scale=SCALE, sink_q=q, sinks=4)
    at = units["positions"].long()
    assert (out[at].transpose(0, 1) - units["window_sinks_out_at"]).abs().max() < TOLERANCE
    assert (lse[at].T - units["window_sinks_lse_at"]).abs().max() < TOLERANCE
    sink_q = torch.randn(q.shape, generator=torch.Generator().manual_seed(0))
    out, _ = reference.attention(q, k, v, allowed, scale=SCALE, sink_q=sink_q, sinks=4)
    seen = [0, 1, 2, 3, *range(236, 300)]
    for head in range(6):
        scores = [(sink_q if at < 4 else q)[-1, head].double() @ k[at, head // 3].double() * SCALE for at in seen]
        weights = torch.stack(scores).softmax(0)
        assert (out[-1, head] - weights @ v[seen, head // 3].double()).abs().max() < TOLERANCE


# ---- any rows -------------------------------------------------------------------------------------------------

head_dims = st.sampled_from([1, 16, 31, 32, 40, 64, 80, 128])
extreme = arrays.arrays(np.float32, (2, 1, 40), elements=st.floats(-(2.0**126), 2.0**126, width=32), fill=st.just(0.0))


@st.composite
def ordinary(draw: st.DrawFn) -> torch.Tensor:
    """(rows, K, D) of one magnitude; coarse numbers make ties and zeros likely."""
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(head_dims))
    magnitude, steps = draw(st.sampled_from([1e-20, 1e-3, 1.0, 1e3])), draw(st.sampled_from([0.5, 8.0, 1e6]))
    x = np.random.default_rng(draw(st.integers(0, 2**32))).standard_normal(shape)
    return torch.from_numpy((np.rint(x * steps) / steps * magnitude).astype(np.float32))


@given(st.one_of(ordinary(), extreme.map(torch.from_numpy)))
def test_a_row_takes_its_bytes_and_comes_back_finite(x: torch.Tensor) -> None:
    for number, row_bytes in KV_ROW_BYTES.items():
        rows = reference.encode(number, x)
        assert (rows.dtype, rows.shape) == (torch.uint8, (*x.shape[:-1], row_bytes(x.shape[-1])))
        back = reference.decode(number, rows, x.shape[-1])
        assert (back.dtype, back.shape) == (torch.float32, x.shape)
        if number != "q4" or x.abs().max() < 5e5:  # beyond it a float16 scale is infinite
            assert back.isfinite().all()


@given(ordinary())
def test_what_comes_back_is_as_near_as_the_format_allows(x: torch.Tensor) -> None:
    back = {number: reference.decode(number, reference.encode(number, x), x.shape[-1]) for number in KV_ROW_BYTES}
    assert torch.equal(back["f32"], x)
    assert torch.equal(back["f16"], torch.from_numpy(x.numpy().astype(np.float16).astype(np.float32)))
    largest = x.abs().amax(-1, keepdim=True)
    assert ((back["q8"] - x).abs() <= largest / 254 * 1.001 + 1e-30).all()
    assert ((back["q4"] - x).abs() <= largest / 8 * 1.005 + 1e-6).all()


@given(ordinary())
def test_rows_written_byte_by_byte(x: torch.Tensor) -> None:
    """The formulas a second time, one row in plain numpy float32, packed with struct."""
    row = x[-1, -1].numpy()
    scale = np.float32(np.abs(row).max()) / np.float32(127)
    codes = np.rint(row / scale).astype(np.int8) if scale > 0 else np.zeros(len(row), dtype=np.int8)
    assert bytes(reference.encode("q8", x)[-1, -1].numpy()) == codes.tobytes() + struct.pack("<f", scale)
    assert bytes(reference.encode("q4", x)[-1, -1].numpy()) == b"".join(
        _q4_block(row[begin : begin + 32]) for begin in range(0, len(row), 32)
    )


def _q4_block(channels: np.ndarray) -> bytes:
    channels = np.concatenate((channels, np.zeros(32 - len(channels), dtype=np.float32)))
    extreme = max(channels, key=abs)  # the first of equals
    scale = np.float32(extreme) / np.float32(-8)
    inverse = np.float32(1) / scale if scale else np.float32(0)
    codes = [min(15, int(channel * inverse + np.float32(8.5))) for channel in channels]
    return struct.pack("<e", np.float16(scale)) + bytes(codes[j] | codes[j + 16] << 4 for j in range(16))


def test_rows_do_not_depend_on_how_they_lie() -> None:
    """Scales at odd addresses, rows taken from the middle of others, one row alone."""
    x = torch.randn(3, 5, 70, generator=torch.Generator().manual_seed(1))
    for number in KV_ROW_BYTES:
        rows = reference.encode(number, x)
        padded = torch.zeros(3, 5, rows.shape[-1] + 7, dtype=torch.uint8)
        padded[..., 3:-4] = rows
        if number in ("q8", "q4"):
            assert torch.equal(reference.decode(number, padded[..., 3:-4], 70), reference.decode(number, rows, 70))
        alone = reference.decode(number, reference.encode(number, x[1:2, 4:5]), 70)
        assert torch.equal(alone, reference.decode(number, rows, 70)[1:2, 4:5])
        strided = reference.decode(number, reference.encode(number, x.transpose(0, 1)), 70)
        assert torch.equal(strided, reference.decode(number, rows, 70).transpose(0, 1))


def test_half_precision_saturates() -> None:
    rows = reference.encode("f16", torch.tensor([[1e9, -1e9, 65519.0, 1.0]]))
    assert reference.decode("f16", rows, 4).tolist() == [[65504.0, -65504.0, 65504.0, 1.0]]


def sylvester(size: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(size)


@pytest.mark.parametrize(("head_dim", "block"), [(32, 32), (64, 64), (80, 1), (96, 32), (128, 128), (256, 256)])
def test_rotation_is_the_sylvester_matrix_in_blocks_and_its_own_inverse(head_dim: int, block: int) -> None:
    x = torch.randn(4, 2, head_dim, generator=torch.Generator().manual_seed(head_dim))
    matrix = np.kron(np.eye(head_dim // block), sylvester(block))
    turned = reference.hadamard(x, block)
    assert np.abs(turned.numpy() - x.numpy().astype(np.float64) @ matrix).max() < 1e-5
    assert (reference.hadamard(turned, block) - x).abs().max() < 1e-5
    assert torch.equal(reference.hadamard(x[2:3, 1:], block), turned[2:3, 1:])  # to the bit, whatever lies beside


# ---- pages ------------------------------------------------------------------------------------------------------


def golden_pages(units: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return units["quest_kmin"].transpose(0, 1), units["quest_kmax"].transpose(0, 1)


def test_page_bounds_and_choices_are_the_recorded_ones(units: dict[str, torch.Tensor]) -> None:
    least, largest = golden_pages(units)
    q = units["q"][:, -1]
    bounds = reference.page_bounds(q, least, largest)
    recorded = units["quest_upper_bound"].view(2, 3, -1).amax(dim=1)
    assert (bounds * SCALE - recorded).abs().max() < TOLERANCE
    assert reference.choose_pages(bounds, 6).tolist() == units["quest_per_kv_head_pages"].tolist()
    forced = units["quest_per_kv_head_forced_pages"]
    between = reference.choose_pages(bounds[:, 1:-1], 4) + 1
    assert between.tolist() == forced[:, 1:-1].tolist()
    per_query_head = reference.page_bounds(q, *(x.repeat_interleave(3, dim=1) for x in (least, largest)))
    assert reference.choose_pages(per_query_head, 6).tolist() == units["quest_per_query_head_pages"].tolist()


@given(ordinary(), st.integers(1, 5))
def test_stored_bounds_enclose_the_keys_within_two_steps(x: torch.Tensor, page_len: int) -> None:
    keys = torch.stack([x.roll(shift, dims=-1) * (1 - shift / 9) for shift in range(page_len)], dim=1)
    rows = reference.encode_bounds(keys)  # (pages, page length, K, D)
    head_dim = x.shape[-1]
    assert (rows.dtype, rows.shape) == (torch.uint8, (*x.shape[:-1], 2 * head_dim + 4))
    least, largest = reference.decode_bounds(rows)
    true_least, true_largest = keys.amin(1), keys.amax(1)
    step = torch.maximum(true_least.abs(), true_largest.abs()).amax(-1, keepdim=True) / 127
    slack = step * 1e-4 + 1e-30  # a quotient's last bit, and ±127 where the largest key itself is rounded
    assert (least <= true_least + slack).all()
    assert (largest >= true_largest - slack).all()
    assert (true_least - least <= step + slack).all()
    assert (largest - true_largest <= step + slack).all()


def test_bounds_byte_by_byte() -> None:
    keys = torch.tensor([[[12.7, -0.05, 3.0]], [[-6.31, 0.0, 3.04]]])  # two tokens of one KV head
    assert bytes(reference.encode_bounds(keys)[0].numpy()) == struct.pack(
        "<6bf", -64, -1, 30, 127, 0, 31, np.float32(12.7) / np.float32(127)
    )
    assert reference.encode_bounds(torch.zeros(4, 1, 2)).tolist() == [[0] * 8]


@given(st.data())
def test_bound_of_a_page_is_never_below_the_best_score_in_it(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**31))
    share, kv_heads, head_dim = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 3), head_dims))
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(5, 8, kv_heads, head_dim, generator=generator)
    q = torch.randn(kv_heads * share, head_dim, generator=generator)
    bounds = reference.page_bounds(q, *reference.decode_bounds(reference.encode_bounds(keys)))
    scores = torch.einsum("kgd,pnkd->kpgn", q.view(kv_heads, share, head_dim), keys).amax(dim=(2, 3))
    assert (bounds >= scores - 1e-3).all()


def test_ties_go_to_the_earlier_page_and_a_chosen_one_stays_unless_another_is_clearly_better() -> None:
    bounds = torch.tensor([[1.0, 5.0, 5.0, 3.0, 5.0, 0.0]])
    assert reference.choose_pages(bounds, 2).tolist() == [[1, 2]]
    assert reference.choose_pages(bounds, 0).tolist() == [[]]
    bounds = torch.tensor([[10.0, 9.5, 8.9, 0.0]])  # a tenth of the range is 1
    before = torch.tensor([[False, True, False, True]])
    assert reference.choose_pages(bounds, 1, before).tolist() == [[1]]
    before = torch.tensor([[False, False, True, True]])
    assert reference.choose_pages(bounds, 1, before).tolist() == [[0]]
    assert reference.choose_pages(bounds, 2, before).tolist() == [[0, 2]]
