"""`heedful cost`: what attention costs, on paper. Needs no weights and fetches nothing.

Owns the options, what is refused, and the table. The counts are those of `heedful.cost`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.errors import BadParameter, SourceError

if TYPE_CHECKING:
    from rich.table import Table

    from heedful.cost.energy import Machine
    from heedful.cost.paper import Case, Question, Setting
    from heedful.cost.shapes import Dimensions
    from heedful.request import CachePolicy

Int = int | None
Float = float | None


STORED_AS = {"smollm2": "q4", "gemma3-270m": "q8", "minilm": "f32"}
"""Nearest format to that of the alias's file, as the native kernels hold it."""


def cost(
    model: Annotated[str | None, typer.Argument(help="Alias, model folder, config.json or GGUF file.")] = None,
    context: Annotated[Int, typer.Option(help="Tokens that one decoded token attends to; an encoder's text.")] = None,
    prompt: Annotated[Int, typer.Option(help="Instead: a request, with so many prompt tokens.")] = None,
    output: Annotated[Int, typer.Option(help="Output tokens of the request (1).")] = None,
    train_length: Annotated[
        Int, typer.Option(help="Instead: a training step, with documents of so many tokens.")
    ] = None,
    documents: Annotated[Int, typer.Option(help="Documents of the training step (1).")] = None,
    encoder: Annotated[bool, typer.Option("--encoder", help="Every token sees every token; none is decoded.")] = False,
    window: Annotated[
        Int, typer.Option(help="A token sees itself and the W - 1 before it (encoder: W/2 around it).")
    ] = None,
    sinks: Annotated[Int, typer.Option(help="With --window: first tokens that are seen nevertheless (0).")] = None,
    kv: Annotated[
        str | None, typer.Option(help="Number format of the KV rows: f32, f16, q8, q4, or k=q8,v=q4 (q8).")
    ] = None,
    precise: Annotated[
        Int, typer.Option(help="With 4-bit keys or values: newest tokens that stay 8-bit; 0: none (128).")
    ] = None,
    budget: Annotated[Int, typer.Option(help="Decoding reads the pages that matter only: so many tokens.")] = None,
    prefill: Annotated[
        str | None, typer.Option(help="dense, or sparse: prompt tokens see the first and the newest ones only.")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="Number format of the weights: f32, f16, q8, q4; default: the alias's own, or f16."),
    ] = None,
    layers: Annotated[Int, typer.Option(help="Numbers of a model, instead of MODEL or over it: layers.")] = None,
    heads: Annotated[Int, typer.Option(help="Query heads of a layer.")] = None,
    kv_heads: Annotated[Int, typer.Option(help="Key and value heads of a layer.")] = None,
    head_dim: Annotated[Int, typer.Option(help="Channels of a head.")] = None,
    hidden: Annotated[Int, typer.Option(help="Channels of a token between layers.")] = None,
    intermediate: Annotated[Int, typer.Option(help="Channels inside the MLP.")] = None,
    vocab: Annotated[Int, typer.Option(help="Entries of the vocabulary.")] = None,
    local_global: Annotated[Int, typer.Option(help="Layers with --window for each layer without one.")] = None,
    bandwidth: Annotated[Float, typer.Option(help="Memory bandwidth in GB/s (31).")] = None,
    gflops: Annotated[Float, typer.Option(help="Arithmetic peak in GFLOP/s (350).")] = None,
    watts: Annotated[Float, typer.Option(help="What the busy machine draws; else estimated from its 2 cores.")] = None,
    price_per_kwh: Annotated[Float, typer.Option(help="Price of electricity, in any currency.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Exact numbers as one JSON object.")] = False,
) -> None:
    """Count what attention costs for any model, length and policy: visits, KV bytes, FLOPs, time, energy, price.

    The model is an alias, a file or numbers alone. It needs no weights and downloads nothing.
    """  # fmt: skip
    from heedful.cost.paper import Case

    given = {
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "hidden": hidden,
        "intermediate": intermediate,
        "vocab": vocab,
    }
    work = {
        "context": context,
        "prompt": prompt,
        "output": output,
        "train_length": train_length,
        "documents": documents,
    }
    _check_counts({**given, **work, "window": window, "local_global": local_global, "budget": budget}, least=1)
    _check_counts({"sinks": sinks, "precise": precise}, least=0)
    setting = _setting(weights or STORED_AS.get(model or "", "f16"), bandwidth, gflops, watts, price_per_kwh)
    dimensions = _dimensions(model, given, encoder)
    cached = {"sinks": sinks, "kv": kv, "precise": precise, "budget": budget, "prefill": prefill}
    question = _question(work, dimensions, cached)
    if local_global is not None:  # the window is the model's own then, else a policy over the model's own
        dimensions, window = _local_global(dimensions, window, local_global), None
    policy = _policy(window, sinks, kv, precise, budget, prefill)
    asked = _Asked(model, dimensions.context_len, Case(question, dimensions.shape(), policy, setting))
    if json_output:
        _print_json(asked)
    else:
        _print_table(asked)


