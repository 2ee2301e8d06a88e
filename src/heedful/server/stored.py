"""Answers that can be asked for again, or continued: kept in memory, the latest used ones, each for its caller only."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from heedful.server.bodies import JSON

MOST_STORED = 256
MOST_STORED_BYTES = 64 << 20


@dataclass(frozen=True)
class Stored:
    body: JSON
    """As it was answered."""
    messages: list[JSON]
    """The conversation up to and with the answer, without instructions."""


class ResponseStore:
    """At most so many answers, and so many bytes of them; the longest unused leave first."""

    def __init__(self, *, most: int = MOST_STORED, most_bytes: int = MOST_STORED_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[tuple[str, str], tuple[Stored, int]] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, salt: str, stored: Stored) -> None:
        """`salt`: the caller's, who alone gets it back."""
        size = len(msgspec.json.encode([stored.body, stored.messages]))
        self._kept[salt, stored.body["id"]] = stored, size
        self._bytes += size
        while len(self._kept) > self._most or (self._bytes > self._most_bytes and len(self._kept) > 1):
            _, (_, dropped) = self._kept.popitem(last=False)
            self._bytes -= dropped

    def get(self, salt: str, response_id: str) -> Stored | None:
        found = self._kept.get((salt, response_id))
        if found is None:
            return None
        self._kept.move_to_end((salt, response_id))
        return found[0]

    def drop(self, salt: str, response_id: str) -> bool:
        """Whether there was one."""
        found = self._kept.pop((salt, response_id), None)
        self._bytes -= found[1] if found else 0
        return found is not None
