"""GGUF files, version 3, little endian: what gguf_file.py reads, written. Knows no key and no tensor by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from heedful.weights.gguf_file import ARRAY, BOOL, DEFAULT_ALIGNMENT, SCALARS, STRING, U32, U64, GGUFValue
from heedful.weights.out_tensor import OutTensor
from heedful.weights.quantize import FORMATS
from heedful.weights.written_aside import file_aside

VERSION = 3
F32 = SCALARS[6]
_UINT32, _INT32, _FLOAT32, _UINT64, _INT64 = 4, 5, 6, 10, 11
_KIND_OF_DTYPE = {
    "u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": BOOL, "u8": 10, "i8": 11, "f8": 12
}  # fmt: skip


def write_gguf(
    path: Path,
    metadata: Mapping[str, GGUFValue],
    tensors: Iterable[OutTensor],
    *,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Whole numbers are stored in 32 bits where they fit, floats as float32, as llama.cpp expects of its keys. One
    tensor is in memory at a time. Raises CannotExport, OSError.
    """
    listed = list(tensors)
    with file_aside(path) as aside, aside.open("wb") as file:
        file.write(b"GGUF" + U32.pack(VERSION) + U64.pack(len(listed)) + U64.pack(len(metadata)))
        for key, value in metadata.items():
            file.write(_text(key) + _value(value))
        _write_infos(file, listed)
        for tensor in listed:
            _pad(file)
            blocks = tensor.blocks()
            assert blocks.nbytes == tensor.num_bytes, (tensor.name, blocks.nbytes, tensor.num_bytes)
            file.write(blocks.data)
            progress(blocks.nbytes)
        _pad(file)


def _write_infos(file: IO[bytes], tensors: Iterable[OutTensor]) -> None:
    offset = 0
    for tensor in tensors:
        ggml_type = FORMATS[tensor.format_name].ggml_type
        assert ggml_type is not None, tensor.format_name
        dims = b"".join(U64.pack(dim) for dim in reversed(tensor.shape))
        file.write(_text(tensor.name) + U32.pack(len(tensor.shape)) + dims + U32.pack(ggml_type) + U64.pack(offset))
        offset += -(-tensor.num_bytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _pad(file: IO[bytes]) -> None:
    file.write(b"\0" * (-file.tell() % DEFAULT_ALIGNMENT))


def _text(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogateescape")
    return U64.pack(len(encoded)) + encoded


def _value(value: GGUFValue) -> bytes:
    """Kind and value."""
    if isinstance(value, bool):
        return U32.pack(BOOL) + bytes([value])
    if isinstance(value, int):
        return _number(value)
    if isinstance(value, float):
        return U32.pack(_FLOAT32) + F32.pack(value)
    if isinstance(value, str):
        return U32.pack(STRING) + _text(value)
    if isinstance(value, list):
        return U32.pack(ARRAY) + U32.pack(STRING) + U64.pack(len(value)) + b"".join(map(_text, value))
    return _array(value)


def _number(value: int) -> bytes:
    if 0 <= value < 1 << 32:
        return U32.pack(_UINT32) + U32.pack(value)
    kind = _UINT64 if value > 0 else _INT32 if value >= -(1 << 31) else _INT64
    size = 4 if kind == _INT32 else 8
    return U32.pack(kind) + value.to_bytes(size, "little", signed=value < 0)


def _array(values: np.ndarray[Any, Any]) -> bytes:
    kind = _KIND_OF_DTYPE[values.dtype.str[1:]]
    data: bytes = values.astype(values.dtype.newbyteorder("<")).tobytes()
    return U32.pack(ARRAY) + U32.pack(kind) + U64.pack(values.size) + data
