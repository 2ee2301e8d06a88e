"""GGUF files (ggml's format, docs/gguf.md of that project): typed metadata and tensors that stay in their blocks.

Owns: the byte layout of versions 2 and 3, little endian, and the distrust of every number in it. Each count, length and
offset is compared with the bytes that the file has before anything is made of it, so a hostile file costs no memory.
Does not know what a key or a tensor means, except `general.alignment` and `split.*`, which are part of the layout.

Stricter than the format's text, as llama.cpp is: arrays of arrays, dimensions of 0, repeated names and tensors that
share bytes are refused.
"""

import os
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy.typing as npt

from heedful.errors import GGUFError
from heedful.kernels import native
from heedful.weights.quantize import FORMAT_BY_GGML_TYPE, BlockFormat, Bytes
from heedful.weights.tensor import REFETCH, StoredTensor, brief, fold, map_file

GGUFValue: TypeAlias = str | bool | int | float | list[str] | npt.NDArray[Any]
"""Arrays of strings are lists, all others one-dimensional numpy arrays of the stored type (bool included)."""

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 24
"""Alignments in use are 32 to 64 Ki; beyond a huge page or so there is no reason for one."""
MAX_NAME_BYTES = (1 << 16) - 1
"""Of a key, by the format; the same is applied to tensor names."""
MAX_GGUF_DIMS = 4

NEWER = "The file may need a newer heedful; another conversion of the model may do."

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")
BOOL, STRING, ARRAY = 7, 8, 9
SCALARS = {
    **{number: struct.Struct("<" + code) for number, code in enumerate("BbHhIifB")},  # 0 UINT8 … 6 FLOAT32, 7 BOOL
    **{number: struct.Struct("<" + code) for number, code in enumerate("Qqd", 10)},  # 10 UINT64, INT64, FLOAT64
}
"""Layout by the number of the value type. BOOL is a byte that must be 0 or 1."""
MIN_KEY_BYTES = 8 + 4 + 1  # an empty name, the value's type, a value of one byte
MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # an empty name, the number of dimensions, one of them, type, offset


