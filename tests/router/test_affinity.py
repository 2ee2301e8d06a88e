"""Prefix affinity: held to a brute-force model of what was sent where, and bounded in memory and in unevenness."""

from __future__ import annotations

import random
from hashlib import blake2b

from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.router.affinity import BLOCK_BYTES, Affinity, Placement, Work, blocks_of, chained

NAMES = ("a", "b", "c", "d")
PIECES = st.lists(st.sampled_from([b"x", b"y", b"z"]), max_size=6)


class Told:
    """What a router would find out by comparing a prompt with every prompt that it ever sent."""

    def __init__(self) -> None:
        self.prompts: dict[str, list[list[bytes]]] = {name: [] for name in NAMES}
        self.load = dict.fromkeys(NAMES, 0)
        self.turn = {name: i for i, name in enumerate(NAMES)}

    def shared(self, name: str, prompt: list[bytes]) -> int:
        longest = 0
        for sent in self.prompts[name]:
            same = next((i for i, (p, q) in enumerate(zip(sent, prompt, strict=False)) if p != q), None)
            longest = max(longest, min(len(sent), len(prompt)) if same is None else same)
        return longest

    def choice(self, prompt: list[bytes], tokens: int, block: int) -> tuple[str, int]:
        shared = {name: min(tokens, block * self.shared(name, prompt)) for name in NAMES}
        best = min(NAMES, key=lambda n: (self.load[n] + 2 * (tokens - shared[n]), -shared[n], self.turn[n]))
        return best, shared[best]


@given(st.lists(st.tuples(PIECES, st.integers(0, 40), st.booleans()), max_size=40))
def test_it_chooses_what_comparing_all_prompts_would(asked: list[tuple[list[bytes], int, bool]]) -> None:
    affinity, told = Affinity(NAMES, block_tokens=10), Told()
    open_: list[Placement[str]] = []
    for i, (prompt, rest, is_over) in enumerate(asked):
        blocks, tokens = chained(prompt), 10 * len(prompt) + rest
        placement = affinity.choose(blocks, Work(tokens, 7))
        assert (placement.replica, placement.shared_tokens) == told.choice(prompt, tokens, 10)
        assert (placement.load, placement.answer_load) == (tokens - placement.shared_tokens + 21, 21)
        affinity.begin(placement, blocks)
        told.prompts[placement.replica].append(prompt)
        told.load[placement.replica] += placement.load
        told.turn[placement.replica] = len(NAMES) + i
        if rest % 2:
            told.load[placement.replica] -= placement.load - 21
            placement = affinity.answering(placement)
        open_.append(placement)
        if is_over:
            ended = open_.pop(0)
            affinity.end(ended)
            told.load[ended.replica] -= ended.load
        assert {name: affinity.load(name) for name in NAMES} == told.load


@given(st.lists(PIECES, max_size=60), st.integers(1, 8), st.integers(1, 3))
def test_memory_is_bounded_and_what_is_forgotten_only_costs_hits(
    prompts: list[list[bytes]], most_blocks: int, most_holders: int
) -> None:
    affinity = Affinity(NAMES, block_tokens=10, most_blocks=most_blocks, most_holders=most_holders)
    told = Told()
    for prompt in prompts:
        blocks = chained(prompt)
        for name in NAMES:
            assert affinity.shared_tokens(name, blocks) <= 10 * told.shared(name, prompt)
        placement = affinity.choose(blocks, Work(10 * len(prompt)))
        affinity.begin(placement, blocks)
        told.prompts[placement.replica].append(prompt)
        assert affinity.num_remembered <= most_blocks * len(NAMES)
        held = min(len(blocks), most_blocks)
        assert affinity.shared_tokens(placement.replica, blocks[:held]) == 10 * held, "the beginning is kept longest"


@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.integers(1, 9))
def test_replicas_differ_by_no_more_than_two_prompts(prefixes: list[int], num_blocks: int) -> None:
    """Whatever is popular: nobody gets work beyond twice what computing the prompt anew would be elsewhere."""
    affinity = Affinity(NAMES, block_tokens=10)
    for prefix in prefixes:
        blocks = chained([bytes([prefix])] * num_blocks)
        work = Work(10 * num_blocks + 5, 3)
        affinity.begin(affinity.choose(blocks, work), blocks)
        loads = [affinity.load(name) for name in NAMES]
        assert max(loads) - min(loads) <= 2 * work.prompt + 3 * work.output


def test_a_beginning_that_all_have_costs_nobody_a_wait() -> None:
    """However few replicas are looked at because of it."""
    affinity = Affinity(NAMES, most_holders=1)
    blocks, work = chained([b"p"] * 8), Work(512 + 60, 40)
    for name in NAMES:
        affinity.begin(affinity.choose(blocks, work, {name}), blocks)
    for _ in range(8):
        after = affinity.choose(blocks, work)
        assert (affinity.load(after.replica), after.shared_tokens) == (min(map(affinity.load, NAMES)), 512)
        affinity.begin(after, blocks)


def test_the_same_calls_give_the_same_choices() -> None:
    def run() -> list[str]:
        draw, affinity, chosen = random.Random(5), Affinity(NAMES), []
        for _ in range(300):
            blocks = chained([bytes([draw.randrange(4)]) for _ in range(draw.randrange(5))])
            placement = affinity.choose(blocks, Work(64 * len(blocks) + draw.randrange(64), draw.randrange(100)))
            affinity.begin(placement, blocks)
            if draw.random() < 0.8:
                affinity.end(placement)
            chosen.append(placement.replica)
        return chosen

    assert run() == run()
    assert set(run()) == set(NAMES)


def test_only_those_that_may_be_asked() -> None:
    affinity = Affinity(NAMES)
    blocks = chained([b"p"] * 4)
    first = affinity.choose(blocks, Work(300))
    affinity.begin(first, blocks)
    affinity.end(first)
    assert affinity.choose(blocks, Work(300)) == Placement(first.replica, 256, 44, 0, first.member_since)
    others = {name for name in NAMES if name != first.replica}
    away = affinity.choose(blocks, Work(300), others)
    assert away.replica in others
    assert away.shared_tokens == 0


def test_one_that_was_started_anew_has_nothing() -> None:
    affinity = Affinity(["a", "b"])
    blocks = chained([b"p"] * 4)
    placement = affinity.choose(blocks, Work(256))
    affinity.begin(placement, blocks)
    affinity.forget(placement.replica)
    assert affinity.shared_tokens(placement.replica, blocks) == 0
    assert affinity.num_remembered == 0
    affinity.remove(placement.replica)
    affinity.add(placement.replica)
    affinity.end(placement)  # of the one before: nothing of this one's load
    assert affinity.load(placement.replica) == 0
    affinity.remove("a")
    affinity.remove("b")
    assert not affinity.replicas


@settings(max_examples=30)
@given(st.binary(max_size=5 * BLOCK_BYTES), st.binary(max_size=3 * BLOCK_BYTES), st.binary(max_size=8))
def test_blocks_name_beginnings(prompt: bytes, other: bytes, root: bytes) -> None:
    names = blocks_of(prompt, root)
    assert len(names) == len(prompt) // BLOCK_BYTES
    assert blocks_of(prompt + other, root)[: len(names)] == names
    before, expected = blake2b(root, digest_size=8).digest(), []  # the definition, one by one
    for i in range(len(names)):
        before = blake2b(before + prompt[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES], digest_size=8).digest()
        expected.append(int.from_bytes(before, "big"))
    assert list(names) == expected
    assert not set(names) & set(blocks_of(prompt, root + b"!"))
