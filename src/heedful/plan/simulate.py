"""Replicas behind a router, request by request: a simulation of discrete events, the same for the same seed.

The router is router/affinity.py itself. A replica is the engine's scheduler in outline: first come, first served; a
step gives every decoding sequence a token and computes up to 512 prompt tokens, 128 beside decoding ones; whole pages
stay until their memory is needed. Steps between two events are alike but for what they read, and are done at once.

Left out: that short prompts overtake, that pages are taken back from running sequences, HTTP and tokenizing.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import quantiles
from typing import Any, Literal

from heedful.cache.policy import PAGE_LEN
from heedful.engine.scheduler import MOST_RUNNING, PREFILL_BESIDE_DECODE, TOKEN_BUDGET
from heedful.plan.capacity import CountsAt
from heedful.plan.speed import Speed
from heedful.plan.workload import Asked, Workload, block_names, first_turns, next_turn
from heedful.router.affinity import Affinity, Placement, Work

MOST_BLOCKS = 32
"""Of a prompt: with longer ones a block is several pages, and hits are rounded down to it."""
WARM_SHARE, COOL_SHARE = 0.3, 0.1
"""Of the time in which requests come, its first and its last part, which are not measured: caches fill and queues build
up in the one, and what came in the other is followed by nobody."""
Routing = Literal["affinity", "random"]


@dataclass(frozen=True)
class Fleet:
    replicas: int
    kv_tokens: int
    """That a replica's memory has room for, running sequences' and those kept for later."""
    routing: Routing = "affinity"


@dataclass(frozen=True)
class Simulated:
    """Seconds; shares of tokens. Of the requests that came in the time that is measured."""

    requests: int
    replicas: int
    routing: str
    seconds: float
    """In which they came."""
    first_token_mean: float
    first_token_p50: float
    first_token_p95: float
    total_p50: float
    total_p95: float
    tok_s_p50: float
    """Of an answer after its first token."""
    total_mean: float
    output_tok_s: float
    """Of all together, those that ended in these seconds."""
    over_s: float
    """From the first arrival to the last end, of all requests."""
    busy_share: float
    """Of the replicas' time."""
    cached_share: float
    """Of prompt tokens, that were in the replica's cache."""
    reachable_share: float
    """That one replica with an endless cache would have had there."""

    @property
    def hit_share(self) -> float:
        """Of what could have been found."""
        return self.cached_share / self.reachable_share if self.reachable_share else 1.0

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "hit_share": self.hit_share}


@dataclass(eq=False)
class _Running:
    """A request on its way."""

    asked: Asked
    blocks: tuple[int, ...]
    """Names of its prompt's."""
    arrived: float
    reachable: int
    placement: Placement[int] | None = None
    cached: int = 0
    missing: int = 0
    """Prompt tokens that are not computed yet."""
    left: int = 0
    """Tokens still to be decoded."""
    context: int = 0
    first_token: float = 0.0


