"""Files and folders that are whole or not there: written under another name beside their own, synced, renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from heedful.errors import UsageError


def require_free(path: Path, *, overwrite: bool) -> None:
    """Raises UsageError where something is at `path` already, or its folder is not there."""
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is no folder", "Make it first.")
    is_free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    if not is_free and not overwrite:
        raise UsageError(f"{path} is there already", "Name another, or add --force to replace it.")


@contextmanager
def file_aside(path: Path) -> Iterator[Path]:
    """Gives the path to write to; what stands there when the block ends without an error becomes `path`."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield aside
        sync(aside)
        os.replace(aside, path)
        sync(path.parent)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def folder_aside(path: Path) -> Iterator[Path]:
    """The same for a folder of files; one that was there is removed when the new one is whole."""
    aside, old = (path.with_name(f".{path.name}.{os.getpid()}{ending}") for ending in ("", ".old"))
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        for file in (*aside.iterdir(), aside):
            sync(file)
        if path.exists():
            os.rename(path, old)
        os.rename(aside, path)
        sync(path.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
