"""The `args` of an application in a Serve YAML, checked: what each replica serves, and how many there are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from heedful.errors import BadParameter
from heedful.request import CachePolicy

ROUTINGS = ("affinity", "power_of_two", "random")


@dataclass(frozen=True)
class Autoscaling:
    least: int = 1
    most: int = 4
    target_requests: float = 8.0
    """Open at once in a replica; with more there are soon more replicas."""
    up_s: float = 10.0
    """It has to be so for so long."""
    down_s: float = 300.0


@dataclass(frozen=True)
class DeploySettings:
    """Of each replica, but for `replicas` and `autoscaling`."""

    models: tuple[str, ...]
    replicas: int = 1
    autoscaling: Autoscaling | None = None
    """In the place of `replicas`."""
    routing: str = "affinity"
    """Or "power_of_two", Ray Serve's own, which knows nothing of prefixes; or "random", to compare."""
    cpus: int = 1
    """Threads of a replica, and what Ray keeps for it."""
    context: int | None = None
    kv: str | None = None
    window: int | None = None
    sinks: int = 0
    budget: int | None = None
    kv_memory_bytes: int | None = None
    weights: str | None = None
    deciders: tuple[str, ...] = ()
    api_keys_env: str | None = None
    """Name of the variable that holds the keys, with commas between."""
    allowed_hosts: tuple[str, ...] = ()
    most_waiting: int = 256
    """Requests of a replica that may wait for their turn."""
    drain_s: float = 30.0
    """That open answers may take to end where a replica goes."""

    @property
    def policy(self) -> CachePolicy:
        return CachePolicy(kv_format=self.kv, window=self.window, sinks=self.sinks, budget=self.budget)

    @property
    def api_keys(self) -> tuple[str, ...]:
        """Raises BadParameter where the environment has none."""
        if self.api_keys_env is None:
            return ()
        keys = tuple(key.strip() for key in os.environ.get(self.api_keys_env, "").split(",") if key.strip())
        if not keys:
            raise BadParameter("args.api_keys_env", f"{self.api_keys_env} is not in the environment")
        return keys


def settings_from_args(args: Mapping[str, Any]) -> DeploySettings:
    """Raises BadParameter, which names the key."""
    given = dict(args)
    scaling = given.pop("autoscaling", None)
    known = {field.name: str(field.type) for field in fields(DeploySettings)}
    checked = {name: _checked(name, value, known) for name, value in given.items()}
    if not checked.get("models"):
        raise BadParameter("args.models", "names no model", "For instance: models: [smollm2].")
    if scaling is not None:
        if "replicas" in checked:
            raise BadParameter("args.autoscaling", "does not go with replicas", "Give one of the two.")
        checked["autoscaling"] = _autoscaling(scaling)
    if checked.get("routing", "affinity") not in ROUTINGS:
        raise BadParameter("args.routing", f"must be one of {', '.join(ROUTINGS)}")
    settings = DeploySettings(**checked)
    _ = settings.policy, settings.api_keys
    return settings


def _autoscaling(given: Any) -> Autoscaling:
    if not isinstance(given, Mapping):
        raise BadParameter("args.autoscaling", "must map names to values: least, most, target_requests, up_s, down_s")
    known = {field.name: str(field.type) for field in fields(Autoscaling)}
    found = Autoscaling(**{name: _checked(name, value, known, "args.autoscaling") for name, value in given.items()})
    if found.least > found.most:
        raise BadParameter("args.autoscaling", f"has a least of {found.least:,} and a most of {found.most:,}")
    return found


def _checked(name: str, value: Any, known: Mapping[str, str], where: str = "args") -> Any:
    if name not in known:
        near = get_close_matches(str(name), known, 1)
        hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(known)}."
        raise BadParameter(f"{where}.{name}", "is no key that means something here", hint)
    kind = known[name]
    if kind.startswith("tuple"):
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
            raise BadParameter(f"{where}.{name}", "must be a list of texts")
        return tuple(texts)
    wanted: tuple[type, ...] = (str,) if "str" in kind else (int, float) if "float" in kind else (int,)
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise BadParameter(f"{where}.{name}", f"must be {'a text' if str in wanted else 'a number'}, not {value!r:.40}")
    least = 0 if name in ("sinks", "drain_s", "up_s", "down_s", "least") else 1
    if isinstance(value, int | float) and not least <= value <= 1 << 50:
        raise BadParameter(f"{where}.{name}", f"must be {least} or more, not {value!r:.40}")
    return value
