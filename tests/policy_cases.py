"""Cache policies for hypothesis to draw, their meaning as a mask entry by entry, requests run without a model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from heedful.cache.pages import PAGE_LEN, KVCache
from heedful.cost.meter import Meter
from heedful.cost.receipt import Receipt
from heedful.engine.scheduler import TOKEN_BUDGET
from heedful.models.config import ModelConfig
from heedful.request import CachePolicy, Chunk, Request, Sequence
from heedful.testing import plain_cache

formats = st.sampled_from([None, "f32", "f16", "q8", "q4", "k=q8,v=q4", "k=q4,v=f16"])
precise_counts = st.none() | st.integers(0, 300)
own_windows = st.none() | st.integers(1, 300)

dense = st.builds(CachePolicy, kv_format=formats, precise=precise_counts)
windowed = st.builds(
    CachePolicy, kv_format=formats, precise=precise_counts, window=st.integers(1, 400), sinks=st.integers(0, 200)
)
chosen = st.builds(
    CachePolicy,
    kv_format=formats,
    precise=precise_counts,
    budget=st.integers(256, 640),
    sparse_prefill=st.booleans(),
)
sparse = st.builds(CachePolicy, kv_format=formats, precise=precise_counts, sparse_prefill=st.just(True))
policies = dense | windowed | chosen | sparse


def sequence_of(policy: CachePolicy, prompt: int, output: int = 1) -> Sequence:
    """All of its tokens known, as if the answer had been given."""
    return Sequence(Request((1,) * prompt, policy=policy), [1] * (prompt + output - 1))


def run(cache: KVCache, sequence: Sequence, length: int) -> Chunk:
    """Plan a chunk of up to `length` tokens; it then counts as computed."""
    end = cache.chunk_end(sequence, min(sequence.cached_len + length, len(sequence.token_ids)))
    chunk = cache.plan(sequence, end)
    sequence.cached_len = end
    return chunk


def whole_request(cache: KVCache, sequence: Sequence, step_len: int) -> Iterator[Chunk]:
    """As the engine does it: the prompt in chunks, then one token a step."""
    while sequence.cached_len < len(sequence.token_ids):
        left = sequence.prompt_len - sequence.cached_len
        yield run(cache, sequence, min(step_len, left) if left > 0 else 1)


def mask(start: int, end: int, own: int | None, policy: CachePolicy, prompt: int) -> npt.NDArray[np.bool_]:
    """(queries start..end, keys 0..end): what is seen in a layer whose own window is `own`; pages not chosen yet."""
    q, k = np.arange(start, end)[:, None], np.arange(end)[None, :]
    seen = k <= q
    if policy.window is not None and (own is None or own > policy.window):
        return seen & ((q - k < policy.window) | (k < policy.sinks))
    if own is not None:
        return seen & (q - k < own)
    if policy.sparse_prefill:
        return seen & ((q >= prompt - 100) | (k < 128) | (q - k < 1920))
    return seen


LINEAR_BYTES, HEAD_BYTES = 1000, 100


def config_of(windows: list[int | None], heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        family="llama", vocab_size=10, hidden_size=8, num_layers=len(windows), num_heads=heads, num_kv_heads=kv_heads,
        head_dim=head_dim, intermediate_size=8, context_len=1 << 20, windows=tuple(windows), rope=None,
    )  # fmt: skip


def counted(config: ModelConfig, policy: CachePolicy, prompt: int, output: int) -> Receipt:
    """The receipt of a request planned by a real cache, step by step as the engine does; 8-bit rows by default."""
    cache = plain_cache(config.windows, config.num_kv_heads, config.head_dim, capacity_tokens=32768, default="q8")
    sequence, rng = sequence_of(policy, prompt, output), np.random.default_rng(0)
    meter = Meter(sequence)
    for chunk in whole_request(cache, sequence, TOKEN_BUDGET):
        choose(chunk, rng)
        meter.count(chunk, config, weight_bytes=LINEAR_BYTES + HEAD_BYTES * (chunk.end >= prompt))
    return meter.receipt("toy", config, cache.policy(policy))


def choose(chunk: Chunk, rng: np.random.Generator) -> None:
    """In place of the kernel: any pages will do, between those that are read in any case."""
    for span in chunk.spans:
        if span.selection is not None and span.selection.renew:
            chosen, local = span.selection.chosen, span.selection.local_pages
            layers, kv_heads, num_pages = chosen.shape
            own, listed = span.start // PAGE_LEN, span.selection.listed
            always = [0, *range(own - local, own + 1)]
            for layer in range(layers):
                for head in range(kv_heads):
                    if listed is not None:
                        some = rng.choice(np.arange(1, own - local), span.selection.listed_pages, replace=False)
                        listed[layer, head] = sorted(some)
                    others = rng.choice(np.arange(1, own - local), num_pages - len(always), replace=False)
                    chosen[layer, head] = sorted([*always, *others])
