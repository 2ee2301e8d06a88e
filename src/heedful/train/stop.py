"""Ctrl-C and SIGTERM while training: the step is finished and saved. The second one ends at once, as ever."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopOnSignal:
    """A context manager; `received` is the number of the signal that came, or None."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._stop) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._give_back()

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
