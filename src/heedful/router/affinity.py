"""Which of several equal replicas a request goes to: where most of its prompt was before, unless that costs more.

    affinity = Affinity(["a", "b"])
    blocks = blocks_of(prompt_bytes)
    placement = affinity.choose(blocks, Work(prompt=900, output=100))
    affinity.begin(placement, blocks)
    placement = affinity.answering(placement)   # its first token is there
    affinity.end(placement)                     # it has been answered, or has failed

A replica costs the tokens that it has been sent and not computed yet, and twice those of the prompt that it would have
to compute: the cheapest one is chosen. So a shared beginning is worth waiting for twice as many tokens as it has, since
computing it again delays others too, and no more: a popular one spreads. (Dynamo's router weighs the same two; SGLang's
and Ray's have thresholds in their place.) A token of an answer counts as three of a prompt: it takes a step.

What replicas have in their caches is guessed from what they were sent: the blocks of each prompt, the newest ones first
to be believed. Integers only, no clock and no chance: the same calls give the same choices. Policy alone: nothing here
knows of HTTP, of tokenizers or of a simulation, all of which use it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Generic, TypeVar

Replica = TypeVar("Replica", bound=Hashable)

REUSE_WEIGHT = 2
OUTPUT_WEIGHT = 3
"""Both by simulation (docs/log.md): with 1 and 1 conversations leave their replica too lightly."""
BLOCK_TOKENS = 64
"""As a page of our own cache has."""
BLOCK_BYTES = 256
"""Of a prompt's text, where there is no tokenizer: four bytes a token."""
MOST_BLOCKS = 4_096
"""Of a replica that are remembered: 262,144 tokens, some 32 contexts of 8,192."""
MOST_HOLDERS = 8
"""Replicas that are looked at because of a block, those that were sent it last."""


@dataclass(frozen=True)
class Work:
    """Tokens of a request: of its prompt, and the most of its answer."""

    prompt: int
    output: int = 0


@dataclass(frozen=True)
class Placement(Generic[Replica]):
    replica: Replica
    shared_tokens: int
    """Of the prompt's beginning, that the replica was sent before."""
    load: int
    """What it is of the replica's load."""
    answer_load: int
    """Of that, its answer's."""
    member_since: int
    """Of the replica: a later one of the same name has none of this load."""


def blocks_of(prompt: bytes, root: bytes = b"", block_bytes: int = BLOCK_BYTES) -> tuple[int, ...]:
    """Names of a prompt's whole blocks. Each is of all that comes before too, so equal names mean equal beginnings.
    `root`: what else must be equal, such as the model's name or the caller's cache salt."""
    whole = len(prompt) // block_bytes * block_bytes
    return chained((prompt[i : i + block_bytes] for i in range(0, whole, block_bytes)), root)


def chained(pieces: Iterable[bytes], root: bytes = b"") -> tuple[int, ...]:
    """64-bit names of the beginnings that end with each piece."""
    names = []
    before = blake2b(root, digest_size=8).digest()
    for piece in pieces:
        before = blake2b(before + piece, digest_size=8).digest()
        names.append(int.from_bytes(before, "big"))
    return tuple(names)


