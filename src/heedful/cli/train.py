"""`heedful train`: from text files, or from a base and rows, to a model that every other verb runs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.errors import BadParameter, HeedfulError

if TYPE_CHECKING:
    from heedful.train.chat_rows import Piece
    from heedful.train.loop import Outcome
    from heedful.train.settings import TrainSettings


def train(
    out: Annotated[Path, typer.Option(help="Folder of the run, as runs/NAME.")],
    data: Annotated[
        list[Path] | None, typer.Option(help='A text file, or *.jsonl with {"text": …} a line; may be given again.')
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="Begin from this model, as any verb names one; default: fresh weights.")
    ] = None,
    chat: Annotated[
        list[Path] | None,
        typer.Option(
            help='JSONL with {"messages": […]} or {"prompt": …, "completion": …} a line; answers are learned.'
        ),
    ] = None,
    preferences: Annotated[
        list[Path] | None,
        typer.Option(help='JSONL with {"prompt": …, "chosen": …, "rejected": …} a line: DPO; may be given again.'),
    ] = None,
    decisions: Annotated[
        list[Path] | None,
        typer.Option(help='JSONL with {"state": …, "questions": {…}, "expected": {…}} a line; may be given again.'),
    ] = None,
    lora: Annotated[
        int | None, typer.Option(help="Train low-rank updates of this rank; the base stays as its file has it.")
    ] = None,
    validation: Annotated[
        list[Path] | None, typer.Option(help="Judge by this file; default: a share of the data is kept apart.")
    ] = None,
    size: Annotated[str | None, typer.Option(help="tiny, small or medium: sets all that is not given.")] = None,
    layers: Annotated[int | None, typer.Option(help="The same dial as a number.")] = None,
    steps: Annotated[int | None, typer.Option(help="Updates of the weights; with --resume, a new last one.")] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Most tokens of a step; default: 8 contexts.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens that the model sees at most.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="bpe, trained on the data, or bytes.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Tokens of the bpe.")] = None,
    lr: Annotated[float | None, typer.Option(help="The highest learning rate.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adamw or muon.")] = None,
    schedule: Annotated[str | None, typer.Option(help="wsd or cosine.")] = None,
    prompt: Annotated[str | None, typer.Option(help="What the samples go on from.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same model.")] = None,
    threads: Annotated[int | None, typer.Option(help="Processors to use; default: all.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML or JSON with any of the settings.")] = None,
    assign: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting, as optim.clip=0.5; may be given again.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would take, and train nothing.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="With --dry-run: print one JSON object.")] = False,
) -> None:
    """Train a model on text, or a base on chats, preferences or decisions. Ctrl-C saves; OUT/metrics.jsonl has all."""
    given = {
        "data.files": [str(path) for path in data] if data else None,
        "data.validation": [str(path) for path in validation] if validation else None,
        "model.base": base,
        "data.chat": [str(path) for path in chat] if chat else None,
        "data.preferences": [str(path) for path in preferences] if preferences else None,
        "data.decisions": [str(path) for path in decisions] if decisions else None,
        "lora.rank": lora,
        "model.size": size,
        "model.layers": layers,
        "run.steps": steps,
        "optim.batch_tokens": batch_tokens,
        "model.context_len": context,
        "data.tokenizer": tokenizer,
        "data.vocab_size": vocab_size,
        "optim.lr": lr,
        "optim.optimizer": optimizer,
        "optim.schedule": schedule,
        "run.sample_prompt": prompt,
        "run.seed": seed,
        "run.threads": threads,
    }
    values = {name: value for name, value in given.items() if value is not None}
    _require_torch()
    if resume:
        _leave(_resume(out, steps, [*values, *(["--config"] if config else [])], assign or [], dry_run))
    settings = _settings(values, config, assign or [])
    if dry_run:
        _print_estimate(settings, json_output)
        return
    from heedful.train.loop import begin

    _leave(begin(out, settings, say=_say, show=_show if sys.stdout.isatty() else None))


def _settings(values: dict[str, Any], config: Path | None, assigned: list[str]) -> TrainSettings:
    """A config file, then the options, then --set."""
    from heedful.train.settings import TrainSettings, changed, from_file, from_words

    in_file = {} if config is None else from_file(config)
    return changed(TrainSettings(), {**in_file, **values, **from_words(assigned)})


def _resume(out: Path, steps: int | None, given: list[str], words: list[str], dry_run: bool) -> Outcome:
    from heedful.train.loop import resume
    from heedful.train.settings import TrainSettings, changed, from_words

    assigned = from_words(words)
    others = [name for name in given if name != "run.steps"]
    others += [name for name in assigned if not name.startswith("parallel.")]
    if others or dry_run:
        raise BadParameter(
            "--resume", f"goes on with the settings of the run; {', '.join(others) or '--dry-run'} cannot be given",
            "Only --steps may be, and --set parallel.….",
        )  # fmt: skip
    parallel = changed(TrainSettings(), assigned).parallel if assigned else None
    return resume(out, steps=steps, parallel=parallel, say=_say)


def _leave(outcome: Outcome) -> None:
    raise typer.Exit(0 if outcome.stopped_by is None else 128 + outcome.stopped_by)


def _say(line: str) -> None:
    typer.echo(line)


def _show(found: list[Piece]) -> None:
    from rich.console import Console
    from rich.text import Text

    text = Text.assemble(*((piece.text, "bold green" if piece.learned else "dim") for piece in found))
    console = Console()
    console.print("the first row; green is learned, grey is context:", highlight=False)
    console.print(text, soft_wrap=True)


def _print_estimate(settings: TrainSettings, as_json: bool) -> None:
    from heedful.train.estimate import estimate, in_words
    from heedful.train.loop import complete
    from heedful.train.processes import from_environment

    if (size := from_environment().size) > 1:
        raise BadParameter("--dry-run", f"is for one process, {size} are there", "Run it without torchrun.")
    settings = complete(settings)
    found = estimate(settings)
    print(json.dumps(asdict(found)) if as_json else in_words(found, settings))


def _require_torch() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise HeedfulError("training needs PyTorch, which is not installed", "pip install 'heedful[torch]'")
