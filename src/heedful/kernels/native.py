"""The native kernels, where they were built. Without them the PyTorch path computes the same, more slowly."""

from __future__ import annotations

import importlib
import importlib.util


def variant() -> str | None:
    """The kernel variant for this processor ("avx2", "portable"); None where the native module was not built."""
    if importlib.util.find_spec("heedful._native") is None:
        return None
    return str(importlib.import_module("heedful._native").variant())
