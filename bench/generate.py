"""Prefill and decode speed against context, with what each case cost.

    python bench/generate.py [MODEL] [--fill 64 512 2048 7000] [--decode 16] [--repeats 3] [--runner torch] [--policy …]

Decode = median over the repeats of --decode tokens each, after the context holds FILL tokens; greedy sampling is in it.
A table, and a JSON line last. Run it in turn with a peer's bench in one session: the figures are for ratios.
"""

from __future__ import annotations

import argparse
import json
import resource
from dataclasses import asdict
from time import perf_counter
from typing import Any

from heedful import LLM, CachePolicy
from heedful.cache.policy_text import parse_policy
from heedful.engine.speed import SpeedCase, measure_speed


def main() -> None:
    args = _arguments()
    began = perf_counter()
    llm = LLM(args.model, threads=args.threads, runner=args.runner)
    load_seconds = perf_counter() - began
    cases = [
        {"policy": spec, **asdict(_case(llm, context, parse_policy(spec) if spec else CachePolicy(), args))}
        for context in args.fill
        for spec in args.policy
    ]
    result = {
        "engine": "heedful",
        "runner": type(llm.engine.runner).__name__,
        "model": args.model,
        "threads": llm.engine.runner.threads,
        "load_seconds": round(load_seconds, 2),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "cases": cases,
    }
    _print_table(result)
    print(json.dumps(result))


def _case(llm: LLM, context: int, policy: CachePolicy, args: argparse.Namespace) -> SpeedCase:
    return measure_speed(llm.engine, context, policy=policy, decode_tokens=args.decode, repeats=args.repeats)


def _print_table(result: dict[str, Any]) -> None:
    print(f"{result['model']}, {result['runner']}, {result['threads']} threads, loaded in {result['load_seconds']} s")
    print(f"peak memory {result['peak_memory_bytes'] / 1e6:,.0f} MB")
    print("\n context  prefill tok/s  decode tok/s  KV held MB  KV read GB           visits  policy")
    for case in result["cases"]:
        print(
            f"{case['context']:>8,} {case['prefill_tok_s']:>14,.1f} {case['decode_tok_s']:>13,.2f}"
            f" {case['kv_bytes_held'] / 1e6:>11,.1f} {case['kv_bytes_read'] / 1e9:>11,.2f} {case['visits']:>16,}"
            f"  {case['policy'] or 'default'}"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--fill", type=int, nargs="+", default=[64, 512, 2048, 7000])
    parser.add_argument("--decode", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--runner", default="auto", choices=["auto", "native", "torch"])
    parser.add_argument("--policy", nargs="+", default=[""], help="specs as heedful eval policy reads them")
    return parser.parse_args()


if __name__ == "__main__":
    main()
