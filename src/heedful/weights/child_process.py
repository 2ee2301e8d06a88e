"""Runs another program that downloads, and watches how many bytes it has written.

A downloader in a process of its own can be stopped at once, whatever it is doing, and its imports stay out of ours.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Finished:
    exit_code: int
    output: str
    """stdout and stderr together."""


def run_watched(
    command: Sequence[str],
    work: Path,
    environment: Mapping[str, str] | None = None,
    received: Callable[[int], None] = lambda _: None,
) -> Finished:
    """Runs `command` to its end and reports the bytes below `work` while it runs.

    Its temporary files go to `work`. An interrupt kills it, and is passed on.
    """
    temporary = work / "temporary"
    temporary.mkdir(exist_ok=True)
    already_there = bytes_below(work)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,  # not a file: on a full disk its last words would be lost
        stderr=subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(temporary), **(environment or {})},
    ) as child:
        try:
            while (output := _output_if_ended(child)) is None:
                received(bytes_below(work) - already_there)
        except BaseException:
            child.kill()
            raise
    return Finished(child.returncode, output.decode(errors="replace"))


def bytes_below(folder: Path) -> int:
    """Sizes of all files in `folder`; files that vanish while it looks do not count."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _output_if_ended(child: subprocess.Popen[bytes]) -> bytes | None:
    try:
        return child.communicate(timeout=_POLL_SECONDS)[0]
    except subprocess.TimeoutExpired:
        return None
