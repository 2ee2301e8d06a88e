"""A circuit breaker: after some failures in a row nobody asks for a while, then one request tries again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class BreakerLimits:
    failures: int = 5
    """In a row, after which it opens."""
    cooldown_s: float = 30.0
    """How long it stays open."""


class Breaker:
    """For one loop's thread."""

    def __init__(self, limits: BreakerLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._failures = 0
        self._opened_at: float | None = None
        self._is_trying = False

    @property
    def state(self) -> str:
        """ "closed": everybody asks; "open": nobody; "half-open": one may try."""
        if self._opened_at is None:
            return "closed"
        return "open" if self._is_trying or self.seconds_left > 0 else "half-open"

    @property
    def seconds_left(self) -> float:
        """Until somebody may try again."""
        if self._opened_at is None:
            return 0.0
        return max(0.0, self._opened_at + self._limits.cooldown_s - self._clock())

    def admits(self) -> bool:
        """Whether to ask; a half-open one lets one through, whose outcome decides."""
        if self.state == "half-open":
            self._is_trying = True
            return True
        return self.state == "closed"

    def succeeded(self) -> None:
        self._failures = 0
        self._opened_at = None
        self._is_trying = False

    def failed(self) -> None:
        self._failures += 1
        if self._is_trying or self._failures >= self._limits.failures:
            self._opened_at = self._clock()
        self._is_trying = False

    def left(self) -> None:
        """Whoever asked went away before it was known."""
        self._is_trying = False
