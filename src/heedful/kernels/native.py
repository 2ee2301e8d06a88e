"""The native kernels, where they were built. Without them the PyTorch path computes the same, more slowly.

`module()` is the C++ module; csrc/ops.h lists its ops with their shapes.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from heedful.errors import BadParameter, UnsupportedModel

KV_NUMBERS = ("f32", "f16", "q8", "q4")  # their order is csrc/ops.h's, as are:
PANEL_FORMATS = ("f32", "f16", "w4", "w8", "w6")
API = 6
"""Of the module's calls and their arguments; csrc/module.cpp has the same number."""
WEIGHTS_FORMATS = {"q8": "w8", "q6": "w6", "q4": "w4"}
"""What matrices can be quantized to at load, in blocks of 32, and the panels that hold it: 8-bit codes with a scale,
6-bit and 4-bit ones with scale and minimum. For many tokens at once q6 is the fastest, for one q4."""


def is_built() -> bool:
    return importlib.util.find_spec("heedful._native") is not None


def module() -> Any:
    """Raises UnsupportedModel for one that another version of heedful was built with."""
    found = importlib.import_module("heedful._native")
    if (built := getattr(found, "API", 1)) != API:
        raise UnsupportedModel(
            f"the native kernels at {found.__file__} are of another heedful (calls {built}, not {API})",
            "Build them again: pip install --force-reinstall --no-deps heedful, in a checkout pip install -e .",
        )
    return found


def variant() -> str | None:
    """The kernel variant for this processor ("avx2", "portable"); None where the native module was not built."""
    return str(module().variant()) if is_built() else None


def panel_format(weights: str | None) -> str | None:
    """Of a format of WEIGHTS_FORMATS; None: weights stay as they are. Raises BadParameter for others, UnsupportedModel
    where the native module was not built.
    """
    if weights is None:
        return None
    if weights not in WEIGHTS_FORMATS:
        raise BadParameter("weights", f"must be one of {', '.join(WEIGHTS_FORMATS)}, not {weights!r:.40}")
    if not is_built():
        raise UnsupportedModel(
            f"weights in {weights} need the native kernels, which were not built",
            "Install a C++ compiler and heedful anew.",
        )
    return WEIGHTS_FORMATS[weights]
