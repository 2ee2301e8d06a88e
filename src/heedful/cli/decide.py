"""`heedful decide`: typed questions about a state; probabilities to stdout, what it cost to stderr."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.cli.json_rows import print_json
from heedful.cli.policy_options import PackedWeights
from heedful.errors import BadParameter
from heedful.weights.source_names import default_model

if TYPE_CHECKING:
    from heedful.decide.answer import Answer, Answers
    from heedful.decide.decider import DecisionModel
    from heedful.decide.question import Question

DECIDERS = "A decider: alias, path, hf:org/name or wheel:…, the URL of a System One server, or jev."


def decide(
    state: Annotated[
        Path | None,
        typer.Option("--state", "-s", help="File with what is to be judged: text, a JSON object or array; - is stdin."),
    ] = None,
    text: Annotated[str | None, typer.Option("--text", "-t", help="What is to be judged itself, as text.")] = None,
    choice: Annotated[
        list[str] | None,
        typer.Option("--choice", help="NAME: QUESTION? OPTION, OPTION=MEANING, … The question is optional."),
    ] = None,
    score: Annotated[
        list[str] | None, typer.Option("--score", help="NAME: QUESTION? LEVEL | LEVEL | …, the lowest first.")
    ] = None,
    noul: Annotated[
        list[str] | None, typer.Option("--noul", help="NAME: QUESTION, to be answered by yes or no.")
    ] = None,
    questions: Annotated[
        Path | None, typer.Option("--questions", help="JSON file of them as System One has them, before those given.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help=f"{DECIDERS} Default: heedful-decider where it is installed, else {default_model}."
        ),
    ] = None,
    orders: Annotated[
        int | None, typer.Option("--orders", help="Chat models, Laya: show options in so many orders and average.")
    ] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut a state that does not fit; say how much.")] = False,
    calibration: Annotated[
        str,
        typer.Option(help="File of heedful calibrate, or none; default: what it kept for this decider, if anything."),
    ] = "kept",
    batch: Annotated[
        Path | None, typer.Option("--batch", help='JSONL of {"state": …, "questions"?: …, "id"?: …}; - is stdin.')
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="JSONL of a batch's answers; given again, it goes on; - is stdout.")
    ] = None,
    weights: PackedWeights = None,
    threads: Annotated[int | None, typer.Option(help="Processors to use; default: all.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object with the receipt.")] = False,
    receipt: Annotated[
        bool | None, typer.Option("--receipt/--no-receipt", help="Receipt line on stderr; default: when not piped.")
    ] = None,
) -> None:
    """Answer questions about a state with probabilities, and generate no text."""
    _require_one_input(state, text, batch, out)
    asked = _questions(choice or [], score or [], noul or [], questions, may_be_none=batch is not None)
    judged: Any = text if state is None else _state(state)
    from heedful.decide.load import default_decider, load_decider

    name = default_decider() if model is None else model

    def load() -> DecisionModel:
        return load_decider(
            name, orders=orders, threads=threads, truncate=truncate, weights=weights, calibration=calibration
        )

    if batch is not None:
        from heedful.cli.decide_batch import decide_batch

        settings = {"model": name, "orders": orders or 1, "truncate": truncate, "weights": weights}
        raise typer.Exit(decide_batch(batch, None if str(out) == "-" else out, asked, load, settings))
    answers = load().decide(judged, asked)
    if json_output:
        print_json({**answers.to_dict(), "receipt": answers.receipt.to_dict()})
    else:
        _print(answers)
    if receipt if receipt is not None else sys.stdout.isatty() and not json_output:
        print(answers.receipt.line(), file=sys.stderr)


def _require_one_input(state: Path | None, text: str | None, batch: Path | None, out: Path | None) -> None:
    given = [name for name, one in (("--state", state), ("--text", text), ("--batch", batch)) if one is not None]
    if not given:
        raise BadParameter("--state", "is missing", "Give what is to be judged: --state FILE, --text TEXT or --batch.")
    if len(given) > 1:
        raise BadParameter(given[1], f"cannot stand beside {given[0]}", "Give one of them.")
    if out is not None and batch is None:
        raise BadParameter("--out", "is for a batch", "Send the answer to a file by > FILE.")


def _questions(
    choices: list[str], scores: list[str], nouls: list[str], file: Path | None, *, may_be_none: bool
) -> tuple[Question, ...]:
    from heedful.decide.plain_questions import choice_from_text, noul_from_text, score_from_text
    from heedful.decide.question import checked_questions, questions_from_json

    found = [] if file is None else list(questions_from_json(_json(_text(file, "--questions"), "--questions")))
    found += [*map(choice_from_text, choices), *map(score_from_text, scores), *map(noul_from_text, nouls)]
    if not found and may_be_none:
        return ()
    if not found:
        raise BadParameter("questions", "there are none", "Give --choice, --score, --noul or --questions.")
    return checked_questions(found)


def _state(path: Path) -> Any:
    """A JSON object or array where the file is one; else its text as it stands."""
    text = _text(path, "--state")
    if path.suffix == ".json":
        return _json(text, "--state")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return data if isinstance(data, dict | list) else text


def _json(text: str, option: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadParameter(option, f"is not JSON: {str(error)[:100]}") from None


def _text(path: Path, option: str) -> str:
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise BadParameter(option, f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadParameter(option, f"{path} is not UTF-8 text (byte {error.start:,})", "Convert it first.") from error


def _print(answers: Answers) -> None:
    """A line a question, and one a probability below it."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character still gets the rest
    for name, answer in answers.items():
        print(f"{_line(name)}: {_line(_summary(answer))}")
        shown = answer.to_dict()
        legend = shown.get("legend", {})
        for label, probability in shown.get("probabilities", {}).items():
            print(f"  {probability:.3f}  {_line(label)}{_line(_meaning(legend.get(label)))}")


def _summary(answer: Answer) -> str:
    shown = answer.to_dict()
    if shown["type"] == "noul":
        return f"{'yes' if answer.value else 'no'}, probability of yes {shown['noul']:.3f}"
    value = shown["choice"] if shown["type"] == "choice" else f"{shown['score']:.2f}"
    return f"{value}, confidence {shown['confidence']:.3f}"


def _meaning(meaning: Any) -> str:
    return "" if meaning is None else f"  {meaning if isinstance(meaning, str) else json.dumps(meaning)}"


def _line(text: str) -> str:
    """Without what would move a cursor."""
    return "".join(c if c.isprintable() else " " for c in text)
