"""Checkpoints that are whole or not there: written aside, every file synced, renamed, and only then an older one goes.

runs/NAME/checkpoints/step-00000100/ is a model folder as Hugging Face lays them out, with three more files:
optimizer.safetensors, training.json (where the run stood) and manifest.json (sizes and sha256 of the others). Nothing
is pickled. Which checkpoint a run stands for: weights/run_folder.py.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt

from heedful.errors import FileFormatError
from heedful.weights.run_folder import CHECKPOINTS, MANIFEST, checkpoints, sha256_of, step_of

MODEL, OPTIMIZER, TRAINED, STATE = "model.safetensors", "optimizer.safetensors", "trained.safetensors", "training.json"
_DTYPES = {"f4": "F32", "f8": "F64", "i8": "I64"}


class WritableArray(Protocol):
    """A NumPy array, or what becomes one when it is written."""

    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    def __array__(self) -> npt.NDArray[Any]: ...


Arrays = Mapping[str, WritableArray]


@dataclass(frozen=True)
class TrainingState:
    """All that a run knows besides weights and the optimizer's state. Nothing draws from a generator that lives on:
    order and samples are functions of the seed and these numbers.
    """

    step: int = 0
    """Steps done."""
    cursor: int = 0
    """Segments trained on, over all epochs."""
    tokens: int = 0
    visits: int = 0
    smoothed: float = 0.0
    """Sum of losses, each step's worth less than the next one's."""
    smoothed_weight: float = 0.0
    best_step: int | None = None
    best_figure: float | None = None
    """Of the validation, the one that the kind of training is judged by."""


def write_checkpoint(
    run: Path, state: TrainingState, tensors: Mapping[str, Arrays], documents: Mapping[str, bytes], keep: int
) -> Path:
    """Durable when it returns; then all but the `keep` newest and the best go. `tensors`, `documents`: by file name, a
    document's perhaps in a folder.
    """
    folder = run / CHECKPOINTS / f"step-{state.step:08d}"
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for name, arrays in tensors.items():
        write_safetensors(aside / name, arrays)
    for name, content in {**documents, STATE: _as_json(asdict(state))}.items():
        (aside / name).parent.mkdir(exist_ok=True)
        _write_synced(aside / name, content)
    written = sorted(file for file in aside.rglob("*") if file.is_file())
    facts = {
        file.relative_to(aside).as_posix(): {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
        for file in written
    }
    _write_synced(aside / MANIFEST, _as_json({"files": facts}))
    for inner in sorted({file.parent for file in written} | {aside}, reverse=True):
        sync_folder(inner)
    if folder.exists():  # not whole, or training would have begun after it
        _remove(folder)
    os.rename(aside, folder)
    sync_folder(folder.parent)
    for old in checkpoints(run)[:-keep]:
        if step_of(old) != state.best_step:
            _remove(old)
    return folder


def remove_unfinished(run: Path) -> None:
    """What a save that was cut off has left."""
    for aside in (run / CHECKPOINTS).glob(".step-*"):
        shutil.rmtree(aside)


def read_state(checkpoint: Path) -> TrainingState:
    """Raises FileFormatError."""
    try:
        return TrainingState(**json.loads((checkpoint / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        what = f"{checkpoint / STATE} tells no state of a run ({error})"
        raise FileFormatError(what[:300], "Remove this checkpoint; the one before it is used then.") from error


def write_safetensors(path: Path, arrays: Arrays) -> None:
    """Synced when it returns."""
    header: dict[str, Any] = {}
    end = 0
    for name, values in arrays.items():
        dtype, begin = _DTYPES[values.dtype.str[1:]], end
        end += values.nbytes
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in arrays.values():
            file.write(np.ascontiguousarray(values).data)
        _sync(file)


def write_aside(path: Path, content: bytes) -> None:
    """The whole file or, when something fails, the old one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    _write_synced(aside, content)
    os.replace(aside, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        _sync(file)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _remove(checkpoint: Path) -> None:
    """Its manifest first: half removed it must not pass for whole."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def _as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
