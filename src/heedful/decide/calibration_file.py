"""Calibrations on disk, each tied to the decider it was fitted on. `heedful calibrate` keeps them in the user's data
folder under the decider's sha256, and whoever loads that very decider finds its own there.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from heedful.decide.calibrate import Calibration
from heedful.errors import BadParameter


def calibrations_folder() -> Path:
    """In $HEEDFUL_DATA, or in the user's data folder."""
    chosen = os.environ.get("HEEDFUL_DATA")
    if chosen:
        root = Path(chosen).expanduser().absolute()
    else:
        import platformdirs

        root = Path(platformdirs.user_data_dir("heedful"))
    return root / "calibrations"


def has_kept_calibrations() -> bool:
    """Whether it is worth while to find out a decider's sha256. Raises BadParameter where the folder cannot be read."""
    folder = calibrations_folder()
    try:
        return folder.is_dir() and any(folder.iterdir())
    except OSError as error:
        remedy = "Give this user the right to read it, or take no calibration: --calibration none (Python: None)."
        raise BadParameter("calibration", f"{folder} cannot be read: {error.strerror}", remedy) from error


def kept_path(sha256: str) -> Path:
    return calibrations_folder() / f"{sha256}.json"


def kept_calibration(sha256: str) -> Calibration | None:
    """What was kept for this decider. Raises BadParameter where its file is damaged."""
    path = kept_path(sha256)
    return read_calibration(path, sha256) if path.exists() else None


def read_calibration(path: Path, sha256: str) -> Calibration:
    """The calibration in `path`; one that names no model is taken for any.

    Raises BadParameter: it cannot be read, is none, or was fitted on another decider than `sha256`.
    """
    try:
        found = Calibration.from_dict(json.loads(path.read_bytes()))
    except OSError as error:
        raise BadParameter("calibration", f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise BadParameter("calibration", f"{path} is not JSON", _MAKE) from None
    if found.model_sha256 and found.model_sha256 != sha256:
        raise BadParameter(
            "calibration",
            f"{path} belongs to another decider: it was fitted on {found.model_sha256[:12]}…, this is {sha256[:12]}…",
            f"Temperatures of another model, or of another --orders, mean nothing. {_MAKE}",
        )
    return found


_MAKE = "Make one: heedful calibrate -m DECIDER --data rows.jsonl."


def write_calibration(path: Path, calibration: Calibration, about: Mapping[str, Any]) -> None:
    """In one rename; `about` is for people: how it was made and measured. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**calibration.to_dict(), **about}, indent=1, ensure_ascii=False)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}-")
    try:
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{text}\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise
