"""Where a training run keeps models: runs/NAME/checkpoints/step-00000100/, each with a manifest of its files.

The rule: a run's folder stands for its newest checkpoint that is whole, that is, whose files have the sizes and sha256
of its manifest.json. A checkpoint's own folder stands for itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from heedful.errors import FileFormatError

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{8,})")
_READ_BYTES = 1 << 22


def model_in(path: Path) -> Path:
    """The newest whole checkpoint of a run's folder; any other path as it is.

    Raises FileFormatError when the run has none.
    """
    if not (path / CHECKPOINTS).is_dir() or (path / "config.json").exists():
        return path
    found = newest_checkpoint(path)
    if found is None:
        raise FileFormatError(f"{path} is a training run without a whole checkpoint", "Let it train until it saves.")
    return found


def newest_checkpoint(run: Path) -> Path | None:
    return next((folder for folder in reversed(checkpoints(run)) if is_whole(folder)), None)


def checkpoints(run: Path) -> list[Path]:
    """Oldest first, whole or not."""
    folders = (run / CHECKPOINTS).glob("step-*")
    return sorted((f for f in folders if _STEP.fullmatch(f.name) and f.is_dir()), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def is_whole(checkpoint: Path) -> bool:
    """Whether the files are those of the manifest, to the byte."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        files = [(checkpoint / name, facts["bytes"], facts["sha256"]) for name, facts in manifest["files"].items()]
        if not all(path.stat().st_size == size for path, size, _ in files):
            return False
        return all(sha256_of(path) == digest for path, _, digest in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # cut off, or of another hand
        return False


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()
