"""Shows a download while it runs: a bar on a terminal, one line before and one after where nobody watches.

Everything goes to stderr. It knows byte counts and nothing about where they come from.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


class Transfer(Protocol):
    """One download in progress."""

    def received(self, total_bytes: int) -> None:
        """`total_bytes` have arrived since the start, all parts together."""

    def now(self, doing: str) -> None:
        """The bytes are being worked on: "fetching", "unpacking"."""


Progress = Callable[[str, int | None], AbstractContextManager[Transfer]]
"""(what is fetched, its bytes or None) → the transfer, for as long as it runs."""


@contextmanager
def show_progress(what: str, expected_bytes: int | None) -> Iterator[Transfer]:
    shown = _bar if sys.stderr.isatty() else _two_lines
    with shown(what, expected_bytes) as transfer:
        yield transfer


@contextmanager
def no_progress(what: str, expected_bytes: int | None) -> Iterator[Transfer]:
    yield _Silent()


def bytes_text(count: int) -> str:
    """Decimal units: 98362432 → "98.4 MB"."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 999.95:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


class _Silent:
    def received(self, total_bytes: int) -> None:
        pass

    def now(self, doing: str) -> None:
        pass


@contextmanager
def _two_lines(what: str, expected_bytes: int | None) -> Iterator[Transfer]:
    size = f" ({bytes_text(expected_bytes)})" if expected_bytes else ""
    print(f"fetching {what}{size}", file=sys.stderr, flush=True)
    started = time.monotonic()
    yield _Silent()
    print(f"fetched {what} in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


@contextmanager
def _bar(what: str, expected_bytes: int | None) -> Iterator[Transfer]:
    from rich import progress
    from rich.console import Console

    rate = progress.TransferSpeedColumn()
    known = (progress.BarColumn(), progress.DownloadColumn(), rate, progress.TimeRemainingColumn())
    columns = known if expected_bytes else (progress.SpinnerColumn(), progress.FileSizeColumn(), rate)
    label = progress.TextColumn("{task.description}")
    with progress.Progress(label, *columns, console=Console(stderr=True), transient=True) as bar:
        yield _Bar(bar, what, bar.add_task(f"fetching {what}", total=expected_bytes), expected_bytes)


class _Bar:
    def __init__(self, bar: RichProgress, what: str, task: TaskID, expected_bytes: int | None) -> None:
        self._bar = bar
        self._what = what
        self._task = task
        self._expected_bytes = expected_bytes
        self._received_bytes = 0

    def received(self, total_bytes: int) -> None:
        # The count is read off a folder where files come and go: never step back, nor past the end.
        self._received_bytes = max(self._received_bytes, min(total_bytes, self._expected_bytes or total_bytes))
        self._bar.update(self._task, completed=self._received_bytes)

    def now(self, doing: str) -> None:
        self._bar.update(self._task, description=f"{doing} {self._what}")
