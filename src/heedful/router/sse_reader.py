"""Server-sent events from bytes as they come, however they are cut."""

from __future__ import annotations

import re

MOST_EVENT_BYTES = 1 << 20
_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventTooLong(Exception):
    """More bytes than an event may have."""


class SseReader:
    """Only the events' data: names and ids mean nothing in the APIs that are read with it."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def push(self, piece: bytes) -> list[str]:
        """The data of each event that this completes. Raises EventTooLong, UnicodeDecodeError."""
        self._rest += piece
        found: list[str] = []
        while (end := _LINE_END.search(self._rest)) is not None:
            if end[0] == b"\r" and end.end() == len(self._rest):
                break  # its \n may come with the next piece
            line, self._rest = self._rest[: end.start()], self._rest[end.end() :]
            if not line:
                found += [] if not self._data else [b"\n".join(self._data).decode()]
                self._data, self._size = [], 0
            elif line.startswith(b"data:"):
                self._size += len(line)
                self._data.append(line[5:].removeprefix(b" "))
            self._check(0)
        self._check(len(self._rest))
        return found

    def _check(self, more: int) -> None:
        if self._size + more > MOST_EVENT_BYTES:
            raise EventTooLong
