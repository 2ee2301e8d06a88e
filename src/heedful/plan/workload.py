"""What users ask: conversations that begin with a shared prompt and grow by turns, as rates and as drawn requests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

DAY_S = 86_400


@dataclass(frozen=True)
class Workload:
    users: int
    tokens_per_user: int
    """Answered in a day."""
    context: int
    """Tokens of the longest prompt: that of a conversation's last turn."""
    output: int = 200
    """Tokens of an answer."""
    turns: int = 1
    """Of a conversation; the prompt of each has all that was said before."""
    shared: int = 0
    """Tokens that a conversation's first prompt begins with, and those of others too: a system prompt."""
    prefixes: int = 1
    """So many different ones, as popular as each other."""
    peak: float = 3.0
    """Requests of the busiest hour over those of the mean one."""
    think_s: float = 30.0
    """From an answer to the next turn, on average."""

    def __post_init__(self) -> None:
        assert min(self.users, self.tokens_per_user, self.output, self.turns, self.prefixes) >= 1, self
        assert 0 <= self.shared < self.context, self
        assert self.turns == 1 or self.grown > self.output, self

    @property
    def grown(self) -> int:
        """Tokens by which each turn's prompt is longer: the answer before and what the user says."""
        return (self.context - self.shared) // self.turns

    @property
    def prompts(self) -> tuple[int, ...]:
        """Tokens of each turn's prompt."""
        return tuple(
            self.shared + (self.context - self.shared) * turn // self.turns for turn in range(1, self.turns + 1)
        )

    def known_before(self, turn: int) -> int:
        """Tokens of that turn's prompt (from 0) that a replica has, which has answered what came before: of the first
        turn the shared beginning, of later ones the prompt and the answer before, but for its last token."""
        return self.shared if turn == 0 else self.prompts[turn - 1] + self.output - 1

    @property
    def requests_per_day(self) -> float:
        return self.users * self.tokens_per_user / self.output

    @property
    def peak_requests_per_second(self) -> float:
        return self.peak * self.requests_per_day / DAY_S


@dataclass(frozen=True)
class Asked:
    """One turn."""

    conversation: int
    turn: int
    prompt: int
    """Tokens."""
    prefix: int
    """Which of the shared ones."""


def first_turns(
    workload: Workload, conversations: int, per_second: float, draw: random.Random
) -> Iterator[tuple[float, Asked]]:
    """(seconds, first turn) of conversations that begin independently of each other: a Poisson process."""
    now = 0.0
    for conversation in range(conversations):
        now += draw.expovariate(per_second)
        yield now, Asked(conversation, 0, workload.prompts[0], draw.randrange(workload.prefixes))


def next_turn(workload: Workload, asked: Asked) -> Asked | None:
    turn = asked.turn + 1
    if turn == workload.turns:
        return None
    return Asked(asked.conversation, turn, workload.prompts[turn], asked.prefix)


def block_names(workload: Workload, asked: Asked, tokens: int, block_tokens: int) -> tuple[int, ...]:
    """Of the whole blocks among the conversation's first `tokens`: equal where the beginnings are, as of hashes."""
    shared = workload.shared // block_tokens
    own = (1 << 62) + (asked.conversation << 24)
    first = (asked.prefix + 1) << 24
    return tuple((first if i < shared else own) + i for i in range(tokens // block_tokens))
