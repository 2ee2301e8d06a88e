"""A line for every answer and every refusal, never what was asked or answered.

14:32:07 smollm2 stop · 312 in (256 cached) · 64 out · 283 tok/s · 1.2 M visits of 2.9 M dense · …
14:32:09 POST /v1/completions 400 max_tokens
14:32:10 POST /v1/embeddings 200 · 12 ms
"""

from __future__ import annotations

import time
from contextlib import suppress
from queue import Full, Queue
from threading import Thread
from typing import TextIO

from heedful.engine.answer import Completion
from heedful.engine.service import Observer, PassingOn
from heedful.request import Request
from heedful.server.failures import Failure

MOST_LINES = 10_000
"""That wait to be written; further ones are lost."""
LONGEST = 100
"""Characters of a path or a name."""


class RequestLog:
    """Its own thread writes: a terminal that is held, or a pipe that nobody reads, stalls no answer."""

    def __init__(self, stream: TextIO) -> None:
        self._lines: Queue[str | None] = Queue(MOST_LINES)
        self._stream = stream
        self._thread = Thread(target=self._write, name="heedful-log", daemon=True)
        self._thread.start()

    def answered(self, model: str, completion: Completion) -> None:
        self._put(f"{model} {completion.finish_reason} · {completion.receipt.line()}")

    def refused(self, method: str, path: str, failure: Failure) -> None:
        """Names what was wrong, and quotes nothing of it: a path may hold line ends, a message what was asked."""
        what = failure.field or failure.code or failure.kind
        self._put(f"{_shown(method)} {_shown(path)} {failure.status} {_shown(what)}")

    def served(self, method: str, path: str, status: int, seconds: float) -> None:
        """What ends without a receipt of its own: vectors, decisions."""
        self._put(f"{_shown(method)} {_shown(path)} {status} · {1000 * seconds:.0f} ms")

    def close(self, seconds: float = 1.0) -> None:
        """Waits so long for the lines that are left."""
        try:
            self._lines.put_nowait(None)
        except Full:
            return
        self._thread.join(seconds)

    def _put(self, line: str) -> None:
        with suppress(Full):
            self._lines.put_nowait(f"{time.strftime('%H:%M:%S')} {line}\n")

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._stream.write(line)
                self._stream.flush()
            except (OSError, ValueError):  # nobody reads any more
                return


def _shown(text: str) -> str:
    return ascii(text[:LONGEST])[1:-1]


class Logged(PassingOn):
    """Logs each answer."""

    def __init__(self, observer: Observer, log: RequestLog, model: str) -> None:
        super().__init__(observer)
        self._log = log
        self._model = model

    def finished(self, completion: Completion, request: Request, opened: object) -> None:
        super().finished(completion, request, opened)
        self._log.answered(self._model, completion)
