"""A progress bar on stderr, where somebody watches; a pipe sees nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(doing: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Gives what moves it on. total: None where nobody knows how much is to come."""
    from rich import progress
    from rich.console import Console

    columns = (progress.TextColumn(doing), progress.BarColumn(), progress.TaskProgressColumn(show_speed=True))
    console = Console(stderr=True)
    with progress.Progress(
        *columns, progress.TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda count: bar.advance(task, count)
