"""The file that `heedful route calibrate` writes: least probabilities, and of which policy, decider and rows they are.

A policy or a decider that has changed since does not make them void: it may be a new comment in an instruction. It is
said wherever they are used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any

from heedful.decide.load import find_decider
from heedful.errors import BadParameter, PolicyError
from heedful.router.calibrate import RouteReport
from heedful.router.choose import Thresholds
from heedful.router.policy import CALIBRATED, Policy

VERSION = 1
_MAKE = "Make one: heedful route calibrate --policy POLICY --rows rows.jsonl."


def decider_identity(name: str) -> str:
    """What a calibration is tied to: the decider's sha256; of one behind a URL, its name. Raises SourceError."""
    source = find_decider(name)
    return f"remote:{name}" if source.kind == "jev" else source.sha256()


def thresholds_of(policy: Policy, decider: str) -> Thresholds:
    """Of the calibration that the policy names; none where it names none. A file that is not there yet means that no
    calibrated route is taken, and is warned of: it has to be made with that policy. Raises PolicyError."""
    if policy.decision is None or policy.decision.calibration is None:
        return Thresholds()
    path = policy.decision.calibration
    if not path.exists():
        wanting = sum(route.min_p == CALIBRATED for route in policy.routes)
        warning = f"{path} is not there: {wanting} calibrated route{'s are' if wanting != 1 else ' is'} never taken"
        return Thresholds(warnings=(warning,))
    try:
        data = path.read_bytes()
        found = json.loads(data)
    except OSError as error:
        raise PolicyError(str(path), f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise PolicyError(str(path), "is not JSON", _MAKE) from None
    if (
        not isinstance(found, Mapping)
        or found.get("version") != VERSION
        or not isinstance(found.get("routes"), Mapping)
    ):
        raise PolicyError(str(path), "is no calibration of routes", _MAKE)
    by_route = {str(name): _threshold(str(path), name, value) for name, value in found["routes"].items()}
    return Thresholds(by_route, hashlib.sha256(data).hexdigest()[:12], _warnings(policy, decider, found, by_route))


def write_calibration(path: Path, policy: Policy, decider: str, rows_sha256: str, report: RouteReport) -> None:
    """In one rename, with all that it belongs to. Raises BadParameter."""
    shown = report.to_dict()
    about = {
        "version": VERSION,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "policy_sha256": policy.sha256,
        "decider": decider,
        "rows_sha256": rows_sha256,
    }
    text = json.dumps({**about, **shown}, indent=1, ensure_ascii=False)
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(draft, "w", encoding="utf-8") as file:
            file.write(f"{text}\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        raise BadParameter("calibration", f"{path} cannot be written: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)


def _threshold(where: str, name: Any, value: Any) -> float | None:
    threshold = value.get("threshold") if isinstance(value, Mapping) else None
    is_number = isinstance(threshold, int | float) and not isinstance(threshold, bool) and isfinite(threshold)
    if threshold is not None and not is_number:
        raise PolicyError(where, f"has a threshold of {name!r:.60} that is no number", _MAKE)
    return None if threshold is None else float(threshold)


def _warnings(policy: Policy, decider: str, found: Mapping[str, Any], by_route: Mapping[str, Any]) -> tuple[str, ...]:
    path = policy.decision.calibration if policy.decision else None
    warnings = []
    if found.get("policy_sha256") != policy.sha256:
        warnings.append(f"{path} was made with another version of {policy.path.name}")
    if found.get("decider") != decider:
        warnings.append(f"{path} was made with another decider: its thresholds mean little with this one")
    for route in policy.routes:
        if route.min_p == CALIBRATED and route.name not in by_route:
            warnings.append(f"{path} has no threshold of {route.name!r}: that route is never taken")
    return (*warnings, *([f"{_MAKE}"] if warnings else []))
