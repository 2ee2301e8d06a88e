"""Bases and adapters whose results peft recorded, as runners of both kinds: tests/golden/adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from heedful.engine.engine import Engine
from heedful.engine.runner import Runner
from heedful.engine.scheduler import Scheduler
from heedful.kernels import native
from heedful.models.config import ModelConfig, config_from_hf
from heedful.request import Batch, Request, SamplingParams, Sequence
from heedful.weights import names
from heedful.weights.adapter import Adapter, load_adapter
from heedful.weights.names import Weights
from heedful.weights.safetensors_file import read_safetensors

GOLDEN = Path(__file__).parent.parent / "golden"
ADAPTERS = GOLDEN / "adapters"
CASES = {
    "llama_all": "llama_gqa",
    "llama_rslora": "llama_gqa",
    "llama_patterns": "llama_gqa",
    "phi3_fused": "phi3_fused",
    "gemma3_sandwich": "gemma3_text",
    "qwen2_bias": "qwen2_bias",
    "qwen3_5_hybrid": "qwen3_5",
}
KINDS = ["torch", *(["portable", "native"] if native.is_built() else [])]


@cache
def base(family: str) -> tuple[ModelConfig, Weights]:
    folder = GOLDEN / ("qwen3_5/lm" if family == "qwen3_5" else f"tiny_decoders/{family}")
    config = config_from_hf(json.loads((folder / "config.json").read_text()))
    return config, names.from_hf(read_safetensors(folder), config)


@cache
def adapter_of(case: str) -> Adapter:
    return load_adapter(str(ADAPTERS / case), *base(CASES[case]))


@cache
def recorded(case: str) -> dict[str, npt.NDArray[np.float32]]:
    return load_file(ADAPTERS / case / "logits.safetensors")


def make(
    kind: str, family: str, adapters: Mapping[str, Adapter], weights: Weights | None = None, *, threads: int = 2
) -> Runner:
    """`kind`: "torch", or the native kernels as this processor gets them or "portable"; rows in f32."""
    config, own = base(family)
    if kind == "torch":
        from heedful.engine.torch_runner import TorchRunner

        return TorchRunner(config, weights or own, capacity_tokens=4096, threads=threads, adapters=adapters)
    from heedful.engine.native_runner import NativeRunner

    return NativeRunner(
        config,
        weights or own,
        capacity_tokens=4096,
        threads=threads,
        kv_format="f32",
        variant="" if kind == "native" else kind,
        adapters=adapters,
    )


def logits(runner: Runner, ids: list[int], adapter: str | None, lengths: list[int]) -> npt.NDArray[np.float32]:
    """(T, vocab) of all tokens, computed in pieces of these lengths."""
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=0)
    sequence = Sequence(Request(tuple(ids), sampling, adapter=adapter), list(ids))
    rows = []
    for length in lengths:
        chunk = runner.cache.plan(sequence, sequence.cached_len + length)
        rows.append(runner.run(Batch((chunk,))).copy())
        sequence.cached_len = chunk.end
    runner.cache.release(sequence)
    return np.concatenate(rows)


def engine_of(runner: Runner, token_budget: int = 512) -> Engine:
    engine = Engine(runner, model_name="tiny", context_len=runner.config.context_len, eos_ids=())
    engine.scheduler = Scheduler(runner.cache, token_budget)
    return engine


def greedy(engine: Engine, asked: list[tuple[list[int], str | None]], max_tokens: int) -> list[list[int]]:
    """All in one batch: (prompt, adapter)."""
    sampling = SamplingParams(max_tokens=max_tokens)
    sequences = [engine.add(Request(tuple(ids), sampling, adapter=adapter)) for ids, adapter in asked]
    while engine.scheduler.has_work:
        engine.step()
    return [sequence.token_ids[sequence.prompt_len :] for sequence in sequences]
