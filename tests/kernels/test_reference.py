"""The reference ops against float64 results recorded independently; the fast ops against the reference ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from heedful.kernels import reference
from heedful.kernels.attention import DenseAttend, attention, causal_bias

GOLDEN = Path(__file__).parent.parent / "golden" / "attention" / "attention.safetensors"
TOLERANCE = 2e-5
N = 300
SCALE = 1 / 8


@pytest.fixture(scope="module")
def units() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN)


def tokens_first(units: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return units[name].transpose(0, 1).contiguous()


def at_positions(units: dict[str, torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """(T, H, …) → (H, positions, …), the layout of the recorded results."""
    return out[units["positions"].long()].transpose(0, 1)


@pytest.mark.parametrize(
    ("window", "sinks", "out_name", "lse_name"),
    [
        (None, 0, "causal_out_at", None),
        (64, 0, "window_out_at", None),
        (64, 4, "window_sinks_out_at", "window_sinks_lse_at"),
    ],
)
def test_reference_attention(
    units: dict[str, torch.Tensor], window: int | None, sinks: int, out_name: str, lse_name: str | None
) -> None:
    q, k, v = (tokens_first(units, name) for name in "qkv")
    allowed = reference.attention_mask(0, N, 0, N, window, sinks)
    out, lse = reference.attention(q, k, v, allowed, scale=SCALE)
    assert (at_positions(units, out) - units[out_name]).abs().max() < TOLERANCE
    expected_lse = units["causal_lse"] if lse_name is None and window is None else units.get(lse_name or "")
    if window is None:
        assert (lse.T - expected_lse).abs().max() < TOLERANCE
    elif lse_name is not None:
        assert (at_positions(units, lse) - expected_lse).abs().max() < TOLERANCE


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("start", [0, 284, 299])
def test_fast_attention_of_a_chunk(units: dict[str, torch.Tensor], window: int | None, start: int) -> None:
    """Queries from `start` on against the keys that their window lets them see: the recorded rows again."""
    q, k, v = (tokens_first(units, name) for name in "qkv")
    first_key = 0 if window is None else max(0, start - window + 1)
    bias = causal_bias(start, N - start, first_key, N - first_key, window)
    out = attention(q[start:], k[first_key:], v[first_key:], bias, scale=SCALE)
    allowed = reference.attention_mask(start, N - start, 0, N, window)
    expected, _ = reference.attention(q[start:], k, v, allowed, scale=SCALE)
    assert (out - expected).abs().max() < TOLERANCE
    recorded = units["causal_out_at" if window is None else "window_out_at"]
    assert (out[-1] - recorded[:, -1]).abs().max() < TOLERANCE


def test_the_last_recorded_position_is_the_last_query(units: dict[str, torch.Tensor]) -> None:
    assert units["positions"][-1] == N - 1


def test_softcap_bounds_the_scores(units: dict[str, torch.Tensor]) -> None:
    """Against a second writing of the formula in float64: cap · tanh(score / cap) before the softmax."""
    q, k, v = (tokens_first(units, name) for name in "qkv")
    cap = 3.0
    out = attention(q, k, v, causal_bias(0, N, 0, N, None), scale=SCALE, softcap=cap)
    for head in (0, 5):
        keys, values = k[:, head // 3].double(), v[:, head // 3].double()
        scores = torch.tanh((q[:, head].double() @ keys.T) * SCALE / cap) * cap
        scores.masked_fill_(torch.ones(N, N).triu(1).bool(), float("-inf"))
        assert (out[:, head] - scores.softmax(-1) @ values).abs().max() < TOLERANCE


def test_packed_documents_do_not_see_each_other(units: dict[str, torch.Tensor]) -> None:
    q, k, v = (tokens_first(units, name) for name in "qkv")
    packed = DenseAttend([100, 200])(0, q, k, v, window=None, scale=SCALE, softcap=None)
    alone = DenseAttend([200])(0, q[100:], k[100:], v[100:], window=None, scale=SCALE, softcap=None)
    assert torch.equal(packed[100:], alone)
    whole = DenseAttend([300])(0, q, k, v, window=None, scale=SCALE, softcap=None)
    assert torch.allclose(packed[:100], whole[:100], atol=TOLERANCE)
    assert not torch.allclose(packed[100:], whole[100:], atol=1e-2)


def test_rms_norm_and_rotation_by_hand() -> None:
    x = torch.tensor([[3.0, 4.0]])
    assert torch.allclose(
        reference.rms_norm(x, torch.tensor([1.0, 2.0]), 0.0), x / 12.5**0.5 * torch.tensor([1.0, 2.0])
    )
    turned = reference.rotate(torch.tensor([[[1.0, 5.0, 0.0, 7.0]]]), torch.tensor([[0.0]]), torch.tensor([[1.0]]))
    # a quarter turn of the pair (0, 1); with one angle only channels 0 and 1 belong to it
    assert turned.tolist() == [[[-5.0, 1.0, 0.0, 7.0]]]
