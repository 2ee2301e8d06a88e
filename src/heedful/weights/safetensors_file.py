"""safetensors files, and folders of them: tensors found in the mapped file, nothing read or copied.

Owns: the byte layout (8 bytes header length, JSON header, data) and the index of sharded models, read with distrust:
every claim is checked before it is used. Does not know what a tensor means. Read here and not with the safetensors
package because numpy has no bfloat16, and because tensors should stay as they lie in the file.
"""

import json
import os
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path, PureWindowsPath
from typing import Any, NoReturn, TypeGuard

from heedful.errors import SafetensorsError
from heedful.weights.quantize import FORMATS, Bytes
from heedful.weights.tensor import MAX_DIMS, REFETCH, StoredTensor, brief, fold, map_file

MAX_JSON_BYTES = 100_000_000
"""Of a header (the format's own limit) or an index."""
MAX_WEIGHTS = 1 << 59
"""Product of the dimensions that are not 0: beyond it numpy has no array of 8-byte numbers, empty ones included."""
DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Tensors by name, of one file or of a folder. Raises SafetensorsError.

    In a folder: `model.safetensors`; without it the shards that `model.safetensors.index.json` names; without that the
    only *.safetensors file.
    """
    path = Path(path)
    if not os.path.isdir(path):
        return _read_one(path)
    if os.path.exists(path / SINGLE_NAME):
        return _read_one(path / SINGLE_NAME)
    if os.path.exists(path / INDEX_NAME):
        return _read_shards(path / INDEX_NAME)
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return _read_one(files[0])
    names = ", ".join(f.name for f in files[:10]) or "none"
    raise SafetensorsError(
        f"{path}: has neither {SINGLE_NAME} nor {INDEX_NAME}, and {len(files)} other *.safetensors files: {names}",
        "Give the path of one file, or of a folder that holds one model.",
    )


def _read_one(path: Path) -> dict[str, StoredTensor]:
    data = map_file(path, SafetensorsError)
    if len(data) < 8:
        _refuse(path, f"has {len(data)} bytes, a header length alone takes 8")
    header_bytes = int.from_bytes(data[:8].tobytes(), "little")
    if header_bytes > MAX_JSON_BYTES:
        _refuse(path, f"its header claims {header_bytes:,} bytes, the limit is {MAX_JSON_BYTES:,}")
    if header_bytes > len(data) - 8:
        _refuse(path, f"its header claims {header_bytes:,} bytes, the file has {len(data) - 8:,} after the length")
    buffer = data[8 + header_bytes :]
    header = _parse(path, data[8 : 8 + header_bytes])
    header.pop("__metadata__", None)
    entries = [_entry(path, name, entry) for name, entry in header.items()]
    _require_cover(path, entries, len(buffer))
    return {entry.name: entry.stored_in(buffer) for entry in entries}


def _refuse(path: Path, problem: str, remedy: str = REFETCH) -> NoReturn:
    raise SafetensorsError(f"{path}: {problem}", remedy)


def _parse(path: Path, text: Bytes) -> dict[str, Any]:
    """A JSON object in which no name occurs twice, at any depth."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        parsed = dict(pairs)
        if len(parsed) < len(pairs):
            ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
            _refuse(path, f"the name {brief(name)} occurs twice in its JSON")
        return parsed

    try:
        parsed = json.loads(text.tobytes().decode("utf-8"), object_pairs_hook=unique)
    except RecursionError:
        _refuse(path, "its JSON is nested too deeply to be a list of tensors")
    except ValueError as e:  # not UTF-8, not JSON, or a number of more than 4,300 digits
        _refuse(path, f"its JSON cannot be read: {e}")
    if not isinstance(parsed, dict):
        _refuse(path, f"its JSON is a {type(parsed).__name__}, it must be an object")
    return parsed


@dataclass(frozen=True)
class _Entry:
    """A tensor as the header describes it; `begin` and `end` count from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def stored_in(self, buffer: Bytes) -> StoredTensor:
        rows, columns = fold(self.shape)
        blocks = buffer[self.begin : self.end].reshape(rows, FORMATS[self.dtype].row_bytes(columns))
        return StoredTensor(self.name, self.dtype, self.shape, blocks)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 64 for n in value)  # a bool is no size


def _entry(path: Path, name: str, entry: object) -> _Entry:
    item = f"tensor {brief(name)}"
    if not isinstance(entry, dict):
        _refuse(path, f"{item}: its entry is {brief(entry)}, it must be an object")
    dtype, shape, span = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if dtype not in DTYPES:
        remedy = "Use a file in another dtype, or convert this one to bfloat16."
        _refuse(path, f"{item}: dtype {brief(dtype)} is not read; those that are: {', '.join(DTYPES)}", remedy)
    if not _are_sizes(shape) or len(shape) > MAX_DIMS:
        _refuse(path, f"{item}: shape {brief(shape)} must be a list of at most {MAX_DIMS} sizes, whole numbers from 0")
    if not _are_sizes(span) or len(span) != 2:
        _refuse(path, f"{item}: data_offsets {brief(span)} must be two sizes, whole numbers from 0")
    if prod(max(n, 1) for n in shape) > MAX_WEIGHTS:
        _refuse(path, f"{item}: shape {shape} is beyond any memory, the limit is {MAX_WEIGHTS:,} weights")
    num_bytes = prod(shape) * FORMATS[dtype].block_bytes
    if num_bytes != span[1] - span[0]:
        claim = f"{dtype} {shape} takes {num_bytes:,} bytes"
        _refuse(path, f"{item}: {claim}, data_offsets {span} hold {span[1] - span[0]:,}")
    return _Entry(name, dtype, tuple(shape), span[0], span[1])


def _require_cover(path: Path, entries: list[_Entry], buffer_bytes: int) -> None:
    """The format's rule: the tensors follow each other without holes or overlaps and fill the data to the last byte."""
    at = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != at:
            what = f"begins at byte {entry.begin:,} of the data, the tensor before it ends at {at:,}"
            _refuse(path, f"tensor {brief(entry.name)}: {what}; neither holes nor overlaps are allowed")
        at = entry.end
    if at != buffer_bytes:
        _refuse(path, f"its tensors take {at:,} bytes of data, the file has {buffer_bytes:,}")


def _read_shards(index_path: Path) -> dict[str, StoredTensor]:
    """The tensors that the index names, in its order; others in the shards are left out."""
    text = map_file(index_path, SafetensorsError)
    if len(text) > MAX_JSON_BYTES:
        _refuse(index_path, f"has {len(text):,} bytes, the limit is {MAX_JSON_BYTES:,}")
    weight_map = _parse(index_path, text).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        _refuse(index_path, f"its weight_map is {brief(weight_map)}, it must give a file name for each tensor")
    shards = {file: _read_one(_shard_path(index_path, file)) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in shards[file]:
            _refuse(index_path, f"tensor {brief(name)}: is not in {brief(file)}, where the index has it")
    return {name: shards[file][name] for name, file in weight_map.items()}


def _shard_path(index_path: Path, file: str) -> Path:
    """Only plain names: an index must not open files elsewhere. Links are the user's own and are followed."""
    if file in ("", ".", "..") or PureWindowsPath(file).name != file:  # Windows' rules: both slashes, and drives
        _refuse(index_path, f"names the file {brief(file)}, only plain names of files beside it are allowed")
    if not os.path.exists(index_path.with_name(file)):
        _refuse(index_path, f"names the file {brief(file)}, which is not beside it", "Fetch the missing file.")
    return index_path.with_name(file)
