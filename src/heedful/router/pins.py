"""Which target a conversation was sent to, so that a turn's tool loop stays there and a long one is not sent down.

A turn is known by what was said up to the user's last message: while tools answer, that stays the same. Nothing but a
digest and a target's name is kept.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from heedful.router.signals import Asked

MOST_PINS = 10_000


@dataclass(frozen=True)
class Pin:
    target: str
    until: float


class Pins:
    """For one loop's thread. `ttl_s`: how long a turn is remembered."""

    def __init__(self, ttl_s: float, *, most: int = MOST_PINS, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._most = most
        self._clock = clock
        self._pins: OrderedDict[bytes, Pin] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pins)

    def of_turn(self, asked: Asked) -> str | None:
        """Where this turn went so far."""
        return self._get(_key(asked, asked.last_user))

    def of_last_turn(self, asked: Asked) -> str | None:
        """Where the turn before this one went."""
        earlier = [i for i, m in enumerate(asked.messages[: max(0, asked.last_user)]) if m.get("role") == "user"]
        return self._get(_key(asked, earlier[-1])) if earlier else None

    def put(self, asked: Asked, target: str) -> None:
        key = _key(asked, asked.last_user)
        self._pins[key] = Pin(target, self._clock() + self._ttl_s)
        self._pins.move_to_end(key)
        while len(self._pins) > self._most:
            self._pins.popitem(last=False)

    def _get(self, key: bytes) -> str | None:
        pin = self._pins.get(key)
        if pin is None:
            return None
        if pin.until < self._clock():
            del self._pins[key]
            return None
        return pin.target


def _key(asked: Asked, last: int) -> bytes:
    """Of the conversation up to that message, and the caller's salt."""
    said = json.dumps([asked.salt, list(asked.messages[: last + 1])], sort_keys=True, default=str)
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).digest()