@dataclass(eq=False)
class _Replica:
    kept: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Names of blocks in its memory, the one to go first at the front."""
    waiting: deque[_Running] = field(default_factory=deque)
    reading: deque[_Running] = field(default_factory=deque)
    decoding: list[_Running] = field(default_factory=list)
    used_tokens: int = 0
    began: float = 0.0
    """When the steps that are being done began."""
    step_s: float = 0.0
    steps: int = 0
    """0: idle."""
    version: int = 0
    busy_s: float = 0.0


def simulate(
    workload: Workload,
    fleet: Fleet,
    speed: Speed,
    counts: CountsAt,
    *,
    requests: int,
    per_second: float | None = None,
    seed: int = 0,
) -> Simulated:
    """`requests`: of the conversations that begin; the last ones' later turns are left out. `per_second`: requests;
    None: those of the workload's peak."""
    rate = workload.peak_requests_per_second if per_second is None else per_second
    return _Simulation(workload, fleet, speed, counts, seed).run(
        max(1, requests // workload.turns), rate / workload.turns
    )


class _Simulation:
    def __init__(self, workload: Workload, fleet: Fleet, speed: Speed, counts: CountsAt, seed: int) -> None:
        self._workload, self._fleet, self._speed, self._counts = workload, fleet, speed, counts
        self._draw = random.Random(seed)
        self._block = PAGE_LEN * ceil((workload.context + workload.output) / (PAGE_LEN * MOST_BLOCKS))
        most = max(1, fleet.kv_tokens // self._block)
        self._most_kept = most
        self._affinity: Affinity[int] = Affinity(range(fleet.replicas), block_tokens=self._block, most_blocks=most)
        self._replicas = [_Replica() for _ in range(fleet.replicas)]
        self._known: set[int] = set()
        """Names of all blocks that were ever sent."""
        self._events: list[tuple[float, int, int, int, Asked | None]] = []
        """A heap of (seconds, serial number, replica, its version, None), or with replica -1 an arrival."""
        self._serial = 0
        self._done: list[tuple[_Running, float]] = []
        self._window = (0.0, 0.0)
        """The seconds that are measured."""
        self._last = 0.0
        """When the last conversation begins; nothing comes later."""

    def run(self, conversations: int, per_second: float) -> Simulated:
        for at, asked in first_turns(self._workload, conversations, per_second, self._draw):
            self._push(at, -1, 0, asked)
            self._last = at
        self._window = (WARM_SHARE * self._last, (1 - COOL_SHARE) * self._last)
        while self._events:
            now, _, number, version, arriving = heapq.heappop(self._events)
            if arriving is not None:
                self._arrive(now, arriving)
            elif self._replicas[number].version == version:
                self._advance(now, number)
        return self._summed()

    def _push(self, at: float, number: int, version: int, asked: Asked | None = None) -> None:
        self._serial += 1
        heapq.heappush(self._events, (at, self._serial, number, version, asked))

    # ---- An arrival -----------------------------------------------------------------------------------------------

    def _arrive(self, now: float, asked: Asked) -> None:
        blocks = block_names(self._workload, asked, asked.prompt, self._block)
        running = _Running(asked, blocks, now, self._reachable(asked, blocks))
        number = self._route(running)
        replica = self._replicas[number]
        replica.waiting.append(running)
        if not replica.steps:
            self._begin(now, number)
            return
        done = int((now - replica.began) / replica.step_s) + 1
        if done < replica.steps:  # it joins at the next step
            replica.steps = done
            replica.version += 1
            self._push(replica.began + done * replica.step_s, number, replica.version)

    def _reachable(self, asked: Asked, blocks: Sequence[int]) -> int:
        """Tokens that a cache of everything that was ever sent would have."""
        found = next((i for i, block in enumerate(blocks) if block not in self._known), len(blocks))
        self._known.update(blocks[found:])
        return min(found * self._block, asked.prompt - 1)

    def _route(self, running: _Running) -> int:
        if self._fleet.routing == "random":
            return self._draw.randrange(self._fleet.replicas)
        placement = self._affinity.choose(running.blocks, Work(running.asked.prompt, self._workload.output))
        self._affinity.begin(placement, running.blocks)
        running.placement = placement
        return placement.replica

    # ---- A replica's steps ----------------------------------------------------------------------------------------

    def _advance(self, now: float, number: int) -> None:
        """The steps that were begun are done: tokens have come, prompts are read, answers end."""
        replica = self._replicas[number]
        steps = replica.steps
        replica.busy_s += max(0.0, min(now, self._window[1]) - max(replica.began, self._window[0]))
        budget = steps * (PREFILL_BESIDE_DECODE if replica.decoding else TOKEN_BUDGET)
        for running in replica.decoding:
            running.left -= steps
            running.context += steps
        ended = [running for running in replica.decoding if not running.left]
        if ended:
            replica.decoding = [running for running in replica.decoding if running.left]
        while replica.reading and budget:
            running = replica.reading[0]
            read = min(budget, running.missing)
            running.missing -= read
            budget -= read
            if running.missing:
                break
            replica.reading.popleft()
            running.first_token = now
            if running.placement is not None:
                running.placement = self._affinity.answering(running.placement)
            (replica.decoding if running.left else ended).append(running)
        for running in ended:
            self._end(now, replica, running)
        self._begin(now, number)

    def _end(self, now: float, replica: _Replica, running: _Running) -> None:
        asked = running.asked
        replica.used_tokens -= asked.prompt + self._workload.output
        known = block_names(self._workload, asked, asked.prompt + self._workload.output - 1, self._block)
        self._keep(replica, known)
        self._known.update(known)
        if running.placement is not None:
            self._affinity.end(running.placement)
        self._done.append((running, now))
        following = next_turn(self._workload, asked)
        if following is not None:
            at = now + self._draw.expovariate(1 / self._workload.think_s)
            if at <= self._last:
                self._push(at, -1, 0, following)

    def _begin(self, now: float, number: int) -> None:
        """Admits who waits, and says when the next thing happens."""
        replica = self._replicas[number]
        while replica.waiting and len(replica.decoding) + len(replica.reading) < MOST_RUNNING:
            longest = replica.waiting[0].asked.prompt + self._workload.output
            if replica.used_tokens and replica.used_tokens + longest > self._fleet.kv_tokens:
                break
            replica.used_tokens += longest
            self._admit(replica, replica.waiting.popleft())
        replica.version += 1
        replica.began = now
        replica.steps, replica.step_s = self._next_steps(replica)
        if replica.steps:
            self._push(now + replica.steps * replica.step_s, number, replica.version)

    def _admit(self, replica: _Replica, running: _Running) -> None:
        """The pages that it shares with another that is being read count as there: it waits behind that one."""
        asked = running.asked
        blocks = running.blocks
        found = next((i for i, block in enumerate(blocks) if block not in replica.kept), len(blocks))
        running.cached = min(found * self._block, (asked.prompt - 1) // PAGE_LEN * PAGE_LEN)
        running.missing = asked.prompt - running.cached
        running.left = self._workload.output - 1
        running.context = asked.prompt + 1
        self._keep(replica, blocks)
        replica.reading.append(running)

    def _keep(self, replica: _Replica, blocks: tuple[int, ...]) -> None:
        kept = replica.kept
        for block in reversed(blocks):
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > self._most_kept:
            kept.popitem(last=False)

    def _next_steps(self, replica: _Replica) -> tuple[int, float]:
        """(steps until a prompt is read or an answer ends, seconds of each)."""
        decoding, reading = replica.decoding, replica.reading
        if not decoding and not reading:
            return 0, 0.0
        budget = PREFILL_BESIDE_DECODE if decoding else TOKEN_BUDGET
        of_prompt = None
        if reading:  # full steps: the last one, with fewer tokens, is by itself
            full = sum(running.missing for running in reading) // budget
            of_prompt = max(1, min(ceil(reading[0].missing / budget), full))
        of_answer = min((running.left for running in decoding), default=None)
        steps = min(n for n in (of_prompt, of_answer) if n is not None)
        seconds = 0.0
        if decoding:
            kv_bytes = sum(self._counts.step_kv_bytes(running.context + steps // 2) for running in decoding)
            seconds = steps * self._speed.step_seconds(len(decoding), kv_bytes)
        tokens = steps * budget
        for running in reading:
            read = min(tokens, running.missing)
            begin = running.asked.prompt - running.missing
            seconds += self._speed.prompt_seconds(read, self._counts.prompt_visits(begin, begin + read))
            tokens -= read
            if not tokens:
                break
        return steps, seconds / steps

    # ---- What came of it ------------------------------------------------------------------------------------------

    def _summed(self) -> Simulated:
        began, over = self._window
        measured = [(running, ended) for running, ended in self._done if began <= running.arrived <= over]
        first = [running.first_token - running.arrived for running, _ in measured]
        total = [ended - running.arrived for running, ended in measured]
        output = self._workload.output
        speeds = [(output - 1) / (ended - running.first_token) for running, ended in measured if output > 1]
        prompts = sum(running.asked.prompt for running, _ in measured)
        num_ended = sum(began <= ended <= over for _, ended in self._done)
        seconds = over - began
        return Simulated(
            requests=len(measured),
            replicas=self._fleet.replicas,
            routing=self._fleet.routing,
            seconds=seconds,
            first_token_mean=sum(first) / len(first),
            first_token_p50=_quantile(first, 50),
            first_token_p95=_quantile(first, 95),
            total_p50=_quantile(total, 50),
            total_p95=_quantile(total, 95),
            tok_s_p50=_quantile(speeds, 50),
            total_mean=sum(total) / len(total),
            over_s=max(ended for _, ended in self._done) - min(running.arrived for running, _ in self._done),
            output_tok_s=num_ended * output / seconds,
            busy_share=sum(replica.busy_s for replica in self._replicas) / (seconds * self._fleet.replicas),
            cached_share=sum(running.cached for running, _ in measured) / prompts,
            reachable_share=sum(running.reachable for running, _ in measured) / prompts,
        )


def _quantile(values: list[float], percent: int) -> float:
    if len(values) < 2:
        return values[0] if values else 0.0
    return quantiles(values, n=100, method="inclusive")[percent - 1]