@dataclass(frozen=True)
class _Asked:
    """A checked command line."""

    model: str | None
    context_len: int | None
    """What the model was made for, in tokens."""
    case: Case

    @property
    def name(self) -> str:
        shape = self.case.shape
        return self.model or f"{shape.layers:,} layers of {shape.heads:,} heads"

    @property
    def policy(self) -> dict[str, Any]:
        """As JSON shows it; number formats only where something is cached."""
        asked, resolved = self.case.policy, self.case.page_policy
        shown: dict[str, Any] = {"window": asked.window, "sinks": asked.sinks, "kv": None}
        if self.case.question.kind in ("decode", "request"):
            from heedful.cache.policy import PAGE_LEN

            budget = None if resolved.budget_pages is None else resolved.budget_pages * PAGE_LEN
            prefill = "sparse" if asked.sparse_prefill else "dense"
            precise = {"precise": resolved.precise_len} if resolved.is_mixed else {}
            shown |= {"kv": self.case.kv_format, **precise, "budget": budget, "prefill": prefill}
        return shown


# ---- options to numbers -------------------------------------------------------------------------------------------

LARGEST = 10**18
"""Of any count given: beyond all models, and seconds and joules made of it still fit a float."""


def _flag(parameter: str) -> str:
    return "--" + parameter.replace("_", "-")


def _check_counts(given: dict[str, Int], least: int) -> None:
    for parameter, value in given.items():
        if value is not None and not least <= value <= LARGEST:
            raise BadParameter(_flag(parameter), f"must be {least} to {LARGEST:,}, not {value:,}")


def _check_measures(given: dict[str, Float]) -> None:
    for parameter, value in given.items():
        if value is not None and not (isfinite(value) and 1e-6 <= value <= 1e12):
            raise BadParameter(_flag(parameter), f"must be 1e-6 to 1e12, not {value}")


def _setting(weights: str, bandwidth: Float, gflops: Float, watts: Float, price: Float) -> Setting:
    from heedful.cost.formulas import WEIGHT_BLOCK_BYTES
    from heedful.cost.paper import Setting

    if weights not in WEIGHT_BLOCK_BYTES:
        raise BadParameter(
            "--weights", f"{weights!r} is not a number format", f"Known: {', '.join(WEIGHT_BLOCK_BYTES)}."
        )
    _check_measures({"bandwidth": bandwidth, "gflops": gflops, "watts": watts, "price_per_kwh": price})
    return Setting(weights, _machine(bandwidth, gflops, watts), price)


def _policy(window: Int, sinks: Int, kv: str | None, precise: Int, budget: Int, prefill: str | None) -> CachePolicy:
    from heedful.cli.policy_options import policy_from_options

    return policy_from_options(kv, precise, window, sinks or 0, budget, prefill or "dense")