@dataclass(frozen=True, eq=False)
class GGUFFile:
    path: Path
    metadata: dict[str, GGUFValue]
    """In file order. Text is UTF-8; bytes that are not (a vocabulary may hold some) are kept as surrogate escapes, so
    that `text.encode("utf-8", "surrogateescape")` gives exactly the bytes of the file."""
    tensors: dict[str, StoredTensor]
    """In file order. Shapes are row-major: GGUF's dimensions reversed."""
    file_bytes: int
    """Size of the file, of all parts if it was split."""


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Reads metadata and finds the tensors; their bytes are mapped, not read. Raises GGUFError.

    Of a model in several files (split.count above 1) give the first part; the others must lie beside it.
    """
    first = _read_one(Path(path))
    num_parts = _count(first.path, first.metadata, "split.count", 1)
    return first if num_parts <= 1 else _join_parts(first, num_parts)


def _read_one(path: Path) -> GGUFFile:
    cursor = _Cursor(path, map_file(path, GGUFError))
    num_tensors, num_keys = _read_header(cursor)
    metadata: dict[str, GGUFValue] = {}
    for i in range(num_keys):
        key = cursor.name(f"metadata key {i}")
        if key in metadata:
            raise cursor.error(f"metadata key {brief(key)}", "occurs twice")
        metadata[key] = _read_value(cursor, f"metadata key {brief(key)}")
    alignment = _alignment(cursor, metadata)
    infos = [_read_tensor_info(cursor, i) for i in range(num_tensors)]
    start = -(-cursor.at // alignment) * alignment
    tensors = _place_tensors(cursor, infos, start, alignment)
    return GGUFFile(path, metadata, tensors, cursor.size)


class _Cursor:
    """A position in the file. Every read is checked against the bytes that remain; `item` names it in errors."""

    def __init__(self, path: Path, data: Bytes) -> None:
        self.path = path
        self.data = data
        self.view = data.data
        self.size = len(data)
        self.at = 0

    def error(self, item: str, problem: str, remedy: str = REFETCH) -> GGUFError:
        return _refusal(self.path, item, problem, remedy)

    def need(self, num_bytes: int, item: str, claim: str = "") -> None:
        left = self.size - self.at
        if num_bytes > left:
            what = f"{claim} takes" if claim else "takes"
            raise self.error(item, f"{what} {num_bytes:,} bytes at offset {self.at:,}, the file has {left:,} left")

    def number(self, layout: struct.Struct, item: str) -> Any:
        self.need(layout.size, item)
        (value,) = layout.unpack_from(self.view, self.at)
        self.at += layout.size
        return value

    def take(self, num_bytes: int, item: str, claim: str = "") -> Bytes:
        self.need(num_bytes, item, claim)
        self.at += num_bytes
        return self.data[self.at - num_bytes : self.at]

    def text(self, item: str) -> str:
        raw: bytes = self.take(self.number(U64, item), item, "a text").tobytes()
        return raw.decode("utf-8", "surrogateescape")

    def name(self, item: str) -> str:
        length = self.number(U64, item)
        if length > MAX_NAME_BYTES:
            raise self.error(item, f"its name has {length:,} bytes, the limit is {MAX_NAME_BYTES:,}")
        raw: bytes = self.take(length, item, "a name").tobytes()
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as e:
            raise self.error(item, f"its name is not UTF-8: byte {raw[e.start]:#04x} at {e.start}") from e

    def texts(self, count: int, item: str) -> list[str]:
        read = native.module().texts_at if native.is_built() else texts_at
        texts: list[str]
        texts, self.at = read(self.data, self.at, count)
        if len(texts) < count:
            start = self.at + U64.size
            end = start + (U64.unpack_from(self.view, self.at)[0] if start <= self.size else 0)
            problem = f"text {len(texts):,} of {count:,} needs bytes up to {end:,}, the file has {self.size:,}"
            raise self.error(item, problem)
        return texts


def texts_at(data: Bytes, at: int, count: int) -> tuple[list[str], int]:
    """From offset `at` up to `count` texts, a uint64 length before each, and the offset behind the last. Ends before
    one that would pass the end. csrc/bind_texts.cpp does the same, for vocabularies of 256 k entries.
    """
    view, size, texts = data.data, len(data), list[str]()
    while len(texts) < count and at + U64.size <= size:
        start = at + U64.size
        end = start + U64.unpack_from(view, at)[0]
        if end > size:
            break
        texts.append(str(view[start:end], "utf-8", "surrogateescape"))
        at = end
    return texts, at


def _refusal(path: Path, item: str, problem: str, remedy: str = REFETCH) -> GGUFError:
    return GGUFError(f"{path}: {item}: {problem}", remedy)


def _count(path: Path, metadata: dict[str, GGUFValue], key: str, default: int) -> int:
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _refusal(path, f"metadata key {key!r}", f"is {brief(value)}, it must be a whole number, 0 or more")
    return value


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """(tensors, keys) after magic and version."""
    magic = cursor.take(4, "header").tobytes()
    if magic != b"GGUF":
        remedy = "Give a GGUF file. A page of HTML or a git-lfs pointer under that name means the download went wrong."
        raise cursor.error("header", f"the file begins with {magic!r}, a GGUF file with b'GGUF'", remedy)
    version = cursor.number(U32, "header")
    if version & 0xFFFF == 0 and version != 0:
        remedy = "Convert it with gguf-convert-endian of the gguf package."
        raise cursor.error("header", f"version {version >> 24} in big-endian order, only little-endian is read", remedy)
    if version not in VERSIONS:
        remedy = "Convert the model again with a current llama.cpp."
        raise cursor.error("header", f"GGUF version {version:,} is not read, only versions 2 and 3 are", remedy)
    num_tensors, num_keys = cursor.number(U64, "tensor count"), cursor.number(U64, "key count")
    least = num_keys * MIN_KEY_BYTES + num_tensors * MIN_TENSOR_BYTES
    cursor.need(least, "header", f"a table of {num_keys:,} keys and {num_tensors:,} tensors")
    return num_tensors, num_keys


def _read_value(cursor: _Cursor, item: str) -> GGUFValue:
    kind = cursor.number(U32, item)
    if kind == STRING:
        return cursor.text(item)
    if kind == ARRAY:
        return _read_array(cursor, item)
    if kind not in SCALARS:
        raise cursor.error(item, f"value type {kind:,} is unknown, those of GGUF are 0 to 12", NEWER)
    value: int | float = cursor.number(SCALARS[kind], item)
    if kind != BOOL:
        return value
    if value > 1:
        raise cursor.error(item, f"a bool is stored as {value}, only 0 and 1 are possible")
    return bool(value)


def _read_array(cursor: _Cursor, item: str) -> list[str] | npt.NDArray[Any]:
    kind, count = cursor.number(U32, item), cursor.number(U64, item)
    if kind == STRING:
        cursor.need(count * U64.size, item, f"an array of {count:,} texts")
        return cursor.texts(count, item)
    if kind == ARRAY:
        raise cursor.error(item, f"it is an array of {count:,} arrays, only those of text and numbers are read", NEWER)
    if kind not in SCALARS:
        raise cursor.error(item, f"array element type {kind:,} is unknown, those of GGUF are 0 to 12", NEWER)
    layout = SCALARS[kind]
    raw = cursor.take(count * layout.size, item, f"an array of {count:,} numbers")
    if kind == BOOL and count and raw.max() > 1:
        raise cursor.error(item, f"a bool is stored as {raw.max()}, only 0 and 1 are possible")
    return raw.view("?" if kind == BOOL else layout.format).copy()


def _alignment(cursor: _Cursor, metadata: dict[str, GGUFValue]) -> int:
    alignment = _count(cursor.path, metadata, "general.alignment", DEFAULT_ALIGNMENT)
    if alignment > MAX_ALIGNMENT or alignment.bit_count() != 1:
        wanted = f"a power of two, at most {MAX_ALIGNMENT:,}"
        raise cursor.error("metadata key 'general.alignment'", f"is {alignment:,}, it must be {wanted}")
    return alignment


@dataclass(frozen=True)
class _TensorInfo:
    name: str
    stored: BlockFormat
    shape: tuple[int, ...]
    offset: int
    """From the start of the tensor data."""

    @property
    def num_bytes(self) -> int:
        rows, columns = fold(self.shape)
        return rows * self.stored.row_bytes(columns)


def _read_tensor_info(cursor: _Cursor, index: int) -> _TensorInfo:
    name = cursor.name(f"tensor {index}")
    item = f"tensor {brief(name)}"
    num_dims = cursor.number(U32, item)
    if not 1 <= num_dims <= MAX_GGUF_DIMS:
        raise cursor.error(item, f"has {num_dims:,} dimensions, 1 to {MAX_GGUF_DIMS} are possible")
    dims = tuple(cursor.number(U64, item) for _ in range(num_dims))
    number = cursor.number(U32, item)
    stored = FORMAT_BY_GGML_TYPE.get(number)
    if stored is None:
        known = ", ".join(f"{n} {f.name}" for n, f in sorted(FORMAT_BY_GGML_TYPE.items()))
        remedy = "Use a file in another quantization, for instance Q4_K_M or Q8_0."
        raise cursor.error(item, f"has type {number:,}, which is not read; those that are: {known}", remedy)
    if 0 in dims:
        raise cursor.error(item, f"has a dimension of 0 in {dims}")
    if dims[0] % stored.block_len:
        whole = f"whole {stored.name} blocks of {stored.block_len}"
        raise cursor.error(item, f"its rows of {dims[0]:,} weights are not {whole}")
    return _TensorInfo(name, stored, dims[::-1], cursor.number(U64, item))


def _place_tensors(cursor: _Cursor, infos: list[_TensorInfo], start: int, alignment: int) -> dict[str, StoredTensor]:
    """`start`: where the tensor data begins in the file."""
    tensors: dict[str, StoredTensor] = {}
    for info in infos:
        item = f"tensor {brief(info.name)}"
        begin, end = start + info.offset, start + info.offset + info.num_bytes
        if info.name in tensors:
            raise cursor.error(item, "occurs twice")
        if info.offset % alignment:
            raise cursor.error(item, f"its offset {info.offset:,} is not a multiple of the alignment {alignment:,}")
        if end > cursor.size:
            need = f"{info.stored.name} {info.shape} takes {info.num_bytes:,} bytes, up to byte {end:,}"
            raise cursor.error(item, f"{need}; the file has {cursor.size:,}")
        blocks = cursor.data[begin:end].reshape(fold(info.shape)[0], -1)
        tensors[info.name] = StoredTensor(info.name, info.stored.name, info.shape, blocks)
    _refuse_overlaps(cursor, infos)
    return tensors


def _refuse_overlaps(cursor: _Cursor, infos: list[_TensorInfo]) -> None:
    ordered = sorted(infos, key=lambda info: info.offset)
    for before, after in pairwise(ordered):
        end = before.offset + before.num_bytes
        if after.offset < end:
            problem = f"begins at offset {after.offset:,}, inside tensor {brief(before.name)}, which ends at {end:,}"
            raise cursor.error(f"tensor {brief(after.name)}", problem)


def _join_parts(first: GGUFFile, num_parts: int) -> GGUFFile:
    """A model that llama.cpp's gguf-split cut: metadata is the first part's, tensors are those of all parts."""
    ending = f"-00001-of-{num_parts:05}.gguf"
    if not first.path.name.endswith(ending):
        remedy = "Give the path of the first part, under the name that it was published with, beside the others."
        problem = f"is {num_parts:,}, so the name of the first part must end in {ending}"
        raise _refusal(first.path, "metadata key 'split.count'", problem, remedy)
    stem = first.path.name.removesuffix(ending)
    tensors, file_bytes = dict(first.tensors), first.file_bytes
    for i in range(2, num_parts + 1):
        part = _read_one(first.path.with_name(f"{stem}-{i:05}-of-{num_parts:05}.gguf"))
        if twice := tensors.keys() & part.tensors.keys():
            raise _refusal(part.path, f"tensor {brief(min(twice))}", "is in an earlier part too")
        tensors |= part.tensors
        file_bytes += part.file_bytes
    promised = _count(first.path, first.metadata, "split.tensors.count", len(tensors))
    if promised != len(tensors):
        problem = f"is {promised:,}, the {num_parts:,} parts have {len(tensors):,} tensors"
        raise _refusal(first.path, "metadata key 'split.tensors.count'", problem)
    return GGUFFile(first.path, first.metadata, tensors, file_bytes)
