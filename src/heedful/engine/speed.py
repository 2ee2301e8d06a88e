"""Measures an engine: prefill and decode tokens/s at one context, and what a decode step reads."""

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


def measure_speed(
    engine: Engine,
    context: int,
    *,
    policy: CachePolicy = CachePolicy(),  # noqa: B008  # frozen
    decode_tokens: int = 16,
    repeats: int = 3,
) -> SpeedCase:
    """Fill `context` tokens, then decode `decode_tokens` `repeats` times. Raises what Engine.add raises."""
    vocab_size = engine.runner.config.vocab_size
    prompt = tuple((i * 7919) % min(40000, vocab_size - 10) + 10 for i in range(context))
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
