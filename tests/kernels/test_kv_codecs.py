"""Rows of keys and values in few bits, their rotation and the choice of pages: the reference ops against golden codes
and outputs recorded in float64, and against the formulas written a second time in numpy."""

from __future__ import annotations

import math
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


def test_choices_by_recorded_bounds_are_the_recorded_ones(units: dict[str, torch.Tensor]) -> None:
    bounds = units["quest_upper_bound"].view(2, 3, -1).amax(dim=1)
    assert reference.choose_pages(bounds, 6).tolist() == units["quest_per_kv_head_pages"].tolist()
    forced = units["quest_per_kv_head_forced_pages"]
    between = reference.choose_pages(bounds[:, 1:-1], 4) + 1
    assert between.tolist() == forced[:, 1:-1].tolist()


@given(ordinary(), st.integers(1, 5))
def test_stored_bounds_are_means_and_variances_within_half_a_step(x: torch.Tensor, page_len: int) -> None:
    keys = torch.stack([x.roll(shift, dims=-1) * (1 - shift / 9) for shift in range(page_len)], dim=1)
    rows = reference.encode_bounds(keys)  # (pages, page length, K, D)
    head_dim = x.shape[-1]
    assert (rows.dtype, rows.shape) == (torch.uint8, (*x.shape[:-1], 2 * head_dim + 8))
    exact = keys.double().numpy()
    means, variances = (stored.numpy() for stored in reference.decode_bounds(rows))
    largest = np.abs(exact).max()  # float32 rounds its sums, and its squares
    for stored, right, rounding in ((means, exact.mean(axis=1), largest), (variances, exact.var(axis=1), largest**2)):
        step = np.abs(right).max(axis=-1, keepdims=True) / 127
        assert (np.abs(stored - right) <= 0.501 * step + 1e-6 * rounding + 1e-37).all()


def test_bounds_byte_by_byte() -> None:
    keys = torch.tensor([[[12.5, -0.5, 1.5]], [[-6.5, 0.5, 1.5]]])  # two tokens of one KV head
    mean, variance = np.float32(3), np.float32(90.25)  # of the first channel; the others': 0 and 1.5, 0.25 and 0
    assert bytes(reference.encode_bounds(keys)[0].numpy()) == struct.pack(
        "<6b2f", 127, 0, 64, 127, 0, 0, mean / np.float32(127), variance / np.float32(127)
    )
    assert reference.encode_bounds(torch.zeros(4, 1, 2)).tolist() == [[0] * 12]


@given(st.data())
def test_a_bound_is_two_deviations_above_what_a_page_scores_on_average(data: st.DataObject) -> None:
    """Of channels that vary independently: here every combination of ±deviation, so that no sample differs."""
    share, kv_heads, head_dim = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * head_dim).view(-1, head_dim)
    centre, spread = torch.randn(2, 3, 1, kv_heads, head_dim, generator=generator)
    keys = centre + spread * signs[:, None]
    q = torch.randn(kv_heads * share, head_dim, generator=generator)
    scores = torch.einsum("kgd,pnkd->kgpn", q.view(kv_heads, share, head_dim), keys).flatten(0, 1)
    right = scores.mean(dim=-1) + 2 * scores.std(dim=-1, correction=0)
    bounds = reference.page_bounds(q, *reference.decode_bounds(reference.encode_bounds(keys)))
    assert (bounds - right).abs().max() <= 0.03 * keys.abs().max() * q.abs().sum(dim=-1).max()


def test_a_page_promises_its_shares_of_every_head() -> None:
    bounds = torch.tensor([[0.0, math.log(3)], [math.log(9), 0.0], [5.0, 5.0], [-1e4, 0.0]])
    assert reference.page_promises(bounds, 2).tolist() == [pytest.approx([1.15, 0.85]), pytest.approx([0.5, 1.5])]


def test_ties_go_to_the_earlier_page_and_a_chosen_one_stays_unless_another_is_clearly_better() -> None:
    bounds = torch.tensor([[1.0, 5.0, 5.0, 3.0, 5.0, 0.0]])
    assert reference.choose_pages(bounds, 2).tolist() == [[1, 2]]
    assert reference.choose_pages(bounds, 0).tolist() == [[]]
    promises = torch.tensor([[1.0, 0.9, 0.75, 0.0]])  # a quarter more for those of last time
    before = torch.tensor([[False, True, False, True]])
    assert reference.choose_pages(promises, 1, before).tolist() == [[1]]
    before = torch.tensor([[False, False, True, True]])
    assert reference.choose_pages(promises, 1, before).tolist() == [[0]]
    assert reference.choose_pages(promises, 2, before).tolist() == [[0, 2]]
