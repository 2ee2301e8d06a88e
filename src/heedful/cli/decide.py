"""`heedful decide`: typed questions about a state; probabilities to stdout, what it cost to stderr."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.errors import BadParameter
from heedful.weights.source_names import default_model

if TYPE_CHECKING:
    from heedful.decide.answer import Answer, Answers
    from heedful.decide.question import Question


def decide(
    state: Annotated[
        Path,
        typer.Option("--state", "-s", help="File with what is to be judged: text, a JSON object or array; - is stdin."),
    ],
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
        str, typer.Option("--model", "-m", help="A chat model, the URL of a System One server, or jev.")
    ] = default_model,
    orders: Annotated[
        int, typer.Option("--orders", help="Chat models: show options in so many orders and average.")
    ] = 1,
    threads: Annotated[int | None, typer.Option(help="Processors to use; default: all.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object with the receipt.")] = False,
    receipt: Annotated[
        bool | None, typer.Option("--receipt/--no-receipt", help="Receipt line on stderr; default: when not piped.")
    ] = None,
) -> None:
    """Answer questions about a state with probabilities, and generate no text."""
    asked = _questions(choice or [], score or [], noul or [], questions)
    judged = _state(state)
    from heedful.decide.load import load_decider

    answers = load_decider(model, orders=orders, threads=threads).decide(judged, asked)
    if json_output:
        print(json.dumps({**answers.to_dict(), "receipt": answers.receipt.to_dict()}, ensure_ascii=False))
    else:
        _print(answers)
    if receipt if receipt is not None else sys.stdout.isatty() and not json_output:
        print(answers.receipt.line(), file=sys.stderr)


def _questions(choices: list[str], scores: list[str], nouls: list[str], file: Path | None) -> tuple[Question, ...]:
    from heedful.decide.plain_questions import choice_from_text, noul_from_text, score_from_text
    from heedful.decide.question import checked_questions, questions_from_json

    found = [] if file is None else list(questions_from_json(_json(_text(file, "--questions"), "--questions")))
    found += [*map(choice_from_text, choices), *map(score_from_text, scores), *map(noul_from_text, nouls)]
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
        return data.decode("utf-8")
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