class Affinity(Generic[Replica]):
    """Loads of replicas, and what each was sent: at most `most_blocks` names a replica. For one thread."""

    def __init__(
        self,
        replicas: Iterable[Replica] = (),
        *,
        block_tokens: int = BLOCK_TOKENS,
        most_blocks: int = MOST_BLOCKS,
        most_holders: int = MOST_HOLDERS,
    ) -> None:
        assert min(block_tokens, most_blocks, most_holders) >= 1, (block_tokens, most_blocks, most_holders)
        self._block_tokens = block_tokens
        self._most_blocks = most_blocks
        self._most_holders = most_holders
        self._load: dict[Replica, int] = {}
        self._turn: dict[Replica, int] = {}
        """When each was last sent something: of equals the one that waits longest is next."""
        self._turns = 0
        self._since: dict[Replica, int] = {}
        """The turn at which it was added."""
        self._blocks: dict[Replica, OrderedDict[int, None]] = {}
        """By replica, the one to be forgotten first at the front."""
        self._holders: dict[int, OrderedDict[Replica, None]] = {}
        """By block, the few replicas of those that have it that were sent it last, the last one at the end."""
        self._by_load: list[tuple[int, int, Replica]] = []
        """A heap of (load, turn, replica), outdated ones among them."""
        for replica in replicas:
            self.add(replica)

    @property
    def replicas(self) -> Collection[Replica]:
        """In the order in which they came."""
        return self._load.keys()

    @property
    def num_remembered(self) -> int:
        """Pairs of replica and block."""
        return sum(map(len, self._blocks.values()))

    def load(self, replica: Replica) -> int:
        """Tokens that it was sent and has not computed yet as far as it is known, of answers OUTPUT_WEIGHT times."""
        return self._load[replica]

    def add(self, replica: Replica) -> None:
        """It has nothing to do, and nothing in its cache. Adding one that is there does nothing."""
        if replica not in self._load:
            self._load[replica] = 0
            self._blocks[replica] = OrderedDict()
            self._take_turn(replica)
            self._since[replica] = self._turn[replica]

    def remove(self, replica: Replica) -> None:
        """It is gone; what it still answers may end nevertheless."""
        self.forget(replica)
        del self._load[replica], self._turn[replica], self._since[replica], self._blocks[replica]

    def forget(self, replica: Replica) -> None:
        """Its cache is empty: it has been started anew."""
        for block in self._blocks[replica]:
            self._drop_holder(block, replica)
        self._blocks[replica].clear()

    def shared_tokens(self, replica: Replica, blocks: Sequence[int]) -> int:
        """Of the beginning that the replica was sent before."""
        held = self._blocks[replica]
        longest = next((i for i in range(len(blocks), 0, -1) if blocks[i - 1] in held), 0)
        return longest * self._block_tokens

    def choose(self, blocks: Sequence[int], work: Work, among: Collection[Replica] | None = None) -> Placement[Replica]:
        """`among`: those that may be asked, at least one; None: all of them. Changes nothing that is remembered."""
        assert self._load if among is None else among, "no replica to choose from"
        idlest = self._idlest() if among is None else min(among, key=lambda r: (self._load[r], self._turn[r]))
        shared = {idlest: self.shared_tokens(idlest, blocks), **self._shared_by_holder(blocks)}
        if among is not None:
            shared = {replica: tokens for replica, tokens in shared.items() if replica in among}

        def cost(replica: Replica) -> tuple[int, int, int]:
            tokens = min(shared[replica], work.prompt)
            return self._load[replica] + REUSE_WEIGHT * (work.prompt - tokens), -tokens, self._turn[replica]

        chosen = min(shared, key=cost)
        tokens = min(shared[chosen], work.prompt)
        answer = OUTPUT_WEIGHT * work.output
        return Placement(chosen, tokens, work.prompt - tokens + answer, answer, self._since[chosen])

    def begin(self, placement: Placement[Replica], blocks: Sequence[int]) -> None:
        """It is sent there: until end(placement) it is load; the blocks will be found there."""
        replica = placement.replica
        self._load[replica] += placement.load
        self._take_turn(replica)
        held = self._blocks[replica]
        for block in reversed(blocks):  # the beginning last: it is of use to more prompts, and is forgotten last
            held[block] = None
            held.move_to_end(block)
            self._add_holder(block, replica)
        while len(held) > self._most_blocks:
            block, _ = held.popitem(last=False)
            self._drop_holder(block, replica)

    def answering(self, placement: Placement[Replica]) -> Placement[Replica]:
        """Its prompt has been computed: from now on it is this placement, whose load is that of the answer."""
        self._take_off(placement, placement.load - placement.answer_load)
        return replace(placement, load=placement.answer_load)

    def end(self, placement: Placement[Replica]) -> None:
        """It has been answered, or nobody waits for it any more. Once a begin()."""
        self._take_off(placement, placement.load)

    def _take_off(self, placement: Placement[Replica], tokens: int) -> None:
        replica = placement.replica
        if self._since.get(replica) == placement.member_since:
            self._load[replica] -= tokens
            assert self._load[replica] >= 0, (replica, placement)
            self._push(replica)

    # ---- Who has a block ------------------------------------------------------------------------------------------

    def _shared_by_holder(self, blocks: Sequence[int]) -> dict[Replica, int]:
        found: dict[Replica, int] = {}
        for i in range(len(blocks), 0, -1):
            for replica in self._holders.get(blocks[i - 1], ()):
                found.setdefault(replica, i * self._block_tokens)
        return found

    def _add_holder(self, block: int, replica: Replica) -> None:
        holders = self._holders.setdefault(block, OrderedDict())
        holders[replica] = None
        holders.move_to_end(replica)
        if len(holders) > self._most_holders:
            holders.popitem(last=False)

    def _drop_holder(self, block: int, replica: Replica) -> None:
        holders = self._holders.get(block, OrderedDict())
        holders.pop(replica, None)
        if not holders:
            self._holders.pop(block, None)

    # ---- Who has least to do --------------------------------------------------------------------------------------

    def _take_turn(self, replica: Replica) -> None:
        self._turns += 1
        self._turn[replica] = self._turns
        self._push(replica)

    def _push(self, replica: Replica) -> None:
        heapq.heappush(self._by_load, (self._load[replica], self._turn[replica], replica))
        if len(self._by_load) > 64 + 4 * len(self._load):
            self._by_load = [(load, self._turn[other], other) for other, load in self._load.items()]
            heapq.heapify(self._by_load)

    def _idlest(self) -> Replica:
        while True:
            load, turn, replica = self._by_load[0]
            if self._load.get(replica) == load and self._turn[replica] == turn:
                return replica
            heapq.heappop(self._by_load)
