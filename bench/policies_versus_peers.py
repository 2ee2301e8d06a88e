"""Decoding under several cache policies beside the peers with every KV type that they have, in one run.

    python bench/policies_versus_peers.py MODEL.gguf --llama PYTHON --ik PYTHON [--fill 7000] [--policy kv=q8 …]
    python bench/policies_versus_peers.py MODEL.gguf --fill 64 32000

A peer's figure is its best over KV types and flash attention on and off. The prompt is read sparsely, to spare minutes:
decoding reads all of it. Beyond the model's context its weights serve for speed alone: what is answered means nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import replace
from pathlib import Path

from heedful import CachePolicy, hardware
from heedful.cache.policy_text import parse_policy
from heedful.engine.engine import Engine
from heedful.engine.make_runner import make_runner
from heedful.engine.speed import measure_speed
from heedful.weights.load import load

HERE = Path(__file__).parent
POLICIES = ("kv=f16", "kv=q8", "kv=q4", "kv=q8,budget=1024", "kv=q4,budget=1024")


def main() -> None:
    args = _arguments()
    engine = _engine(args.model, max(args.fill))
    rows = []
    for context in args.fill:
        own = {spec: [_decode(engine, context, spec) for _ in range(args.rounds)] for spec in args.policy}
        peers = {name: _peer(name, python, args.model, context) for name, python in _peers(args).items()}
        rows.append({"context": context, "heedful": {spec: max(rates) for spec, rates in own.items()}, **peers})
        _print_row(rows[-1])
    print(json.dumps({"model": args.model, "rows": rows}))


def _engine(model: str, longest: int) -> Engine:
    loaded, machine = load(model), hardware.detect()
    context_len = max(loaded.config.context_len, longest + 64)
    loaded = replace(loaded, config=replace(loaded.config, context_len=context_len))
    runner = make_runner(
        loaded,
        kind="native",
        kv_format=None,
        weights_format=None,
        context_len=context_len,
        threads=machine.threads,
        free_memory_bytes=machine.free_memory_bytes,
    )
    return Engine(runner, model_name=model, context_len=context_len, eos_ids=())


def _decode(engine: Engine, context: int, spec: str) -> float:
    policy: CachePolicy = replace(
        parse_policy(spec), sparse_prefill=True
    )  # decoding reads all, whatever the prompt did
    return measure_speed(engine, context, policy=policy, repeats=5).decode_tok_s


def _peers(args: argparse.Namespace) -> dict[str, str]:
    return {name: python for name in ("llama", "ik") if (python := getattr(args, name))}


def _peer(name: str, python: str, model: str, context: int) -> float:
    script = {"llama": "peer_llama_cpp.py", "ik": "peer_ik_llama.py"}[name]
    types = ["--kv", "f16", "q8_0", "q4_0"] if name == "llama" else []
    command = [python, str(HERE / script), model, "--fill", str(context), *types]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return float(max(case["decode_tok_s"] for case in cases))


def _print_row(row: dict) -> None:
    peers = {name: row[name] for name in ("llama", "ik") if name in row}
    best = max(peers.values(), default=None)
    print(f"\ncontext {row['context']:,}: " + ", ".join(f"{name} {rate:.1f}" for name, rate in peers.items()))
    for spec, rate in row["heedful"].items():
        to_peer = f"{rate / best:>8.2f} x the better peer" if best else ""
        print(f"{spec:<20}{rate:>8.1f} tok/s{rate / row['heedful'].get('kv=q8', rate):>8.2f} x q8{to_peer}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--llama", help="interpreter that has llama-cpp-python")
    parser.add_argument("--ik", help="interpreter that has ik-llama-cpp-python")
    parser.add_argument("--fill", type=int, nargs="+", default=[7000])
    parser.add_argument("--policy", nargs="+", default=list(POLICIES))
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
