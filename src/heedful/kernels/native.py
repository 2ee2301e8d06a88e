"""The native kernels, where they were built. Without them the PyTorch path computes the same, more slowly.

`module()` is the C++ module; csrc/ops.h lists its ops with their shapes.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

KV_NUMBERS = ("f32", "f16", "q8", "q4")  # their order is csrc/ops.h's, as are:
PANEL_FORMATS = ("f32", "f16", "w4", "w8", "w6")


def is_built() -> bool:
    return importlib.util.find_spec("heedful._native") is not None


def module() -> Any:
    return importlib.import_module("heedful._native")


def variant() -> str | None:
    """The kernel variant for this processor ("avx2", "portable"); None where the native module was not built."""
    return str(module().variant()) if is_built() else None
