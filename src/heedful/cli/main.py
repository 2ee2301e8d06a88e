"""The verb table of the command line, and how an error leaves it. Each verb's file imports what is heavy inside."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from heedful import __version__
from heedful.cli.bench import bench
from heedful.cli.chat import chat
from heedful.cli.cost import cost
from heedful.cli.doctor import doctor
from heedful.cli.eval import app as eval_app
from heedful.cli.generate import generate
from heedful.cli.models import app as models_app
from heedful.cli.pull import pull
from heedful.cli.show import show
from heedful.errors import HeedfulError

app = typer.Typer(
    name="heedful",
    help="Attention, spent with care: run language models on this machine and see what every token costs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(chat)
app.command()(cost)
app.command()(show)
app.command()(pull)
app.add_typer(models_app, name="models")
app.command()(doctor)
app.command()(bench)
app.add_typer(eval_app, name="eval")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"heedful {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


PIPE_CLOSED = 141  # as a shell reports a program that the closed pipe has ended


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit status: 2 for bad usage, 1 for other errors, 130 after Ctrl-C."""
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        status = _run_verb(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has left, as `| head` does
        _drop_output()
        return PIPE_CLOSED
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        print("heedful: the output cannot be written: no space is left on its device", file=sys.stderr)
        return 1
    return status


def _drop_output() -> None:
    """What is still in stdout's buffer would fail again when the interpreter leaves."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run_verb(arguments: Sequence[str]) -> int:
    try:
        app(args=list(arguments), prog_name="heedful")
    except SystemExit as leaving:  # how typer always ends; a wrong option is printed by then
        return leaving.code if isinstance(leaving.code, int) else 1
    except HeedfulError as error:
        print(f"heedful: {error.message}", file=sys.stderr)
        if error.remedy:
            print(f"  {error.remedy}", file=sys.stderr)
        return error.exit_code
    raise AssertionError("typer came back")
