"""How long a call may still take: an idle time-out, which progress extends, under an absolute cap. Both stand still
while the person is asked something."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from heedful.errors import McpTimeout

if TYPE_CHECKING:
    import anyio


class CallClock:
    """Begins when it is made. `scope` is to be entered around the call."""

    def __init__(self, timeout_s: float, idle_timeout_s: float) -> None:
        import anyio

        self._now = anyio.current_time
        self._timeout_s, self._idle_timeout_s = timeout_s, idle_timeout_s
        self._begun = self._now()
        self._last = self._begun + timeout_s
        self._paused_at = 0.0
        self._pauses = 0
        self._waited_s = 0.0
        self.scope: anyio.CancelScope = anyio.CancelScope(deadline=min(self._last, self._begun + idle_timeout_s))

    def progressed(self) -> None:
        if not self._pauses:
            self.scope.deadline = min(self._last, self._now() + self._idle_timeout_s)

    def pause(self) -> None:
        if not self._pauses:
            self._paused_at = self._now()
            self.scope.deadline = math.inf
        self._pauses += 1

    def resume(self) -> None:
        self._pauses -= 1
        if not self._pauses:
            waited_s = self._now() - self._paused_at
            self._waited_s += waited_s
            self._last += waited_s
            self.progressed()

    def error(self, server: str, tool: str) -> McpTimeout:
        """Once it has run out."""
        is_idle = self.scope.deadline < self._last
        limit_s = self._idle_timeout_s if is_idle else self._timeout_s
        elapsed_s = self._now() - self._begun - self._waited_s
        return McpTimeout(server, tool, limit_s, elapsed_s, is_idle=is_idle)
