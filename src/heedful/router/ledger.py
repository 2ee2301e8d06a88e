"""The router's ledger: one line of JSON a request, appended: where it went, why, and all that was spent on it.

    ledger = RouteLedger(LedgerSpec(path))
    entry = ledger.begin()
    with entry.charging("small"): …          # receipts of what runs inside of it are the target's
    entry.close(choice, …)                   # written once the last receipt is there

Lines of kind "request" and "counterfactual" share an id. No message is in it. A line is one write to a file that is
opened for appending, so that a crash leaves at most one torn line, the last, which readers pass over.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heedful.errors import BadParameter
from heedful.router.choose import Choice
from heedful.router.policy import LedgerSpec
from heedful.router.signals import JSON

ROUTER, ANSWER, WASTED, COUNTERFACTUAL = "router", "answer", "wasted", "counterfactual"
SYNC_SECONDS = 1.0
_ONLY_OWNER = 0o600


@dataclass(frozen=True)
class Spent:
    """What one part of a request cost. None: whoever did it does not say."""

    target: str
    phase: str
    """"router": deciding; "answer"; "wasted": of an answer that nobody got; "counterfactual"."""
    visits: Mapping[str, int] | None
    """prefill, decode, total, dense."""
    positions: int | None
    """Token positions that went through the layers: those of the prompt that no cache had, those of the output but the
    last, and guesses that were wrong."""
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    flops: int | None
    bytes_read: int | None
    """Weights, keys and values."""
    seconds: float
    tool_ms: float
    joules: float | None
    joules_low: float | None
    joules_high: float | None

    def to_dict(self) -> JSON:
        return dict(vars(self))


def spent_of(target: str, phase: str, receipt: Mapping[str, Any]) -> Spent:
    """`receipt`: as JSON, of a request, a decision or a remote endpoint, which leaves out what it does not know."""
    visits = receipt.get("visits")
    prompt, output = receipt.get("prompt_tokens"), receipt.get("output_tokens")
    cached = receipt.get("cached_tokens")
    flops, kv, weights = receipt.get("flops"), receipt.get("kv"), receipt.get("weights")
    energy, guesses = receipt.get("energy") or {}, receipt.get("guesses") or {"made": 0, "right": 0}
    positions = None
    if visits is not None and prompt is not None:
        positions = prompt - (cached or 0) + max(0, (output or 0) - 1) + guesses["made"] - guesses["right"]
    return Spent(
        target=target,
        phase=phase,
        visits=None if visits is None else {key: visits.get(key, 0) for key in ("prefill", "decode", "total", "dense")},
        positions=positions,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        flops=None if flops is None else sum(flops.values()),
        bytes_read=None if weights is None else weights["bytes_read"] + (kv or {}).get("bytes_read", 0),
        seconds=(receipt.get("seconds") or {}).get("total") or 0.0,
        tool_ms=receipt.get("tool_ms") or 0.0,
        joules=energy.get("joules"),
        joules_low=energy.get("low"),
        joules_high=energy.get("high"),
    )


@dataclass(eq=False)
class Tab:
    """Whom what runs now is charged to. Observers of engines find it in `charged_to`."""

    entry: Entry
    target: str
    phase: str


charged_to: ContextVar[Tab | None] = ContextVar("heedful_route_tab", default=None)


class Entry:
    """What one request has cost so far. Threads share it: receipts come from engines' threads."""

    def __init__(self, ledger: RouteLedger | None, line_id: str, kind: str = "request") -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._tabs: list[tuple[Tab, Mapping[str, Any]]] = []
        self._open = 0
        self._closed: JSON | None = None
        self._began = time.perf_counter()
        self.id = line_id
        self.kind = kind

    @contextmanager
    def charging(self, target: str, phase: str = ANSWER) -> Iterator[Tab]:
        """What begins inside of it is charged to `target`."""
        tab = Tab(self, target, phase)
        token = charged_to.set(tab)
        try:
            yield tab
        finally:
            charged_to.reset(token)

    def opened(self) -> None:
        """A receipt is to come."""
        with self._lock:
            self._open += 1

    def add(self, tab: Tab, receipt: Mapping[str, Any], *, was_opened: bool = False) -> None:
        """`receipt`: as JSON. `was_opened`: opened() told of it."""
        with self._lock:
            self._tabs.append((tab, receipt))
            self._open -= was_opened
        self._write_if_done()

    def close(self, choice: Choice, facts: Mapping[str, Any]) -> None:
        """The request has ended, one way or another. `facts`: what else stands in the line."""
        with self._lock:
            if self._closed is not None:
                return
            route = choice.to_dict()
            self._closed = {**route, **facts, "seconds": time.perf_counter() - self._began}
        self._write_if_done()

    @property
    def spent(self) -> list[Spent]:
        with self._lock:
            return [spent_of(tab.target, tab.phase, receipt) for tab, receipt in self._tabs]

    def _write_if_done(self) -> None:
        with self._lock:
            if self._closed is None or self._open:
                return
            facts, self._open = self._closed, -1  # once
        spent = [one.to_dict() for one in self.spent]
        if self._ledger is not None:
            self._ledger.append({"kind": self.kind, "id": self.id, **facts, "spent": spent})


@dataclass
class RouteLedger:
    """Raises BadParameter where the file cannot be written."""

    spec: LedgerSpec
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _synced_at: float = 0.0
    _file: int = -1

    def __post_init__(self) -> None:
        try:
            self.spec.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.spec.path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, _ONLY_OWNER)
            self._end_torn_line()
        except OSError as error:
            raise BadParameter("ledger.path", f"{self.spec.path} cannot be written: {error.strerror}") from error

    def _end_torn_line(self) -> None:
        """What a crash has left gets an end, so that the next line begins on its own."""
        with open(self.spec.path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    os.write(self._file, b"\n")

    def append(self, line: Mapping[str, Any]) -> None:
        data = json.dumps({"time": round(time.time(), 3), **line}, ensure_ascii=False).encode() + b"\n"
        with self._lock:
            if self._file < 0:
                return
            os.write(self._file, data)
            now = time.monotonic()
            is_due = self.spec.fsync == "interval" and now - self._synced_at >= SYNC_SECONDS
            if self.spec.fsync == "always" or is_due:
                os.fsync(self._file)
                self._synced_at = now

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                if self.spec.fsync != "never":
                    os.fsync(self._file)
                os.close(self._file)
                self._file = -1


def read_ledger(path: Path) -> list[JSON]:
    """Lines that are whole. Raises BadParameter where the file cannot be read, or holds no line of a ledger."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadParameter("ledger", f"{path} cannot be read: {error.strerror}") from error
    found = []
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and "spent" in value and "target" in value:
            found.append(value)
    if not found:
        raise BadParameter("ledger", f"{path} holds no line of a ledger")
    return found
