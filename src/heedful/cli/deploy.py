"""`heedful deploy app.yaml`: replicas under Ray Serve, here or on a cluster, until Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from heedful.errors import BadParameter


def deploy(
    app: Annotated[
        Path, typer.Argument(metavar="APP.YAML", help="A Serve config; docs/deploy.md.", show_default=False)
    ],
    address: Annotated[
        str | None, typer.Option(help="Of a Ray cluster, or auto; default: a Ray of this machine alone.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Only say what is wrong with the file.")] = False,
) -> None:
    """Run several replicas behind one address, under Ray Serve: prefix affinity, autoscaling, replacement.

    The same file works with Ray's own `serve deploy`.
    """
    from heedful.deploy.launch import read_app, start, stop

    found = read_app(app)
    if check:
        print(f"{app}: {', '.join(found.args['models'])} at {found.url}")
        return
    if not find_spec("ray"):
        raise BadParameter("deploy", "needs Ray Serve", "pip install 'heedful[ray]'")
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    start(found, address)
    print(f"heedful: {', '.join(found.args['models'])} at {found.url} (OpenAI: /v1); Ctrl-C ends it", file=sys.stderr)
    over.wait()
    print("heedful: open answers end first", file=sys.stderr)
    stop(found, is_own=address is None)
