"""The asynchronous face: one engine, stepped by a thread of its own, for any number of callers in event loops.

    service = Service(llm)
    stream = await service.open(request)
    async for piece in stream: ...
    stream.completion

Text is made in the engine's thread, right after each step, so that a stop string ends an answer before the next one;
what a step brought goes to a loop in one call. A stream that is closed, or left, frees its pages before the next step.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from heedful.engine.answer import Answer, Completion, Piece
from heedful.engine.engine import Live, Prepared
from heedful.engine.llm import LLM
from heedful.errors import EngineStopped, QueueFull
from heedful.request import Finish, Request, Sequence
from heedful.sampling.sampler import Sampled

if TYPE_CHECKING:
    from heedful.sampling.grammar import Grammar

MOST_WAITING = 256
"""Requests that wait for memory or their turn; further ones are refused."""

Event = Piece | Completion | Exception


class Observer(Protocol):
    """Is told of what the service does: metrics, traces."""

    def opened(self) -> object:
        """In the caller's context. What it returns comes back when the answer has ended."""
        ...

    def stepped(self, seconds: float, new_tokens: int, num_sequences: int) -> None:
        """In the engine's thread, as `finished`."""
        ...

    def finished(self, completion: Completion, request: Request, opened: object) -> None: ...


class NoObserver:
    def opened(self) -> object: ...

    def stepped(self, seconds: float, new_tokens: int, num_sequences: int) -> None: ...

    def finished(self, completion: Completion, request: Request, opened: object) -> None: ...


class PassingOn:
    """Stands between a service and another observer, which it tells all; a kind of it does something beside."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def opened(self) -> object:
        return self._observer.opened()

    def stepped(self, seconds: float, new_tokens: int, num_sequences: int) -> None:
        self._observer.stepped(seconds, new_tokens, num_sequences)

    def finished(self, completion: Completion, request: Request, opened: object) -> None:
        self._observer.finished(completion, request, opened)


@dataclass(eq=False)
class _Job:
    """A request that is open. `events` and `waiter` belong to the loop, the rest to the engine's thread."""

    sequence: Sequence
    answer: Answer
    loop: asyncio.AbstractEventLoop
    wants_pieces: bool
    opened: object
    events: deque[Event] = field(default_factory=deque)
    waiter: asyncio.Future[None] | None = None
    is_cancelled: bool = False


