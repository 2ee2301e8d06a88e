"""Matrices packed for the native products, for models whose other parts run elsewhere.

    products = PackedProducts(threads=2)
    matrix = products.pack(weight, "w6")     # float32 (R, C) → panels
    y = products.multiply(matrix, x, bias)   # (T, C) → (T, R)

Errors of formats: csrc/pack.h. The integer ones also round activations to int8, a scale for each 32 columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from heedful.kernels import native

Floats = npt.NDArray[np.float32]
_GGML_F32 = 0
_BLOCK = 32


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    format: str
    rows: int
    cols: int
    panels: npt.NDArray[np.uint8]


class PackedProducts:
    """A pool of threads and the fastest kernels of this processor. Python threads may share it: they take turns."""

    def __init__(self, threads: int) -> None:
        """Raises ModuleNotFoundError where the native kernels were not built (native.is_built)."""
        self._native = native.module()
        self._packer, self._pool = self._native.Packer(threads), self._native.Pool(threads)
        self._threads = threads
        self._variant = self._native.variant()

    def pack(self, weight: Floats, panel_format: str) -> PackedMatrix:
        """`weight` (R, C); C is a multiple of 32 for the integer formats."""
        rows, cols = weight.shape
        stored = np.ascontiguousarray(weight, dtype=np.float32).view(np.uint8).reshape(rows, -1)
        panels = self._packer.pack(_GGML_F32, stored, cols, panel_format)
        return PackedMatrix(panel_format, rows, cols, panels)

    def multiply(self, matrix: PackedMatrix, x: Floats, bias: Floats | None = None) -> Floats:
        """x (T, C) → x · Wᵀ [+ bias] (T, R)."""
        rows, cols, form = matrix.rows, matrix.cols, matrix.format
        assert x.shape[1] == cols, (x.shape, cols)
        result: Floats = self._native.matmul(
            matrix.panels, form, rows, cols, x, self._threads, self._variant, bias=bias, pool=self._pool
        )
        return result


def can_pack(rows: int, cols: int) -> bool:
    """Whether the integer formats take it, and a whole panel is used."""
    return rows >= 8 and cols % _BLOCK == 0
