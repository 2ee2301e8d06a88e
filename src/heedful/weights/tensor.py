"""A tensor as it lies in a file: name, format, shape, and a view of the file's bytes. Nothing is converted until asked.

Owns: StoredTensor, and what both file readers need: a mapped file, and its items named in messages. Does not know GGUF
or safetensors, nor what a tensor is for.
"""

import mmap
import os
import reprlib
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from heedful.errors import FileFormatError
from heedful.weights.quantize import FORMATS, BlockFormat, Bytes, Floats, dequantize

MAX_DIMS = 8
"""More are refused: numpy has a limit, and no model comes near."""
REFETCH = "The file is incomplete or damaged: fetch it again."

_shortened = reprlib.Repr()
_shortened.maxstring = 120
_shortened.maxlevel = 1


def brief(value: object) -> str:
    """A value from a file, for a message: quoted, without control characters, cut to a line whatever it is."""
    return _shortened.repr(value)


def map_file(path: str | os.PathLike[str], error: type[FileFormatError]) -> Bytes:
    """The bytes of a regular file that is not empty, read-only, mapped (pages are read when touched). Raises `error`.

    The mapping lives as long as any view of it. A file that somebody cuts while it is mapped kills the process on
    access (SIGBUS), so model files are replaced by rename, never rewritten in place.
    """
    try:
        mode = os.stat(path).st_mode  # before open, which would wait for ever on a named pipe
        if not stat.S_ISREG(mode):
            kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
            raise error(f"{path}: is {kind}", "Give the path of the model file itself.")
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise error(f"{path}: is empty (0 bytes)", REFETCH)
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as e:
        raise error(f"{path}: cannot be read: {e.strerror}", "Check the path and its permissions.") from e
    except ValueError as e:  # a path with a zero byte, or one that the file system's encoding cannot express
        raise error(f"{os.fspath(path)!r}: is not a possible path: {e}", "Check the path.") from e


def forget_pages(tensors: Iterable["StoredTensor"]) -> None:
    """Let the system take back the memory of mapped files; what is read again comes from the file again."""
    for mapping in {id(m): m for t in tensors if (m := _mapping_of(t.blocks)) is not None}.values():
        if hasattr(mmap, "MADV_DONTNEED"):
            mapping.madvise(mmap.MADV_DONTNEED)


def _mapping_of(array: Any) -> mmap.mmap | None:
    while array is not None and not isinstance(array, mmap.mmap):
        array = array.obj if isinstance(array, memoryview) else getattr(array, "base", None)
    return array


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """Weights in the format of their file. `blocks` stays valid as long as it is held; it keeps the file mapped."""

    name: str
    format_name: str
    """A key of `heedful.weights.quantize.FORMATS`."""
    shape: tuple[int, ...]
    """Row-major like numpy: a matrix is (rows, columns) = (outputs, inputs). () is a scalar."""
    blocks: Bytes
    """(rows, row_bytes): all dimensions but the last are folded into rows. A read-only view of the mapped file."""

    def __post_init__(self) -> None:
        rows, columns = fold(self.shape)
        expected = (rows, self.format.row_bytes(columns))
        assert self.blocks.dtype == np.uint8, (self.name, self.blocks.dtype)
        assert self.blocks.shape == expected, (self.name, self.blocks.shape, expected)

    @property
    def format(self) -> BlockFormat:
        return FORMATS[self.format_name]

    @property
    def num_bytes(self) -> int:
        return self.blocks.nbytes

    @property
    def num_weights(self) -> int:
        return prod(self.shape)

    def take_rows(self, index: npt.NDArray[np.integer] | slice) -> "StoredTensor":
        """Entries along the first dimension, still in the stored format: rows of a matrix, elements of a vector.

        A slice without a step gives a view, an index array a copy of the rows that it names, in its order. A vector in
        a block format cannot be cut.
        """
        is_vector = len(self.shape) == 1
        assert self.shape, f"{self.name} is a scalar"
        assert not is_vector or self.format.block_len == 1, (self.name, self.shape, self.format_name)
        entry_bytes = self.format.block_bytes if is_vector else prod(self.shape[1:-1]) * self.blocks.shape[1]
        taken = self.blocks.reshape(self.shape[0], entry_bytes)[index]
        shape = (len(taken), *self.shape[1:])
        rows, columns = fold(shape)
        return StoredTensor(self.name, self.format_name, shape, taken.reshape(rows, self.format.row_bytes(columns)))

    def to_float32(self, out: Floats | None = None) -> Floats:
        """A float32 array of `shape`, always a copy; in `out`, C-contiguous and of that shape, if given."""
        if out is not None:
            assert out.shape == self.shape, (self.name, out.shape, self.shape)
            assert out.flags.c_contiguous, (self.name, out.strides)  # else reshape would make a copy
            out = out.reshape(fold(self.shape))
        return dequantize(self.format_name, self.blocks, out).reshape(self.shape)


def fold(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, columns) of a shape: the last dimension, and the product of the others; a scalar is (1, 1)."""
    return prod(shape[:-1]), shape[-1] if shape else 1