class Service:
    """`llm` is the service's alone from here on. `observer`: is told of steps and answers."""

    def __init__(self, llm: LLM, *, most_waiting: int = MOST_WAITING, observer: Observer | None = None) -> None:
        self.llm = llm
        self._engine = llm.engine
        self._observer = observer or NoObserver()
        self._most_waiting = most_waiting
        self._num_open = 0  # streams that have not ended; counted in their loops' thread
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._is_closing = False
        self._jobs: dict[Sequence, _Job] = {}
        self._thread = threading.Thread(target=self._run, name=f"heedful engine {llm.name}", daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Requests that are waiting or being answered."""
        return self._num_open

    async def open(
        self,
        request: Request,
        *,
        grammar: Grammar | None = None,
        continues: bool = False,
        kept_special: frozenset[int] = frozenset(),
        dropped_tokens: int = 0,
        wants_pieces: bool = True,
    ) -> AnswerStream:
        """Queue a request. `kept_special`: control tokens whose text is part of the answer. `wants_pieces`: else the
        stream brings nothing until it ends, which costs less.

        Raises QueueFull, EngineStopped, and what Engine.prepare does.
        """
        if self._is_closing:
            raise EngineStopped
        if self._num_open - self._engine.scheduler.num_running >= self._most_waiting:
            raise QueueFull(self._most_waiting)
        prepared = self._engine.prepare(request, grammar)
        decoder = self.llm.tokenizer.stream(continues=continues, kept_special=kept_special)
        answer = Answer(prepared.sequence, decoder, dropped_tokens=dropped_tokens)
        job = _Job(prepared.sequence, answer, asyncio.get_running_loop(), wants_pieces, self._observer.opened())
        self._num_open += 1
        self._command(lambda: self._begin(prepared, job))
        return AnswerStream(self, job)

    def live(self, sequence: Sequence) -> Live | None:
        """The counts so far; None once it has ended. A reader may see a step half counted."""
        return self._engine.live(sequence) if sequence in self._jobs else None

    async def close(self, drain_seconds: float = 0.0, in_hurry: Callable[[], bool] = lambda: False) -> None:
        """Refuse new requests, let open ones end within so many seconds, cancel the rest and end the thread.

        `in_hurry`: asked meanwhile whether the time is over already.
        """
        self._is_closing = True
        deadline = perf_counter() + drain_seconds
        while self._num_open and perf_counter() < deadline and not in_hurry():
            await asyncio.sleep(0.05)
        self._command(self._cancel_all)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self.llm.close)

    def cancel(self, job: _Job) -> None:
        job.is_cancelled = True
        self._command(lambda: self._engine.end(job.sequence, Finish.CANCELLED))

    def job_ended(self) -> None:
        self._num_open -= 1

    def _command(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    # In the engine's thread:

    def _run(self) -> None:
        while self._jobs or not self._is_closing:
            with self._wake:
                self._wake.wait_for(lambda: self._commands or self._jobs or self._is_closing)
            while self._commands:
                self._commands.popleft()()
            if self._jobs:
                self._deliver(self._step())

    def _begin(self, prepared: Prepared, job: _Job) -> None:
        self._engine.enqueue(prepared)
        self._jobs[job.sequence] = job
        if job.is_cancelled:
            self._engine.end(job.sequence, Finish.CANCELLED)

    def _cancel_all(self) -> None:
        for sequence in self._jobs:
            self._engine.end(sequence, Finish.CANCELLED)

    def _step(self) -> list[tuple[_Job, Event]]:
        """One step; returns what it brought, in order."""
        began = perf_counter()
        try:
            tokens = self._engine.step()
        except Exception as error:  # of the step itself: nobody's request can go on
            tokens = []
            for sequence in self._jobs:
                sequence.error = sequence.error or error
                self._engine.end(sequence, Finish.ERROR)
        events: list[tuple[_Job, Event]] = []
        for token in tokens:
            job = self._jobs[token.sequence]
            if not job.answer.has_stopped:  # else an earlier token of the same step has ended it
                piece = self._take(job, token.sampled)
                events += [(job, piece)] if job.wants_pieces else []
        for job in [job for job in self._jobs.values() if job.sequence.finish is not None]:
            events += [(job, event) for event in self._end(job)]
        if tokens:
            self._observer.stepped(perf_counter() - began, len(tokens), self._engine.last_step_sequences)
        return events

    def _take(self, job: _Job, sampled: Sampled) -> Piece:
        piece = job.answer.take(sampled)
        if job.answer.has_stopped:
            self._engine.end(job.sequence, Finish.STOP)
        return piece

    def _end(self, job: _Job) -> list[Event]:
        del self._jobs[job.sequence]
        tail = job.answer.flush()
        receipt = self._engine.receipt(job.sequence)
        self.llm.ledger.add(receipt)
        completion = job.answer.complete(receipt)
        self._observer.finished(completion, job.sequence.request, job.opened)
        held_back: list[Event] = [Piece(tail, ())] if tail and job.wants_pieces else []
        return [*held_back, job.sequence.error or completion]

    def _deliver(self, events: list[tuple[_Job, Event]]) -> None:
        for loop in {job.loop for job, _ in events}:
            mine = [(job, event) for job, event in events if job.loop is loop]
            try:
                loop.call_soon_threadsafe(_hand_over, mine)
            except RuntimeError:  # the loop is closed, and with it whoever waited
                continue


def _hand_over(events: Iterable[tuple[_Job, Event]]) -> None:
    """In the loop's thread."""
    for job, event in events:
        job.events.append(event)
        if job.waiter is not None and not job.waiter.done():
            job.waiter.set_result(None)


class AnswerStream:
    """An answer as it comes: iterate for Pieces, or `await complete()`; close it to stop early."""

    def __init__(self, service: Service, job: _Job) -> None:
        self._service = service
        self._job = job
        self._completion: Completion | None = None
        self._has_ended = False

    @property
    def sequence(self) -> Sequence:
        """Where the answer stands; read it, don't change it."""
        return self._job.sequence

    @property
    def completion(self) -> Completion:
        assert self._completion is not None, "the stream has not ended"
        return self._completion

    @property
    def live(self) -> Live | None:
        return self._service.live(self._job.sequence)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Raises what ended the answer, if it was an error."""
        try:
            while (event := await self._next()) is not None:
                yield event
        finally:
            self.close()

    async def complete(self) -> Completion:
        async for _ in self:
            pass
        return self.completion

    def close(self) -> None:
        """Cancel what has not come yet. Twice does nothing."""
        if not self._has_ended:
            self._has_ended = True
            self._service.job_ended()
            self._service.cancel(self._job)

    async def _next(self) -> Piece | None:
        job = self._job
        while not job.events:
            job.waiter = job.loop.create_future()
            try:
                await job.waiter
            finally:
                job.waiter = None
        event = job.events.popleft()
        if isinstance(event, Piece):
            return event
        self._has_ended = True
        self._service.job_ended()
        if isinstance(event, Exception):
            raise event
        self._completion = event
        return None
