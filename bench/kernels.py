"""Every native op that reads memory or computes much: GB/s or GOP/s, and its share of what this machine reached.

    python bench/kernels.py [--threads 2] [--repeat 20]

Matrix products of SmolLM2-135M's shapes (bench/kernels_matmul.py), and decode attention through the whole step: the
time of a step at a context less that at none, over the KV bytes that it reads. A table, and a JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
from time import perf_counter
from typing import Any

import kernels_matmul

from heedful import LLM, CachePolicy, hardware
from heedful.cost.formulas import KV_FORMATS
from heedful.engine.engine import Engine
from heedful.kernels import native
from heedful.request import Finish, Request, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=20)
    args = parser.parse_args()
    bandwidth = hardware.measure_read_bandwidth(args.threads)
    variant = native.variant()
    assert variant is not None, "the native kernels are not built"
    cases = kernels_matmul.measure(args.threads, [1, 8, 512], args.repeat, variant)
    cases += [case for kv in ("q8", "f16") for case in attention(kv, args.threads, args.repeat)]
    print(f"{variant}, {args.threads} threads; memory read at {bandwidth / 1e9:.1f} GB/s measured")
    print(f"{'case':22} {'best ms':>9} {'GB/s':>7} {'share':>6} {'GOP/s':>7}")
    for case in cases:
        name, rate = f"{case['case']} × {case['tokens']:,}", case["gb_per_second"]
        share = rate * 1e9 / bandwidth
        print(f"{name:22} {case['best_ms']:9.3f} {rate:7.1f} {share:6.0%} {case.get('gop_per_second', 0):7.1f}")
    print(json.dumps({"bench": "kernels", "variant": variant, "read_bandwidth": bandwidth, "cases": cases}))


def attention(kv: str, threads: int, repeat: int) -> list[dict[str, Any]]:
    llm = LLM("smollm2", policy=CachePolicy(kv_format=kv), threads=threads)
    config = llm.config
    row_bytes = KV_FORMATS[kv](config.head_dim)
    short = step_seconds(llm.engine, 1, repeat)
    cases = []
    for context in (512, 2048, 7000):
        seconds = step_seconds(llm.engine, context, repeat) - short
        read = 2 * config.num_kv_heads * config.num_layers * context * row_bytes
        cases.append(
            {
                "case": f"decode {kv}",
                "tokens": context,
                "best_ms": 1e3 * seconds,
                "gb_per_second": read / seconds / 1e9,
            }
        )
    return cases


def step_seconds(engine: Engine, context: int, repeat: int) -> float:
    """Median of decode steps after `context` tokens."""
    request = Request(tuple(range(10, 10 + context)), SamplingParams(max_tokens=repeat + 2, ignore_eos=True))
    sequence = engine.add(request)
    while sequence.output_len == 0:
        engine.step()
    seconds = []
    for _ in range(repeat):
        began = perf_counter()
        engine.step()
        seconds.append(perf_counter() - began)
    engine.end(sequence, Finish.CANCELLED)
    engine.receipt(sequence)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
