"""The verb table of the command line, and how an error leaves it. Each verb's file imports what is heavy inside."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer

from heedful import __version__
from heedful.cli.plain_values import PlainCommand, PlainGroup
from heedful.errors import HeedfulError

VERBS = {
    "generate": "generate",
    "view": "view",
    "chat": "chat",
    "embed": "embed",
    "classify": "classify",
    "decide": "decide",
    "calibrate": "calibrate",
    "train": "train",
    "runs": "runs",
    "export": "export",
    "serve": "serve",
    "deploy": "deploy",
    "route": "app",
    "mcp": "app",
    "cost": "cost",
    "plan": "plan",
    "show": "show",
    "pull": "pull",
    "models": "app",
    "doctor": "doctor",
    "bench": "bench",
    "eval": "app",
}
"""Verb → what heedful.cli.<verb> has for it: a function, or an app with verbs of its own."""


def command_line(verbs: Iterable[str]) -> typer.Typer:
    """The app with these verbs of the table; only their files are imported."""
    app = typer.Typer(
        name="heedful",
        cls=PlainGroup,
        help="Attention, spent with care: run language models on this machine and see what every token costs.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for verb in verbs:
        found = getattr(importlib.import_module(f"heedful.cli.{verb}"), VERBS[verb])
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=verb)
        else:
            app.command(verb, cls=PlainCommand)(found)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"heedful {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""On the device, in the user's share of it, in one file."""
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
        if error.errno not in NO_ROOM:
            raise
        _drop_output()
        print(f"heedful: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return status


def _drop_output() -> None:
    """What is still in stdout's buffer would fail again when the interpreter leaves."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run_verb(arguments: Sequence[str]) -> int:
    asked = arguments[0] if arguments else ""
    app = command_line([asked] if asked in VERBS else VERBS)  # a wrong verb is compared with all
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
