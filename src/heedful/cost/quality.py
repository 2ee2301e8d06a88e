"""What a policy that changes the output was measured to lose. Numbers are measured, or there are none.

Figures of the models that have an alias ship with the package (measured.json, made by bench/policies.py); those that
`heedful eval policy` measures here are kept in the user's data folder, one file a model and policy, and come first.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from heedful.cache.policy_text import is_exact, policy_name
from heedful.request import CachePolicy

MEAN_KLD_BOUND = 0.05
"""Nats a token; a policy that loses more is warned of. On text that the exact model would write itself the mean KLD is
the mean loss of log-probability, so this much makes the perplexity e^0.05 times as large, 5 % more: about what weights
lose that are quantized from 8 to 4 bits (docs/kernels.md); 4-bit keys and values lose less with rotation."""


@dataclass(frozen=True)
class Quality:
    """Against exact attention (every key and value in float32, all of them read) with the same weights and kernels."""

    mean_kld: float
    p99_kld: float
    mean_delta_nll: float
    needle_recall: float | None
    """Share of planted facts found again; None: not measured. Exact attention does not find all either."""
    measured_on: str


@dataclass(frozen=True)
class PassageLoss:
    """Over the predictions of a text's tokens. KLD(exact || policy) and NLL in nats, each over the whole vocabulary."""

    mean_kld: float
    p50_kld: float
    p99_kld: float
    max_kld: float
    mean_delta_nll: float
    agreement: float
    """Share of positions where both find the same token likeliest."""
    noise_kld: float
    """Mean KLD where only the last bits of keys and values differ: so much of any KLD need not be the policy's."""
    tokens: int
    """Predictions measured."""
    text: str


@dataclass(frozen=True)
class NeedleScore:
    """Shares of planted facts that were found again: under the policy, and by exact attention in the same run."""

    recall: float
    """The greedy answer has the value in it."""
    exact_recall: float
    choice: float
    """The value's first token is likelier than those of seven other values; 1/8 would be chance."""
    exact_choice: float
    asked: int
    recall_by_kind: Mapping[str, float] = field(default_factory=dict)
    """"single": one fact in the text; "multi": eight, one of which is asked for."""
    recall_by_length: Mapping[str, float] = field(default_factory=dict)
    """By tokens of the prompt."""


@dataclass(frozen=True)
class Measurement:
    """What is known of one policy on one model."""

    passage: PassageLoss
    needles: NeedleScore | None = None

    @property
    def quality(self) -> Quality:
        """As receipts show it."""
        loss = self.passage
        recall = self.needles.recall if self.needles else None
        return Quality(loss.mean_kld, loss.p99_kld, loss.mean_delta_nll, recall, loss.text)


def measured_quality(model: str, policy: CachePolicy) -> Quality | None:
    """None where nothing was measured; nothing is to be measured for a policy that changes no output.

    `model`: its alias, path or other name. A policy that names no number format counts as in the native runner's.
    """
    if is_exact(policy):
        return None
    found = _measurement(model_key(model), policy_name(policy))
    return None if found is None else found.quality


def measured_policies(model: str) -> dict[str, Measurement]:
    """By policy name, shipped ones first in their order."""
    key = model_key(model)
    saved = (_read(path) for path in sorted(_folder(key).glob("*.json")))
    return {**_shipped_of(key), **{policy: found for name, policy, found in filter(None, saved) if name == key}}


def quality_warning(model: str, policy: CachePolicy) -> str | None:
    """What somebody who chooses the policy should know before; None when all is well, or nothing was chosen."""
    if policy == CachePolicy() or is_exact(policy):
        return None
    name, quality = policy_name(policy), measured_quality(model, policy)
    if quality is None:
        command = f"heedful eval policy -m {shlex.quote(model)} --policy {name}"
        return f"what {name} loses on {model} is not measured: {command}"
    if quality.mean_kld <= MEAN_KLD_BOUND:
        return None
    return (
        f"{name} changes what {model} says: mean KLD {quality.mean_kld:.3f} against exact attention, more than "
        f"{MEAN_KLD_BOUND}; heedful show {shlex.quote(model)} lists the policies that were measured"
    )


def save_measurement(model: str, policy: CachePolicy, found: Measurement) -> Path:
    """Kept from now on; needles measured earlier stay where `found` has none. Raises OSError."""
    key, name = model_key(model), policy_name(policy)
    path = _path(key, name)
    before = _read(path)
    if found.needles is None and before is not None:
        found = Measurement(found.passage, before[2].needles)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"model": key, "policy": name, **asdict(found)}, indent=1)
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise
    return path


def model_key(model: str) -> str:
    """What a model's figures are kept under: our alias, also for the alias's file; else file name and size.

    Names that are no path here (`hf:…`, `wheel:…`) stand for themselves.
    """
    shipped = _shipped()
    if model in shipped["models"] or not os.path.exists(model):
        return model
    path = Path(model).resolve()
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.suffix in (".gguf", ".safetensors")]
    own = f"{path.name} {sum(file.stat().st_size for file in files)}"
    alias: str = shipped["files"].get(own, own)
    return alias


def _measurement(key: str, policy: str) -> Measurement | None:
    saved = _read(_path(key, policy))
    return saved[2] if saved is not None and saved[:2] == (key, policy) else _shipped_of(key).get(policy)


def _shipped_of(key: str) -> dict[str, Measurement]:
    found = {policy: _from_json(fields) for policy, fields in _shipped()["models"].get(key, {}).items()}
    return {policy: measurement for policy, measurement in found.items() if measurement is not None}


@cache
def _shipped() -> dict[str, Any]:
    """{"files": {"name size": alias}, "models": {alias: {policy: measurement}}}."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("measured.json").read_bytes())
    return found


def _read(path: Path) -> tuple[str, str, Measurement] | None:
    """(model, policy, what was measured); None for whatever is not a file of ours."""
    try:
        fields = json.loads(path.read_bytes())
        found = _from_json(fields)
        return None if found is None else (str(fields["model"]), str(fields["policy"]), found)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _from_json(fields: Mapping[str, Any]) -> Measurement | None:
    try:
        needles = fields["needles"]
        return Measurement(PassageLoss(**fields["passage"]), None if needles is None else NeedleScore(**needles))
    except (TypeError, KeyError):
        return None


def _path(key: str, policy: str) -> Path:
    return _folder(key) / f"{_file_name(policy)}.json"


def _folder(key: str) -> Path:
    """In $HEEDFUL_DATA, or in the user's data folder."""
    chosen = os.environ.get("HEEDFUL_DATA")
    if chosen:
        root = Path(chosen).expanduser().absolute()
    else:
        import platformdirs

        root = Path(platformdirs.user_data_dir("heedful"))
    return root / "quality" / _file_name(key)


def _file_name(text: str) -> str:
    """Readable, and its own for each text."""
    words = re.sub(r"[^A-Za-z0-9.=]+", "-", text)[-60:].strip("-.")
    return f"{words}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
