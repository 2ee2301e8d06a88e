"""Which runner computes: native where its kernels are built, else PyTorch; and how many tokens' K and V fit."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from heedful.cache.policy import PAGE_LEN
from heedful.engine.runner import Runner
from heedful.errors import BadParameter, CacheFull, UnsupportedModel
from heedful.kernels import native
from heedful.models.config import ModelConfig
from heedful.request import DEFAULT_KV_FORMAT, KV_ROW_BYTES, KVFormat
from heedful.weights.load import LoadedModel

if TYPE_CHECKING:
    from heedful.weights.adapter import Adapter

CACHE_MEMORY_SHARE = 0.6
"""Of the memory that is free once the weights are in, the most that the KV cache may grow to."""

LARGEST_CACHE = 2 << 30
LEAST_PAGES = 16
"""Of 64 tokens: less memory than for a thousand of them is a mistake."""
CONTEXTS_HELD = 4
"""The cache grows to 2 GiB, or to so many full contexts where that is more: running sequences and shared prefixes."""

KV_NUMBERS = {"native": native.KV_NUMBERS, "torch": ("f32",)}
"""Of keys and of values, apart, where a request names no format of its own."""

_BUILD = "Install a C++ compiler, then heedful again."
_TORCH = "Choose the torch runner, or leave the choice to heedful."

log = logging.getLogger("heedful")


def make_runner(
    loaded: LoadedModel,
    *,
    kind: str,
    kv_format: str | None,
    weights_format: str | None,
    context_len: int,
    threads: int,
    free_memory_bytes: int,
    kv_memory_bytes: int | None = None,
    adapters: Mapping[str, Adapter] | None = None,
) -> Runner:
    """`kind`: native, torch or auto. `free_memory_bytes`: 0 where the system does not say. `kv_memory_bytes`: the most
    that keys and values may take; None: as much as is sensible. `adapters`: by the names that requests give them.

    Raises BadParameter for a kind or KV format that there is not, UnsupportedModel when nothing can run the model,
    CacheFull when it does not fit into memory.
    """
    chosen = _chosen(kind, loaded.config)
    kv_format = kv_format or (DEFAULT_KV_FORMAT if chosen == "native" else "f32")
    form = KVFormat.parse(kv_format)
    if not {form.keys, form.values} <= set(KV_NUMBERS[chosen]):
        raise BadParameter("kv", f"{kv_format!r} is not a format of the {chosen} runner", _choices(KV_NUMBERS[chosen]))
    if weights_format not in (None, *native.WEIGHTS_FORMATS) or (weights_format and chosen != "native"):
        raise BadParameter(
            "weights", f"{weights_format!r} is not known to the {chosen} runner", "Native has q8, q6 and q4."
        )
    capacity = _capacity_tokens(loaded, chosen, form, context_len, free_memory_bytes, kv_memory_bytes)
    config, weights = loaded.config, loaded.weights
    if chosen == "native":
        from heedful.engine.native_runner import NativeRunner

        runner = NativeRunner(
            config,
            weights,
            capacity_tokens=capacity,
            threads=threads,
            kv_format=kv_format,
            weights_format=weights_format,
            adapters=adapters,
        )
        _ = loaded.tokenizer  # made, and kept, while the weights are packed
        runner.finish_loading()  # else the first prompt would wait for it, and be timed so
        return runner
    from heedful.engine.torch_runner import TorchRunner  # torch takes seconds to import

    return TorchRunner(config, weights, capacity_tokens=capacity, threads=threads, adapters=adapters)


def _chosen(kind: str, config: ModelConfig) -> str:
    if kind not in ("auto", *KV_NUMBERS):
        raise BadParameter("runner", f"{kind!r} is not known", _choices(("auto", *KV_NUMBERS)))
    if kind == "native" and config.delta is not None:
        raise UnsupportedModel(f"the native kernels lack the DeltaNet layers of {config.family}", _TORCH)
    if kind in ("auto", "native") and native.is_built() and config.delta is None:
        return "native"
    if kind == "native":
        raise UnsupportedModel("the native kernels are not built here", _BUILD)
    if importlib.util.find_spec("torch") is None:
        missing = "PyTorch is not installed" if kind == "torch" else "neither native kernels nor PyTorch are here"
        raise UnsupportedModel(missing, "pip install 'heedful[torch]'" + (f", or: {_BUILD}" if kind == "auto" else "."))
    if kind == "auto":
        why = "are not built here" if config.delta is None else f"lack the DeltaNet layers of {config.family}"
        log.warning("heedful: the native kernels %s; running on PyTorch, which is slower", why)
    return "torch"


def _capacity_of(kv_memory_bytes: int, token_bytes: int) -> int:
    least = LEAST_PAGES * PAGE_LEN * token_bytes
    if kv_memory_bytes < least:
        raise BadParameter(
            "kv_memory", f"{kv_memory_bytes / 1e6:,.3g} MB hold no answers", f"Give {least / 1e6:.0f} MB."
        )
    return kv_memory_bytes // token_bytes // PAGE_LEN * PAGE_LEN


def _choices(names: tuple[str, ...]) -> str:
    return "Choose one of: " + ", ".join(names) + "."


def _capacity_tokens(
    loaded: LoadedModel,
    kind: str,
    form: KVFormat,
    context_len: int,
    free_memory_bytes: int,
    kv_memory_bytes: int | None,
) -> int:
    """Tokens whose keys and values fit: into `kv_memory_bytes`, or into what is free, at most LARGEST_CACHE and some
    contexts."""
    config = loaded.config
    stored = sum(tensor.num_bytes for tensor in loaded.weights.values())
    weights_bytes = stored if kind == "native" else 4 * sum(t.num_weights for t in loaded.weights.values())
    row_bytes = KV_ROW_BYTES[form.keys](config.head_dim) + KV_ROW_BYTES[form.values](config.head_dim)
    token_bytes = config.num_kv_heads * len(config.windows) * row_bytes
    if kv_memory_bytes is not None:
        return _capacity_of(kv_memory_bytes, token_bytes)
    if not free_memory_bytes:
        return CONTEXTS_HELD * context_len
    affordable = int((free_memory_bytes - weights_bytes) * CACHE_MEMORY_SHARE) // token_bytes // PAGE_LEN * PAGE_LEN
    if affordable < PAGE_LEN:
        raise CacheFull(
            f"{loaded.name}: weights take {weights_bytes / 1e9:.1f} GB, {free_memory_bytes / 1e9:.1f} GB are free",
            "Close other programs, or take a smaller model.",
        )
    enough = max(CONTEXTS_HELD * context_len, LARGEST_CACHE // token_bytes)
    return min(affordable, -(-enough // PAGE_LEN) * PAGE_LEN)
