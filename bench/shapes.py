"""Two shapes beyond one SmolLM2: a synthetic 1.5B model (random Q4_0 weights), and a batch of sequences.

    python bench/shapes.py [--batch 8] [--threads N]

The big model's decode speed at context 512 beside the limit that the memory's speed sets; tokens/s of a batch over one
sequence's. A table, and a JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
from time import perf_counter
from typing import Any

import numpy as np

from heedful import LLM, hardware
from heedful.engine.engine import Engine
from heedful.engine.native_runner import NativeRunner
from heedful.engine.speed import measure_speed
from heedful.models.config import ModelConfig
from heedful.models.rope import Rope
from heedful.request import Request, SamplingParams
from heedful.weights.tensor import StoredTensor

BIG = ModelConfig(
    family="llama",
    vocab_size=151936,
    hidden_size=1536,
    num_layers=28,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    intermediate_size=8960,
    context_len=4096,
    windows=(None,) * 28,
    rope=Rope(128, 1e6),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=hardware.detect().threads)
    args = parser.parse_args()
    big, batch = big_model(args.threads), batched(args.batch, args.threads)
    print(f"1.5B, Q4_0, context 512: {big['decode_tok_s']:.1f} tok/s of {big['limit_tok_s']:.1f} ({big['share']:.0%})")
    print(f"SmolLM2, {args.batch} sequences: {batch['tok_s']:.0f} tok/s, one: {batch['alone_tok_s']:.0f}", end=" ")
    print(f"({batch['ratio']:.2f} ×)")
    print(json.dumps({"bench": "shapes", "big": big, "batch": batch}))


def big_model(threads: int) -> dict[str, Any]:
    runner = NativeRunner(BIG, random_weights(BIG), capacity_tokens=1024, threads=threads)
    engine = Engine(runner, model_name="1.5B", context_len=1024, eos_ids=())
    bandwidth = hardware.measure_read_bandwidth(threads)
    case = measure_speed(engine, 512)
    limit = bandwidth / case.bytes_per_token
    return {
        "decode_tok_s": case.decode_tok_s,
        "prefill_tok_s": case.prefill_tok_s,
        "limit_tok_s": limit,
        "share": case.decode_tok_s / limit,
        "read_bandwidth": bandwidth,
    }


def random_weights(config: ModelConfig) -> dict[str, StoredTensor]:
    attention, kv = config.num_heads * config.head_dim, config.kv_channels
    hidden, wide = config.hidden_size, config.intermediate_size
    shapes = {
        "attn.q": (attention, hidden),
        "attn.k": (kv, hidden),
        "attn.v": (kv, hidden),
        "attn.out": (hidden, attention),
        "mlp.gate": (wide, hidden),
        "mlp.up": (wide, hidden),
        "mlp.down": (hidden, wide),
    }
    rng = np.random.default_rng(0)
    weights = {"embed.weight": q4_0(rng, config.vocab_size, hidden), "norm.weight": ones(hidden)}
    for layer in range(config.num_layers):
        weights |= {f"layers.{layer}.{name}.weight": q4_0(rng, *shape) for name, shape in shapes.items()}
        weights |= {f"layers.{layer}.{name}.weight": ones(hidden) for name in ("attn_norm", "mlp_norm")}
    return weights


def q4_0(rng: np.random.Generator, rows: int, columns: int) -> StoredTensor:
    blocks = rng.integers(0, 256, (rows, columns // 32, 18), dtype=np.uint8)
    blocks[:, :, :2] = np.frombuffer(np.float16(0.2 / columns**0.5).tobytes(), dtype=np.uint8)
    return StoredTensor("random", "Q4_0", (rows, columns), blocks.reshape(rows, -1))


def ones(size: int) -> StoredTensor:
    return StoredTensor("ones", "F32", (size,), np.ones((1, size), dtype=np.float32).view(np.uint8))


def batched(batch: int, threads: int) -> dict[str, Any]:
    engine = LLM("smollm2", threads=threads).engine
    alone = decode_rate(engine, 1)
    together = decode_rate(engine, batch)
    return {"sequences": batch, "tok_s": together, "alone_tok_s": alone, "ratio": together / alone}


def decode_rate(engine: Engine, sequences: int, context: int = 64, steps: int = 48) -> float:
    params = SamplingParams(max_tokens=steps + 8, ignore_eos=True)
    running = [engine.add(Request(tuple(range(10 + i, 10 + i + context)), params)) for i in range(sequences)]
    while any(sequence.output_len == 0 for sequence in running):
        engine.step()
    seconds = []
    for _ in range(steps):
        began = perf_counter()
        engine.step()
        seconds.append(perf_counter() - began)
    while engine.scheduler.has_work:
        engine.step()
    for sequence in running:
        engine.receipt(sequence)
    return sequences / statistics.median(seconds)


if __name__ == "__main__":
    main()
