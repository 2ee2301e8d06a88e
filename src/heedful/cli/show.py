"""`heedful show`: what a model is made of, and what a token of it costs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.weights.source_names import default_model

if TYPE_CHECKING:
    from heedful.models.config import ModelConfig
    from heedful.weights.sources import ResolvedModel


def show(
    model: Annotated[str, typer.Argument(help="Alias, path, hf:org/name or wheel:…")] = default_model,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a model's config, its size, the memory that 1,000 tokens take, and the visits that one token makes."""
    from heedful.weights.load import load_config
    from heedful.weights.load_encoder import names_encoder
    from heedful.weights.sources import resolve

    found = resolve(model)
    is_encoder = names_encoder(found.path)
    facts = _encoder_facts(found) if is_encoder else _facts(model, found.path, found.licence, load_config(found.path))
    if json_output:
        print(json.dumps(facts))
    elif is_encoder:
        _print_rows(_encoder_rows(facts))
    else:
        _print_table(facts)


def _facts(name: str, path: Path, licence: str | None, config: ModelConfig) -> dict[str, Any]:
    from heedful.cost.formulas import KV_FORMATS, Shape, decode_cost
    from heedful.cost.meter import windows_in_words
    from heedful.cost.quality import measured_policies

    rows = 2 * config.num_kv_heads * len(config.windows)  # of one token: K and V of every KV head of every such layer
    weights = config.linear_weights + config.head_weights * (1 if config.tied_head else 2)
    contexts = sorted({1024, min(8192, config.context_len), config.context_len})
    return {
        "model": name,
        "path": str(path),
        "licence": licence,
        "family": config.family,
        "layers": config.num_layers,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "vocabulary": config.vocab_size,
        "context": config.context_len,
        "windows": windows_in_words(config.windows),
        "delta_layers": len(config.delta_layers),
        "state_bytes": config.state_bytes,
        "weights": weights,
        "file_bytes": _file_bytes(path),
        "torch_memory_bytes": 4 * weights,
        "kv_bytes_per_1000_tokens": {
            k: 1000 * rows * row_bytes(config.head_dim) for k, row_bytes in KV_FORMATS.items()
        },
        "visits_per_token": {
            str(context): decode_cost(Shape.from_config(config), context).visits
            for context in contexts
            if context <= config.context_len
        },
        "measured_policies": {policy: asdict(found) for policy, found in measured_policies(name).items()},
    }


def _file_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sum(p.stat().st_size for p in files)


def _encoder_facts(found: ResolvedModel) -> dict[str, Any]:
    from heedful.cost.encoder_receipt import bidirectional_visits
    from heedful.models.encoder_config import encoder_config_from_hf
    from heedful.weights.load import gguf_or_folder, read_json
    from heedful.weights.sentence_files import read_pooling

    folder = gguf_or_folder(found.path)
    config, pooling = encoder_config_from_hf(read_json(folder / "config.json")), read_pooling(folder)
    longest = min(config.context_len, pooling.max_tokens or config.context_len)
    weights = config.matrix_weights + config.embedding_weights
    return {
        "model": found.name,
        "path": str(found.path),
        "licence": found.licence,
        "family": config.family,
        "layers": config.num_layers,
        "local_layers": sum(window is not None for window in config.windows),
        "heads": config.num_heads,
        "head_dim": config.head_dim,
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "vocabulary": config.vocab_size,
        "context": config.context_len,
        "max_tokens": longest,
        "pooling": pooling.mode,
        "normalize": pooling.normalize,
        "weights": weights,
        "file_bytes": _file_bytes(found.path),
        "torch_memory_bytes": 4 * (config.linear_weights + config.embedding_weights),
        "visits_per_text": {
            str(length): bidirectional_visits([length], config.layer_windows, config.num_heads).total
            for length in sorted({min(16, longest), longest})
        },
    }


