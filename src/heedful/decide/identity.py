"""Which decider it is, by its files: what a calibration is tied to.

Hashing gigabytes takes seconds, so each file's digest is kept in the cache folder, under its path, size and time of
change; a file that changes in any of these is read again.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from heedful.errors import SourceError
from heedful.weights.model_cache import cache_root

READ_SUFFIXES = (".bin", ".gguf", ".jinja", ".json", ".model", ".pt", ".safetensors", ".txt")
"""Of what loaders read; a model card beside them may change."""


def decider_sha256(kind: str, path: Path, *, orders: int = 1, beside: Sequence[Path] = ()) -> str:
    """Hex digest of the files at `path`, a file or a folder, of those `beside` it that it stands on, and of how they
    are read: the same model read in another way (`kind`, `orders`) gives other logits. Names of files count, where
    the folder lies does not.

    Raises SourceError where a file cannot be read.
    """
    whole = hashlib.sha256(f"{kind} {orders}\n".encode())
    for place in (path, *beside):
        for file in [place] if place.is_file() else sorted(_read_files(place)):
            whole.update(f"{file.relative_to(place).as_posix()} {_file_sha256(file)}\n".encode())
    return whole.hexdigest()


def _read_files(folder: Path) -> list[Path]:
    found = (Path(root) / name for root, _, names in os.walk(folder) for name in names)
    return [file for file in found if file.suffix in READ_SUFFIXES and file.is_file()]


def _file_sha256(path: Path) -> str:
    try:
        stat = path.stat()
        key = f"{path.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}\n{stat.st_ino}"
        kept = cache_root() / "digests" / hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
        with suppress(OSError, ValueError):
            digest = kept.read_text(encoding="ascii")
            if len(digest) == 64:
                return digest
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}", "Give this user the right to read it.") from error
    with suppress(OSError):  # it only saves time
        kept.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=kept.parent)
        with open(handle, "w", encoding="ascii") as file_:
            file_.write(digest)
        os.replace(draft, kept)
    return digest
