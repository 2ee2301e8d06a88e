"""`heedful route`: what a policy does with requests, what its thresholds should be, what it has spent."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.cli.json_rows import json_lines, json_value, print_json
from heedful.cli.plain_values import PlainCommand, PlainGroup
from heedful.errors import BadParameter, UsageError
from heedful.weights.source_names import default_model

if TYPE_CHECKING:
    from heedful.router.choose import Ask, Choice, Chooser
    from heedful.router.outcomes import Labelled, Row
    from heedful.router.policy import Policy

app = typer.Typer(
    cls=PlainGroup,
    help="See and calibrate where the model `auto` of heedful serve --router sends requests.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
LONGEST_ASKING_S = 60.0
HELD_OUT = 0.3

PolicyFile = Annotated[Path, typer.Option("--policy", "-p", help="YAML or TOML; docs/routing.md says what is in it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("explain", cls=PlainCommand)
def explain(
    text: Annotated[str, typer.Argument(help="What a user would say; - is stdin.")],
    policy: PolicyFile,
    json_output: AsJson = False,
) -> None:
    """Say where one request would go, and why. No target is asked."""
    from heedful.router.signals import Asked

    text = sys.stdin.read() if text == "-" else text
    chooser = _chooser(policy)
    choice = asyncio.run(chooser.choose(Asked.of_text(text)))
    if choice.answers:  # the first time it was loaded, which a server does at its start
        choice = asyncio.run(chooser.choose(Asked.of_text(text)))
    _warn(chooser)
    if json_output:
        print_json({**choice.to_dict(), "answers": choice.answers, "signals": choice.signals})
    else:
        _print_choice(choice, chooser)


@app.command("dry-run", cls=PlainCommand)
def dry_run(
    file: Annotated[Path, typer.Argument(help='JSONL of {"prompt": …} or {"messages": …}; - is stdin.')],
    policy: PolicyFile,
) -> None:
    """Say where each request of a file would go: a line of JSON each, and the shares on stderr. No target is asked."""
    from heedful.router.outcomes import asked_from_json

    chooser = _chooser(policy)
    _warn(chooser)
    counts: Counter[str] = Counter()

    async def run() -> None:
        for number, line in json_lines(file, "FILE"):
            value = json_value(line)
            if not isinstance(value, dict):
                raise BadParameter("FILE", f"line {number:,} is no JSON object")
            choice = await chooser.choose(asked_from_json(value, f"line {number:,}"))
            counts[choice.target] += 1
            print_json({"line": number, **choice.to_dict()})

    asyncio.run(run())
    if not counts:
        raise BadParameter("FILE", f"{file} has no requests")
    shares = ", ".join(f"{name} {n:,} ({n / counts.total():.0%})" for name, n in counts.most_common())
    print(f"{counts.total():,} requests: {shares}", file=sys.stderr)


@app.command("calibrate", cls=PlainCommand)
def calibrate(
    policy: PolicyFile,
    rows: Annotated[Path, typer.Option("--rows", help='JSONL of {"prompt": …, "check": {"number": 42}}; - is stdin.')],
    error: Annotated[float, typer.Option(help="Of what a calibrated route takes, at most so much is wrong.")] = 0.05,
    margin: Annotated[float, typer.Option(help="Quality may be so much lower and still count as kept.")] = 0.01,
    validate: Annotated[float, typer.Option(help="Share of the rows to measure on, and not to fit on.")] = HELD_OUT,
    out: Annotated[Path | None, typer.Option(help="Where to write it; default: where the policy looks for it.")] = None,
    threads: Annotated[int | None, typer.Option(help="Processors to use; default: all.")] = None,
    json_output: AsJson = False,
) -> None:
    """Ask every target every row, fit the thresholds of calibrated routes, and report quality against cost."""
    from heedful.router.policy import CALIBRATED
    from heedful.router.policy_file import load_policy

    for option, share in (("--error", error), ("--validate", validate)):
        if not 0 < share < 1:
            raise BadParameter(option, "must be more than 0 and less than 1")
    if not 0 <= margin < 1:
        raise BadParameter("--margin", "must be at least 0 and less than 1")
    found = load_policy(policy)
    target_file = out or (found.decision.calibration if found.decision else None)
    if not any(route.min_p == CALIBRATED for route in found.routes):
        raise UsageError(f"{policy} has no route to calibrate", "Give one min_p: calibrated.")
    assert target_file is not None, found
    from heedful.router.outcomes import row_from_json

    lines = list(json_lines(rows, "--rows"))
    read = [row_from_json(json_value(line), f"line {number:,}") for number, line in lines]
    if not read:
        raise BadParameter("--rows", f"{rows} has no rows")
    labelled = _labelled(found, read, threads)
    rows_sha256 = hashlib.sha256(b"".join(line for _, line in lines)).hexdigest()
    options = {"error": error, "margin": margin, "validate": validate}
    _report(found, labelled, rows_sha256, target_file, options, json_output)


@app.command("report", cls=PlainCommand)
def report(
    ledger: Annotated[Path, typer.Argument(help="The ledger that the policy names.")], json_output: AsJson = False
) -> None:
    """Sum a ledger: requests and costs by target and phase, and what the random slice says of other targets."""
    from heedful.cli.route_tables import print_ledger
    from heedful.router.ledger import read_ledger
    from heedful.router.ledger_sums import ledger_sums

    sums = ledger_sums(read_ledger(ledger))
    if json_output:
        print_json(sums.to_dict())
    else:
        print_ledger(sums)


def _chooser(path: Path) -> Chooser:
    """The policy's decider gets all the time that it needs: what it took is said, not punished."""
    from heedful.router.choose import Chooser
    from heedful.router.policy_file import load_policy
    from heedful.router.thresholds import decider_identity, thresholds_of

    policy = load_policy(path)
    if policy.decision is None:
        return Chooser(policy, None)
    from heedful.decide.load import default_decider

    name = policy.decision.model or default_decider()
    thresholds = thresholds_of(policy, decider_identity(name))
    patient = replace(policy, decision=replace(policy.decision, timeout_s=LONGEST_ASKING_S))
    return Chooser(patient, _ask(name), thresholds)