def _machine(bandwidth: Float, gflops: Float, watts: Float) -> Machine:
    from heedful.cost.energy import Machine

    machine = Machine(watts=watts)
    if bandwidth is not None:
        machine = replace(machine, bytes_per_second=1e9 * bandwidth)
    if gflops is not None:
        machine = replace(machine, flops_per_second=1e9 * gflops)
    return machine


def _dimensions(model: str | None, given: dict[str, Int], encoder: bool) -> Dimensions:
    """The model's numbers under those given. A head's width follows from --hidden where nothing says it."""
    from heedful.cost.shapes import Dimensions

    found = known_dimensions(model) if model is not None else Dimensions(causal=not encoder, gated_mlp=not encoder)
    numbers = replace(found, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    if encoder:
        numbers = replace(numbers, causal=False)
    if numbers.head_dim is None and numbers.hidden and numbers.heads and numbers.hidden % numbers.heads == 0:
        numbers = replace(numbers, head_dim=numbers.hidden // numbers.heads)
    _check_dimensions(numbers)
    return numbers


def _check_dimensions(numbers: Dimensions) -> None:
    for parameter in ("layers", "heads"):
        if getattr(numbers, parameter) is None:
            remedy = "Give --layers and --heads, or a model: smollm2, gemma3-270m, minilm, or a file's path."
            raise BadParameter(_flag(parameter), "is not known", remedy)
    delta_layers = () if numbers.delta is None else numbers.delta.layers
    if (numbers.layers or 0) <= len(delta_layers):
        what = f"{numbers.layers:,} leave no attention layer beside {len(delta_layers)} of DeltaNet"
        raise BadParameter("--layers", what, "Leave it out.")
    if numbers.kv_heads is not None and (numbers.heads or 0) % numbers.kv_heads:
        raise BadParameter(
            "--kv-heads",
            f"{numbers.heads:,} query heads cannot share {numbers.kv_heads:,} KV heads evenly",
            "--heads must be a multiple of --kv-heads.",
        )


def known_dimensions(model: str) -> Dimensions:
    """Of an alias, or from the file of a local model."""
    from heedful.cost.shapes import KNOWN, Dimensions
    from heedful.weights.source_names import LocalPath, parse_source

    source = parse_source(model)
    if model in KNOWN:
        return KNOWN[model]
    if not isinstance(source, LocalPath):
        raise SourceError(
            f"{model} may not be on this machine, and `heedful cost` fetches nothing",
            "Give its numbers (--layers, --heads, ...), or the path of a config.json or a GGUF file.",
        )
    from heedful.models.config import config_from_hf
    from heedful.weights.load import load_config, read_json

    if source.path.suffix == ".json":
        return Dimensions.from_config(config_from_hf(read_json(source.path)))
    return Dimensions.from_config(load_config(source.path))


def _local_global(numbers: Dimensions, window: Int, local_global: int) -> Dimensions:
    from heedful.cost.shapes import local_global as windows_of

    if window is None:
        raise BadParameter("--local-global", "needs the window of the local layers", "Give --window too.")
    if local_global >= (numbers.layers or 0):
        raise BadParameter("--local-global", f"is {local_global:,}, with {numbers.layers:,} layers in all")
    return replace(numbers, windows=windows_of(window, local_global, numbers.causal))


def _question(work: dict[str, Int], numbers: Dimensions, cached: dict[str, Any]) -> Question:
    """`cached`: the options that only work with a cache may have."""
    from heedful.cost.paper import Question

    output, documents = work["output"], work["documents"]
    if (length := work["train_length"]) is not None:
        of_decoding = {name: value for name, value in cached.items() if name != "sinks"}
        _refuse(work, ("context", "prompt", "output"), "does not go with --train-length")
        _refuse(of_decoding, tuple(of_decoding), "does not go with --train-length: nothing is decoded or cached")
        return Question("training", length, documents=documents or 1)
    _refuse(work, ("documents",), "needs --train-length, the tokens of a document")
    if not numbers.causal:
        refused = {"prompt": work["prompt"], "output": output, **cached}
        _refuse(refused, tuple(refused), "does not go with an encoder: it decodes and caches nothing")
        return Question("encoder", _context(work["context"], numbers))
    if (prompt := work["prompt"]) is not None:
        _refuse(work, ("context",), "does not go with --prompt, which makes a context of its own")
        return Question("request", prompt, output=output or 1)
    _refuse(work, ("output",), "needs --prompt, the tokens before it")
    return Question("decode", _context(work["context"], numbers))


def _refuse(given: dict[str, Any], parameters: tuple[str, ...], why: str) -> None:
    for parameter in parameters:
        if given[parameter] is not None:
            raise BadParameter(_flag(parameter), why, "Leave out one of the two, or see `heedful cost --help`.")


def _context(given: Int, numbers: Dimensions) -> int:
    context = given if given is not None else numbers.context_len
    if context is None:
        raise BadParameter("--context", "is not known", "Say how many tokens are attended to.")
    return context


# ---- output -------------------------------------------------------------------------------------------------------


def _print_json(asked: _Asked) -> None:
    from heedful.cost.paper import report

    case = asked.case
    about = {
        "model": asked.model,
        "counted": asdict(case.question),
        "shape": asdict(case.shape),
        "policy": asked.policy,
        "machine": asdict(case.setting.machine),
    }
    print(json.dumps({**about, **report(case)}, indent=1))


def _print_table(asked: _Asked) -> None:
    from rich.console import Console

    from heedful.cost.paper import report

    found = report(asked.case)
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(_headline(asked, found), soft_wrap=True)
    console.print()
    console.print(_table(asked, found))
    console.print()
    for line in _notes(asked, found):
        console.print(line, soft_wrap=True)
    console.print(found["cheaper"], soft_wrap=True)


def _headline(asked: _Asked, found: dict[str, Any]) -> str:
    from heedful.cost.paper import percent

    question = asked.case.question
    subject = {
        "decode": f"one token decoded at context {question.tokens:,}",
        "request": f"a prompt of {question.tokens:,} tokens and {question.output:,} output tokens",
        "encoder": f"a text of {question.tokens:,} tokens",
        "training": f"a training step over {question.documents:,} x {question.tokens:,} tokens",
    }[question.kind]
    saved = sum(found["saved_share"].values())
    less = f", {percent(saved)} less than dense ({found['dense_visits']:,})" if saved else ""
    return f"{asked.name}: {subject} makes {found['visits']:,} token visits{less}."


def _table(asked: _Asked, found: dict[str, Any]) -> Table:
    from rich.table import Table

    parts = [(name, found.get(name)) for name in ("prefill", "decode", "encoder", "training")]
    columns = [(name, block) for name, block in parts if block and block["tokens"]]
    if asked.case.question.kind == "request":
        columns.append(("total", found))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", overflow="fold")
    for name, _ in columns:
        table.add_column(name, justify="right", overflow="fold")
    per_column = [dict(_cells(block, asked.case)) for _, block in columns]
    for label in per_column[0]:
        if any(cells[label] for cells in per_column):
            table.add_row(label, *(cells[label] for cells in per_column))
    return table


def _cells(block: dict[str, Any], case: Case) -> list[tuple[str, str]]:
    """(row, text) in the order of the table; no text for what is not known or of no use."""
    from heedful.cost.receipt import human

    kv, weights, saved = case.kv_format, case.setting.weight_format, block["saved"]
    counts = [
        ("tokens computed", block["tokens"]),
        ("token visits", block["visits"]),
        ("dense visits", block["dense_visits"] if any(saved.values()) else 0),
        ("saved by the window", saved["window"]),
        ("saved by choosing pages", saved["pages"]),
    ]
    flops = {f"FLOP, {name}": block["flops"][name] for name in ("attention", "linear", "selection")}
    amounts = [
        ("KV rows read", block["kv_rows_read"], ""),
        ("page bounds read", block["bounds_read"], ""),
        ("keys read to choose", block["keys_listed"], ""),
        *((f"KV read, {name}", size, "B") for name, size in (block["kv_bytes_read"] or {}).items()),
        (f"KV held, {kv}", (block["kv_bytes_held"] or {}).get(kv), "B"),
        (f"KV of a token, {kv}", (block["kv_bytes_per_token"] or {}).get(kv), "B"),
        *((label, count, "") for label, count in flops.items()),
        (f"weights read, {weights}", (block["weight_bytes_read"] or {}).get(weights), "B"),
    ]
    return [
        *((label, f"{count:,}" if count else "") for label, count in counts),
        ("share saved", _share_saved(block)),
        *((label, f"{human(number)}{unit}".strip() if number else "") for label, number, unit in amounts),
        *_estimates(block),
    ]


def _share_saved(block: dict[str, Any]) -> str:
    from heedful.cost.paper import percent

    share = sum(block["saved_share"].values())
    return percent(share) if share else ""


def _estimates(block: dict[str, Any]) -> list[tuple[str, str]]:
    from heedful.cost.energy import ESTIMATED
    from heedful.cost.paper import duration

    energy, price = block["energy"], block["price"]
    return [
        ("time, at least", "" if block["seconds"] is None else duration(block["seconds"])),
        (f"energy, {ESTIMATED}", _joules(energy["joules"]) if energy else ""),
        ("  between", f"{_joules(energy['low'])} and {_joules(energy['high'])}" if energy else ""),
        ("price of a token", f"{price['per_token']:.3g}" if price else ""),
        ("price of a million", f"{price['per_million_tokens']:.3g}" if price else ""),
    ]


def _joules(joules: float) -> str:
    from heedful.cost.receipt import human

    if joules < 1:
        return f"{1e3 * joules:.3g} mJ"
    return f"{joules:.3g} J" if joules < 1000 else f"{human(joules)}J"


def _notes(asked: _Asked, found: dict[str, Any]) -> list[str]:
    shape, tokens = asked.case.shape, asked.case.question.tokens
    notes = []
    if asked.context_len is not None and tokens > asked.context_len:
        notes.append(f"Note: {asked.name} was made for {asked.context_len:,} tokens.")
    notes += [f"Note: {what} saves nothing over {tokens:,} tokens." for what in _without_use(asked.case.policy, found)]
    if found["seconds"] is None:
        numbers = {"--kv-heads": shape.kv_heads, "--head-dim": shape.head_dim}
        missing = [flag for flag, number in numbers.items() if number is None]
        return [*notes, f"For bytes, time and energy give {' and '.join(missing)} as well."]
    machine = asked.case.setting.machine
    rates = f"{machine.bytes_per_second / 1e9:g} GB/s and {machine.flops_per_second / 1e9:g} GFLOP/s"
    notes.append(f"Time: {rates}, fully used; energy: an estimate. Measure with `heedful generate`.")
    if found["estimate_covers"] == "attention":
        notes.append(
            "Time and energy cover attention alone: give --hidden, --intermediate and --vocab for the weights."
        )
    return notes


def _without_use(policy: CachePolicy, found: dict[str, Any]) -> list[str]:
    """What was asked for and changes nothing."""
    settings = (
        (policy.window, f"a window of {policy.window or 0:,}", "window", found),
        (policy.budget, f"a budget of {policy.budget or 0:,}", "pages", found),
        (policy.sparse_prefill, "a sparse prefill", "window", found.get("prefill", found)),
    )
    return [what for asked_for, what, by, block in settings if asked_for and not block["saved"][by]]
