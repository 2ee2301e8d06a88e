"""Norms, rotation and activations of every kernel variant against the plain PyTorch ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.kernels import native, reference

if not native.is_built():
    pytest.skip("no compiler: the native kernels are not built", allow_module_level=True)

KERNELS = native.module()
VARIANTS = KERNELS.variants()
EMPTY = np.empty(0, dtype=np.float32)
sizes = st.integers(1, 70)


def normal(seed: int, *shape: int, scale: float = 1.0) -> Any:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


@pytest.mark.parametrize("variant", VARIANTS)
@given(rows=st.integers(1, 3), n=sizes, seed=st.integers(0, 99), scale=st.sampled_from([1e-3, 1.0, 300.0]))
@settings(max_examples=50, deadline=None)
def test_norms(variant: str, rows: int, n: int, seed: int, scale: float) -> None:
    x, weight, bias = normal(seed, rows, n, scale=scale), normal(seed + 1, n), normal(seed + 2, n)
    tensors = [torch.from_numpy(a) for a in (x, weight, bias)]
    rms = reference.rms_norm(tensors[0], tensors[1], 1e-5).numpy()
    np.testing.assert_allclose(KERNELS.norm(False, x, weight, EMPTY, 1e-5, variant), rms, rtol=3e-6, atol=1e-6)
    layer = F.layer_norm(tensors[0].double(), (n,), tensors[1].double(), tensors[2].double(), 1e-5).numpy()
    found = KERNELS.norm(True, x, weight, bias, 1e-5, variant)
    np.testing.assert_allclose(found, layer, rtol=2e-5, atol=2e-4 if n == 1 else 2e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@given(rows=st.integers(1, 3), half=st.integers(1, 40), rest=st.integers(0, 9), seed=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_rotation(variant: str, rows: int, half: int, rest: int, seed: int) -> None:
    x, angle = normal(seed, rows, 2 * half + rest), normal(seed + 1, rows, half, scale=3.0)
    cos, sin = np.cos(angle), np.sin(angle)
    expected = reference.rotate(torch.from_numpy(x)[:, None], torch.from_numpy(cos), torch.from_numpy(sin))[:, 0]
    np.testing.assert_allclose(KERNELS.rotate(x, cos, sin, variant), expected.numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("block", [8, 32, 64, 128, 256])
def test_hadamard_rotation(block: int) -> None:
    """Against the matrix by Sylvester's construction; every variant to the bit, since it only adds and subtracts."""
    x, matrix = normal(block, 5, 3 * block), np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    expected = (x.reshape(5, 3, block) @ (matrix / np.sqrt(block))).reshape(x.shape)
    found = [KERNELS.hadamard(x, block, variant) for variant in VARIANTS]
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-6)
    assert all(np.array_equal(other, found[0]) for other in found)
    np.testing.assert_allclose(KERNELS.hadamard(found[0], block, VARIANTS[0]), x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block", [4, 24, 48, 64])
def test_hadamard_blocks_that_cannot_be(block: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        KERNELS.hadamard(normal(0, 1, 96), block, VARIANTS[0])


ACTIVATIONS = [F.silu, lambda x: F.gelu(x, approximate="tanh"), F.gelu, F.relu]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", range(len(ACTIVATIONS)))
@given(rows=st.integers(1, 3), n=sizes, seed=st.integers(0, 99), scale=st.sampled_from([1e-4, 1.0, 5.0, 200.0]))
@settings(max_examples=40, deadline=None)
def test_activations(variant: str, kind: int, rows: int, n: int, seed: int, scale: float) -> None:
    x, up = normal(seed, rows, n, scale=scale), normal(seed + 1, rows, n)
    expected = ACTIVATIONS[kind](torch.from_numpy(x).double()).numpy()
    without = KERNELS.activate(kind, x, np.empty((0, 0), dtype=np.float32), variant)
    np.testing.assert_allclose(without, expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(KERNELS.activate(kind, x, up, variant), expected * up, rtol=2e-6, atol=5e-6)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", range(len(ACTIVATIONS)))
def test_activations_of_extremes(variant: str, kind: int) -> None:
    x = np.array([[-1e30, -1e4, -88.0, -0.0, 0.0, 88.0, 1e4, 1e9, 3.0]], dtype=np.float32)
    found = KERNELS.activate(kind, x, np.empty((0, 0), dtype=np.float32), variant)
    np.testing.assert_allclose(found, ACTIVATIONS[kind](torch.from_numpy(x)).numpy(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gelu_is_exact_where_it_bends(variant: str) -> None:
    """Over all that is neither 0 nor x, as if the error function were within 1e-6."""
    x = np.linspace(-8, 8, 20001, dtype=np.float32)[None]
    found = KERNELS.activate(2, x, np.empty((0, 0), dtype=np.float32), variant)
    apart = np.abs(found - F.gelu(torch.from_numpy(x).double()).numpy())
    assert (apart / np.maximum(1, np.abs(x) / 2)).max() < 1e-6