def _ask(name: str) -> Ask:
    """The decider is loaded when it is first asked: a rule may do without it."""
    from heedful.decide.load import load_decider
    from heedful.router.choose import Judged

    loaded = functools.cache(lambda: load_decider(name))

    async def ask(text: str, questions: Any, salt: str) -> Judged:
        answers = await asyncio.to_thread(lambda: loaded().decide(text, questions))
        return Judged(answers.answers, answers.receipt.to_dict())

    return ask


def _warn(chooser: Chooser) -> None:
    for warning in chooser.thresholds.warnings:
        print(f"heedful: {warning}", file=sys.stderr)


def _print_choice(choice: Choice, chooser: Chooser) -> None:
    from heedful.cli.route_tables import print_facts

    shown = chooser.policy.path.name
    certainty = "" if choice.p is None else f", probability {choice.p:.3f}"
    least = "" if choice.threshold is None else f", at least {choice.threshold:.3f} is wanted"
    signals = ", ".join(f"{name} {_shown(value)}" for name, value in choice.signals.items() if value)
    facts = {"target": choice.target, "because": f"{choice.cause}{certainty}{least}"}
    if choice.max_tokens is not None:
        facts["max tokens"] = f"{choice.max_tokens:,}"
    if choice.forbidden:
        held = [one.condition.text for one in chooser.policy.constraints if one.condition.holds(choice.signals)]
        facts["forbidden"] = f"{', '.join(choice.forbidden)} ({'; '.join(held)})"
    facts["signals"] = signals or "none"
    for name, answer in choice.answers.items():
        said = answer.get("choice", answer.get("noul", answer.get("score")))
        facts[f"decider: {name}"] = said if isinstance(said, str) else f"{said:.3f}"
    version = choice.calibration_version or "none"
    facts["policy"] = f"{shown} {choice.policy_hash}, calibration {version}, {choice.router_ms:.1f} ms"
    print_facts(facts)


def _shown(value: bool | float | str) -> str:
    return "yes" if value is True else f"{value:g}" if isinstance(value, float) else str(value)


def _labelled(policy: Policy, rows: Sequence[Row], threads: int | None) -> list[Labelled]:
    """Through the targets that a server would ask, in one of its kind without a socket."""
    from heedful.cli.progress_bar import progress_bar
    from heedful.cli.serve import require_server

    require_server()
    from heedful.decide.load import find_decider, load_decider
    from heedful.engine.embedder import load_embedder
    from heedful.engine.llm import LLM
    from heedful.router.outcomes import label
    from heedful.server.app import make_app
    from heedful.server.routing import asker
    from heedful.server.settings import ServerSettings

    still = replace(policy, ledger=None, counterfactual=None)
    if still.decision is not None:
        still = replace(still, decision=replace(still.decision, calibration=None))  # it is being made
    models = policy.local_models or (default_model,)
    settings = ServerSettings(models=models, most_models_loaded=len(models) + 2, idle_unload_seconds=None)
    served = make_app(
        settings,
        lambda name: LLM(name, threads=threads),
        lambda name: load_embedder(name, threads=threads),
        lambda name: load_decider(name, threads=None if find_decider(name).kind == "jev" else threads),
        still,
    )

    async def run() -> list[Labelled]:
        async with served.router.lifespan_context(served):
            state = served.state.heedful
            with progress_bar("asking", len(rows)) as progress:
                return await label(rows, still, state.router.targets, asker(still, state), progress=progress)

    return asyncio.run(run())


def _report(
    policy: Policy,
    labelled: Sequence[Labelled],
    rows_sha256: str,
    path: Path,
    options: Mapping[str, float],
    json_output: bool,
) -> None:
    from heedful.cli.route_tables import print_report
    from heedful.decide.labelled_rows import is_held_out
    from heedful.decide.load import default_decider
    from heedful.router.calibrate import calibrate as calibrated
    from heedful.router.thresholds import decider_identity, write_calibration

    fitting = [one for one in labelled if not is_held_out(one.row.asked.text, options["validate"])]
    held_out = [one for one in labelled if is_held_out(one.row.asked.text, options["validate"])]
    for what, some in (("to fit on", fitting), ("held out", held_out)):
        if not some:
            raise BadParameter("--rows", f"there is no row {what}", "Give more rows, or hold out another share.")
    found = calibrated(fitting, held_out, policy, error=options["error"], margin=options["margin"])
    assert policy.decision is not None
    decider = decider_identity(policy.decision.model or default_decider())
    write_calibration(path, policy, decider, rows_sha256, found)
    if json_output:
        print_json({**found.to_dict(), "saved": str(path)})
    else:
        print_report(found, labelled)
    print(f"kept in {path}", file=sys.stderr)
