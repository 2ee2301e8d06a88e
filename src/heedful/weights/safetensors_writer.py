"""A safetensors file, written tensor by tensor. Its reader is safetensors_file.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from heedful.weights.out_tensor import OutTensor


def write_tensors(
    path: Path, tensors: Iterable[OutTensor], *, progress: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """One tensor is in memory at a time. Raises CannotExport, OSError."""
    listed, header, end = list(tensors), dict[str, Any](), 0
    for tensor in listed:
        begin, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": tensor.format_name, "shape": list(tensor.shape), "data_offsets": [begin, end]
        }  # fmt: skip
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in listed:
            blocks = tensor.blocks()
            file.write(blocks.data)
            progress(blocks.nbytes)