def _who_sees_whom(facts: dict[str, Any]) -> str:
    local = facts["local_layers"]
    everywhere = "every token sees every token"
    return f"{local} of them local; in the others {everywhere}" if local else everywhere


def _encoder_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    from heedful.cost.receipt import human

    return [
        ("model", f"{facts['model']} ({facts['family']}, an encoder: heedful embed)"),
        ("path", facts["path"]),
        ("licence", facts["licence"] or "not stated"),
        ("layers", f"{facts['layers']} ({_who_sees_whom(facts)})"),
        ("heads", f"{facts['heads']}, {facts['head_dim']} channels each"),
        ("hidden, MLP", f"{facts['hidden']:,}, {facts['intermediate']:,}"),
        ("vocabulary", f"{facts['vocabulary']:,}"),
        ("longest text", f"{facts['max_tokens']:,} tokens of a context of {facts['context']:,}"),
        ("vectors", f"{facts['hidden']:,} numbers, pooled by {facts['pooling']}"
                    f"{', of length 1' if facts['normalize'] else ''}"),
        ("weights", f"{human(facts['weights'])}, {human(facts['file_bytes'])}B on disk, "
                    f"{human(facts['torch_memory_bytes'])}B in memory"),
        *((f"visits at {int(n):,}", f"{visits:,} a text") for n, visits in facts["visits_per_text"].items()),
    ]  # fmt: skip


def _print_table(facts: dict[str, Any]) -> None:
    from heedful.cost.receipt import human

    kv = facts["kv_bytes_per_1000_tokens"]
    windows = ", ".join(f"{count} × {window}" for window, count in facts["windows"].items())
    rows = [
        ("model", f"{facts['model']} ({facts['family']})"),
        ("path", facts["path"]),
        ("licence", facts["licence"] or "not stated"),
        ("layers", f"{facts['layers']} (attention window: {windows}{_delta_layers(facts)})"),
        ("heads", f"{facts['heads']} query, {facts['kv_heads']} KV, {facts['head_dim']} channels each"),
        ("hidden, MLP", f"{facts['hidden']:,}, {facts['intermediate']:,}"),
        ("vocabulary", f"{facts['vocabulary']:,}"),
        ("context", f"{facts['context']:,} tokens"),
        ("weights", f"{human(facts['weights'])}, {human(facts['file_bytes'])}B on disk and about as much in memory; "
                    f"{human(facts['torch_memory_bytes'])}B with --runner torch"),
        ("KV of 1,000 tokens", ", ".join(f"{human(size)}B {name}" for name, size in kv.items())),
        *([("state", f"{human(facts['state_bytes'])}B a sequence, of any length")] if facts["state_bytes"] else []),
        *((f"visits at {int(n):,}", f"{visits:,} a token") for n, visits in facts["visits_per_token"].items()),
    ]  # fmt: skip
    _print_rows(rows)
    _print_policies(facts["measured_policies"])


def _delta_layers(facts: dict[str, Any]) -> str:
    count = facts["delta_layers"]
    return f"; {count} of gated DeltaNet" if count else ""


def _print_rows(rows: list[tuple[str, str]]) -> None:
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"{label:<{width}}  {value}")


def _print_policies(measured: dict[str, Any]) -> None:
    if not measured:
        return
    width = max(len("measured policy"), *map(len, measured))
    print(
        f"\n{'measured policy':<{width}}  {'mean KLD':>8}  {'p99 KLD':>8}  {'ΔNLL':>8}  facts found (exact attention)"
    )
    for policy, found in measured.items():
        loss, needles = found["passage"], found["needles"]
        facts = "not measured" if needles is None else f"{needles['recall']:.0%} ({needles['exact_recall']:.0%})"
        print(
            f"{policy:<{width}}  {loss['mean_kld']:>8.5f}  {loss['p99_kld']:>8.5f}  {loss['mean_delta_nll']:>+8.5f}"
            f"  {facts}"
        )
