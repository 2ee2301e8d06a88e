"""Values taken without typer's conversion: the same values and the same messages as with it."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from heedful.cli.plain_values import PlainCommand, PlainGroup


def said(arguments: list[str], plain: bool) -> tuple[Any, ...]:
    """What a verb was called with, the exit status, what was printed."""
    called: list[Any] = []

    def verb(
        words: Annotated[list[str] | None, typer.Argument()] = None,
        text: str = "as it is",
        whole: int = 7,
        maybe: int | None = None,
        ranged: Annotated[int, typer.Option(min=1, max=4)] = 2,
        number: float = 0.5,
        file: Path | None = None,
        again: list[str] | None = None,
        many: list[int] = [1, 2],  # noqa: B006  # as typer wants it
        flag: bool = False,
        either: Annotated[bool | None, typer.Option("--either/--or")] = None,
        called_back: Annotated[str | None, typer.Option(callback=lambda given: f"<{given}>")] = None,
    ) -> None:
        called.append((words, text, whole, maybe, ranged, number, file, again, many, flag, either, called_back))

    def needs(token: str, count: Annotated[int, typer.Option()]) -> None:
        called.append((token, count))

    app = typer.Typer(add_completion=False, rich_markup_mode=None, **({"cls": PlainGroup} if plain else {}))
    for function in (verb, needs):
        app.command(**({"cls": PlainCommand} if plain else {}))(function)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), pytest.raises(SystemExit) as leaving:
        app(args=arguments, prog_name="x")
    return repr(called), leaving.value.code, output.getvalue()


OPTIONS = ["--text", "--whole", "--maybe", "--ranged", "--number", "--file", "--again", "--many", "--called-back"]
VALUES = ["", " ", "0", "7", "-3", "007", "1_000", "+5", " 5", "5 ", "5\n", "٣", "９", "9" * 18, "9" * 30, "9" * 5000]
VALUES += ["0.5", ".5", "5.", "1.0", "1e3", "inf", "nan", "x", "-", "true", "None", "é"]


@given(
    st.lists(st.tuples(st.sampled_from(OPTIONS), st.sampled_from(VALUES) | st.text(max_size=8)), max_size=3),
    st.sampled_from([[], ["--flag"], ["--or"], ["--either"], ["a", "b"], ["--help"], ["--wrong"], ["--whole"]]),
)
@example([], [])
@settings(deadline=None)
def test_a_verb_gets_the_same_values_and_says_the_same(pairs: list[tuple[str, str]], others: list[str]) -> None:
    arguments = ["verb", *(f"{option}={value}" for option, value in pairs), *others]
    assert said(arguments, plain=True) == said(arguments, plain=False)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("value", VALUES)
def test_each_value_for_each_option(option: str, value: str) -> None:
    arguments = ["verb", f"{option}={value}"]
    assert said(arguments, plain=True) == said(arguments, plain=False)


@pytest.mark.parametrize("words", ["", "--help", "vreb", "needs", "needs t", "needs t --count 3", "needs t --count x"])
def test_what_is_required_is_asked_for_the_same_way(words: str) -> None:
    assert said(words.split(), plain=True) == said(words.split(), plain=False)
