"""Measures an engine: prefill and decode tokens/s at one context, what a decode step reads, and steps of a batch."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from time import perf_counter, time_ns

from heedful.engine.engine import Engine
from heedful.request import CachePolicy, Finish, Request, SamplingParams


@dataclass(frozen=True)
class SpeedCase:
    context: int
    prefill_tok_s: float
    decode_tok_s: float
    """Median over the repeats; sampling (greedy) is in it."""
    bytes_per_token: int
    """Weights, KV rows and bounds that the last decode step read."""
    kv_bytes_held: int
    kv_bytes_read: int
    visits: int
    """Of the whole case, prefill and all decode steps."""

    @property
    def decode_bytes_per_second(self) -> float:
        return self.decode_tok_s * self.bytes_per_token


@dataclass(frozen=True)
class BatchCase:
    """A step in which so many sequences decode."""

    sequences: int
    context: int
    """Of each, in the middle of what was measured."""
    step_seconds: float
    """Median; sampling (greedy) is in it."""


def measure_batch(engine: Engine, sequences: int, *, context: int = 64, decode_tokens: int = 32) -> BatchCase:
    """Fill `context` tokens in each of so many sequences, then decode. Raises what Engine.add raises."""
    sampling = SamplingParams(max_tokens=decode_tokens + 2 + context * sequences // 64, ignore_eos=True)
    running = [
        engine.add(Request(_prompt(engine, context, begin=context * i), sampling, cache_salt=f"speed {time_ns()} {i}"))
        for i in range(sequences)
    ]
    while any(sequence.output_len == 0 for sequence in running):
        engine.step()
    seconds = []
    for _ in range(decode_tokens):
        began = perf_counter()
        engine.step()
        seconds.append(perf_counter() - began)
    lengths = [len(sequence.token_ids) for sequence in running]
    for sequence in running:
        engine.end(sequence, Finish.CANCELLED)
    middle = sum(lengths) // sequences - decode_tokens // 2
    return BatchCase(sequences, middle, statistics.median(seconds))


def _prompt(engine: Engine, tokens: int, begin: int = 0) -> tuple[int, ...]:
    most = min(40000, engine.runner.config.vocab_size - 10)
    return tuple(((begin + i) * 7919) % most + 10 for i in range(tokens))


def measure_speed(
    engine: Engine,
    context: int,
    *,
    policy: CachePolicy = CachePolicy(),  # noqa: B008  # frozen
    decode_tokens: int = 16,
    repeats: int = 3,
) -> SpeedCase:
    """Fill `context` tokens, then decode `decode_tokens` `repeats` times. Raises what Engine.add raises."""
    prompt = _prompt(engine, context)
    sampling = SamplingParams(max_tokens=decode_tokens * repeats + 1, ignore_eos=True)
    sequence = engine.add(Request(prompt, sampling, policy, cache_salt=f"speed {time_ns()}"))  # all is to be computed
    began = perf_counter()
    while sequence.output_len == 0:
        engine.step()
    prefill_seconds = perf_counter() - began
    rates = []
    for _ in range(repeats):
        began = perf_counter()
        for _ in range(decode_tokens):
            engine.step()
        rates.append(decode_tokens / (perf_counter() - began))
    bytes_per_token = engine.last_step_bytes
    engine.end(sequence, Finish.CANCELLED)
    receipt = engine.receipt(sequence)
    return SpeedCase(
        context=context,
        prefill_tok_s=context / prefill_seconds,
        decode_tok_s=statistics.median(rates),
        bytes_per_token=bytes_per_token,
        kv_bytes_held=receipt.kv.bytes_held_peak,
        kv_bytes_read=receipt.kv.bytes_read,
        visits=receipt.visits.total,
    )
