"""Shared prefixes under random traffic: every row that is read is right, every page is accounted for, what is reused is
what could be, and the reason for the rest is true."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from heedful.cache.policy import PAGE_LEN
from heedful.cache.prefix import Chain, PageRun, PrefixReport, longest_prefix, root_of
from heedful.cost.receipt import Receipt
from heedful.engine.engine import Engine
from heedful.engine.scheduler import Scheduler
from heedful.request import CachePolicy, Finish, KVFormat, Request, SamplingParams, Sequence
from witness import VOCAB, WitnessRunner, account

POLICIES = (
    CachePolicy(),
    CachePolicy(kv_format="q4"),
    CachePolicy(kv_format="q4", precise=0),
    CachePolicy(kv_format="k=q8,v=q4", precise=200),
    CachePolicy(window=150, sinks=4),
    CachePolicy(window=70),
    CachePolicy(kv_format="q4", window=100, sinks=130),
    CachePolicy(budget=256),
    CachePolicy(budget=320, kv_format="q4"),
    CachePolicy(sparse_prefill=True),
)
MIXED_WINDOWS = (None, 90, None)


def engine_of(
    windows: tuple[int | None, ...] = MIXED_WINDOWS, capacity_tokens: int = 4096, token_budget: int = 512
) -> Engine:
    runner = WitnessRunner(windows, capacity_tokens)
    engine = Engine(runner, model_name="witness", context_len=1 << 20, eos_ids=())
    engine.scheduler = Scheduler(runner.cache, token_budget)
    return engine


def text(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCAB), k=length))


def ask(engine: Engine, prompt: tuple[int, ...], max_tokens: int = 1, **fields: object) -> Sequence:
    return engine.add(Request(prompt, SamplingParams(max_tokens=max_tokens), **fields))  # type: ignore[arg-type]


def finish(engine: Engine, sequence: Sequence) -> Receipt:
    while sequence.finish is None:
        engine.step()
    return engine.receipt(sequence)


def answer(engine: Engine, prompt: tuple[int, ...], max_tokens: int = 1, **fields: object) -> tuple[list[int], Receipt]:
    sequence = ask(engine, prompt, max_tokens, **fields)
    receipt = finish(engine, sequence)
    return sequence.token_ids, receipt


def test_two_thousand_requests_and_every_row_is_right() -> None:
    rng = random.Random(5)
    engine = engine_of(capacity_tokens=9000, token_budget=300)
    cache = engine.runner.cache
    waiting, running, turns, reused = 2000, [], [text(i, 1200) for i in range(5)] * 2, 0
    while waiting or running:
        while waiting and len(running) < 6:
            source = rng.choice(turns)
            prompt = source[: rng.randint(1, len(source))] + text(rng.randrange(3), rng.choice([0, 1, 5, 64, 90]))
            policy, salt = POLICIES[min(int(rng.expovariate(0.5)), 9)], rng.choice(["", "", "b"])
            running.append(ask(engine, prompt[:1300], rng.randint(1, 6), policy=policy, cache_salt=salt))
            waiting -= 1
        if rng.random() < 0.03:
            engine.end(rng.choice(running), Finish.CANCELLED)
        engine.step()
        if rng.random() < 0.02:
            account(cache, running)
        for sequence in [s for s in running if s.finish is not None]:
            running.remove(sequence)
            receipt = engine.receipt(sequence)
            reused += receipt.cached_tokens
            check_saved(receipt)
            if rng.random() < 0.1:
                turns[rng.randrange(5, 10)] = tuple(sequence.token_ids)
            if rng.random() < 0.01 and receipt.output_tokens:
                alone = engine_of(token_budget=77)
                assert answer(alone, sequence.request.prompt_ids, receipt.output_tokens,
                              policy=sequence.request.policy, cache_salt=sequence.request.cache_salt,
                              )[0] == sequence.token_ids  # fmt: skip
    account(cache, [])
    assert cache.taken_bytes == 0
    assert reused > 100_000  # the storm was not about nothing


def check_saved(receipt: Receipt) -> None:
    visits = receipt.visits
    assert visits.dense == visits.total + visits.saved.window + visits.saved.pages + visits.saved.prefix
    assert receipt.prefix is None or receipt.prefix.cached_tokens == receipt.cached_tokens


class Traffic(RuleBasedStateMachine):
    """Requests come, step, are cancelled, go on where others ended; memory is short."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = engine_of(capacity_tokens=1500, token_budget=200)
        self.running: list[Sequence] = []
        self.said: list[tuple[int, ...]] = [text(0, 700), text(1, 700)]

    @rule(
        source=st.integers(0, 50), length=st.integers(1, 700), more=st.integers(0, 130), max_tokens=st.integers(1, 70),
        policy=st.sampled_from(POLICIES), salt=st.sampled_from(["", "x"]),
    )  # fmt: skip
    def request(self, source: int, length: int, more: int, policy: CachePolicy, salt: str, max_tokens: int) -> None:
        prompt = self.said[source % len(self.said)][:length] + text(9, more)
        self.running.append(ask(self.engine, prompt, max_tokens, policy=policy, cache_salt=salt))

    @rule(steps=st.integers(1, 40))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()
        for sequence in [s for s in self.running if s.finish is not None]:
            self.running.remove(sequence)
            check_saved(self.engine.receipt(sequence))
            self.said.append(tuple(sequence.token_ids))

    @rule(which=st.integers(0, 50))
    def cancel(self, which: int) -> None:
        if self.running:
            sequence = self.running.pop(which % len(self.running))
            self.engine.end(sequence, Finish.CANCELLED)
            check_saved(self.engine.receipt(sequence))

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        account(self.engine.runner.cache, self.running)

    def teardown(self) -> None:
        while self.running:
            self.step(100)
        account(self.engine.runner.cache, [])


def test_random_traffic() -> None:
    run_state_machine_as_test(Traffic, settings=settings(max_examples=20, stateful_step_count=25, deadline=None))


@given(st.data())
def test_the_longest_prefix_is_the_longest(data: st.DataObject) -> None:
    """Against asking for every length and every page."""
    pages = data.draw(st.integers(0, 12))
    formats, window = ("a", "b"), data.draw(st.integers(1, 5))
    there = {key: data.draw(st.booleans()) for g in range(2) for f in formats for p in range(12) for key in [(g, f, p)]}
    if data.draw(st.booleans()):
        there |= {(0, form, page): True for form in formats for page in range(12)}

    def read_at(n: int) -> list[PageRun]:
        old = n // 4 * 4
        return [PageRun(0, "a", 0, old), PageRun(0, "b", old, n), PageRun(1, "a", max(0, n - window), n)]

    possible = [
        n for n in range(pages + 1)
        if all(there[run.group, run.format, page] for run in read_at(n) for page in range(run.begin, run.end))
    ]  # fmt: skip
    assert longest_prefix(pages, read_at, lambda *key: there[key]) == max(possible)


def test_names_say_all_that_a_page_depends_on() -> None:
    cache = engine_of().runner.cache
    roots = [root_of(salt, cache.policy(policy)) for salt in ("", "k") for policy in POLICIES]
    with_budget = [policy for policy in POLICIES if policy.budget]  # what decoding chooses changes no prompt's rows
    for policy in with_budget:
        assert root_of("", cache.policy(policy)) == root_of("", cache.policy(replace(policy, budget=None)))
    assert len(set(roots)) == len(roots) - 2 * len(with_budget)
    policy = cache.policy(CachePolicy())
    others = {"main": KVFormat("q8", "f16"), "precise": KVFormat("q8", "q8", rotated=not policy.precise.rotated)}
    for name in (field.name for field in fields(policy)):
        other = others.get(name) or {"sparse_prefill": True}.get(name, 64)
        changed = root_of("", replace(policy, **{name: other})) != root_of("", policy)  # type: ignore[arg-type]
        assert changed == (name != "budget_pages"), name
    chains = []
    for tokens in (text(0, 192), text(0, 128) + text(1, 64), text(1, 64) + text(0, 192)[64:]):
        chain = Chain(roots[0])
        chain.grow(list(tokens), 2)
        chain.grow(list(tokens), 3)
        chains.append(chain.blocks)
    assert [len(chain) for chain in chains] == [3, 3, 3]
    assert chains[0][:2] == chains[1][:2]
    assert not set(chains[0][2:]) & set(chains[1])
    assert not set(chains[0]) & set(chains[2])


@pytest.mark.parametrize("windows", [(None,), (None, 90, None), (70,), (200, 64)])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("length", [300, 1100])
def test_a_second_turn_goes_on_behind_the_first_one(
    policy: CachePolicy, windows: tuple[int | None, ...], length: int
) -> None:
    engine = engine_of(windows, capacity_tokens=8192)
    said, first = answer(engine, text(1, length), 100, policy=policy)
    assert first.cached_tokens == 0
    assert first.prefix == PrefixReport(0, None, "none_before")
    question = (*said, *text(2, 30))
    _, second = answer(engine, question, 20, policy=policy)
    shareable = len(said) - 1  # the last token of the answer was not fed back
    if policy.budget is not None and None in windows:
        shareable = min(shareable, max(length, policy.budget))  # then a selection begins
    if policy.sparse_prefill:
        shareable = length - 100
    assert second.cached_tokens == shareable // PAGE_LEN * PAGE_LEN
    check_saved(second)
    cold = engine_of(windows, capacity_tokens=8192, token_budget=40)
    assert answer(cold, question, 20, policy=policy)[0] == answer(engine, question, 20, policy=policy)[0]


def test_a_common_beginning_is_reused_though_windows_have_left_it() -> None:
    engine = engine_of((None, 70), token_budget=100)
    answer(engine, text(0, 1000) + text(1, 500))
    _, receipt = answer(engine, text(0, 1000) + text(2, 500))
    assert receipt.cached_tokens == 960
    assert receipt.prefix == PrefixReport(960, 1000, "tokens_differ")


def test_the_last_token_is_always_computed() -> None:
    engine = engine_of()
    for length, cached in ((128, 64), (129, 128), (64, 0), (65, 64)):
        answer(engine, text(3, length))
        assert answer(engine, text(3, length))[1].prefix == PrefixReport(cached, None, "page_border")


def test_salts_share_nothing_and_tell_nothing() -> None:
    engine = engine_of()
    answer(engine, text(0, 300), cache_salt="a")
    same, other = (answer(engine, text(seed, 300), cache_salt="b")[1] for seed in (0, 7))
    assert same.prefix == PrefixReport(0, None, "other_key")
    assert other.prefix == PrefixReport(0, 0, "tokens_differ")  # of b's own first request
    unlike = engine_of()
    answer(unlike, text(5, 300), cache_salt="a")
    assert answer(unlike, text(0, 300), cache_salt="b")[1].prefix == same.prefix  # whatever a has asked
    assert answer(engine, text(0, 300), cache_salt="a")[1].cached_tokens == 256


def test_reasons() -> None:
    engine = engine_of(capacity_tokens=2048)
    answer(engine, text(0, 300), 100)
    _, windowed = answer(engine, text(0, 300), policy=CachePolicy(window=80))
    assert windowed.prefix == PrefixReport(0, None, "policy_differs")
    _, with_budget = answer(engine, text(0, 300), policy=CachePolicy(budget=256))
    assert with_budget.prefix == PrefixReport(256, None, "page_border")
    assert answer(engine, text(0, 200) + text(1, 200))[1].prefix == PrefixReport(192, 200, "tokens_differ")
    assert answer(engine, text(4, 150), 20)[1].prefix == PrefixReport(0, 0, "tokens_differ")
    said, _ = answer(engine, text(4, 150), 20)
    assert answer(engine, (*said, *text(1, 200)))[1].prefix == PrefixReport(128, 169, "earlier_ended")
    answer(engine, text(5, 2000))
    gone = answer(engine, text(0, 300))[1].prefix
    assert gone is not None
    assert gone.reason == "evicted"
    assert gone.cached_tokens < 256


def test_a_prefix_that_is_being_computed_is_waited_for_and_reused() -> None:
    engine = engine_of(token_budget=100)
    first = ask(engine, text(0, 500), 5)
    engine.step()
    engine.step()
    second = ask(engine, text(0, 500), 5)
    while first.finish is None or second.finish is None:
        engine.step()
    assert first.token_ids == second.token_ids
    engine.receipt(first)
    # the second one waits for what the first is just computing
    assert engine.receipt(second).prefix == PrefixReport(448, None, "page_border")


def test_readers_share_pages_and_each_counts_them() -> None:
    engine = engine_of((None,))
    answer(engine, text(0, 640))
    cache = engine.runner.cache
    readers = [ask(engine, text(0, 640) + text(seed, 10), 30) for seed in (1, 2, 3)]
    engine.step()
    page = cache.arenas[0].page_bytes
    assert [reader.held_bytes for reader in readers] == [11 * page] * 3
    assert cache.taken_bytes == (10 + 3) * page
    engine.end(readers[0], Finish.CANCELLED)
    account(cache, readers[1:])
    for reader in readers[1:]:
        assert finish(engine, reader).cached_tokens == 640
    assert cache.taken_bytes == 0


def test_memory_is_taken_from_the_end_of_what_was_used_longest_ago() -> None:
    engine = engine_of((None,), capacity_tokens=30 * PAGE_LEN)
    answer(engine, text(0, 641))
    answer(engine, text(1, 641))
    answer(engine, text(2, 1024))  # 16 of 30 pages: 6 of the oldest 10 go
    assert answer(engine, text(1, 641))[1].cached_tokens == 640  # and one for its last token
    assert answer(engine, text(0, 641))[1].cached_tokens == 192


def test_running_sequences_never_lose_a_page_to_a_newer_one() -> None:
    engine = engine_of((None, 80), capacity_tokens=1024)
    answer(engine, text(0, 500), 10)
    long = ask(engine, text(0, 500) + text(1, 10), 200)
    for seed in range(2, 12):
        engine.step()
        answer(engine, text(seed, 200), 3)  # the witness checks what the long one reads
        account(engine.runner.cache, [long])
    finish(engine, long)
    assert answer(engine_of((None, 80)), text(0, 500) + text(1, 10), 200)[0] == long.token_ids


def test_what_a_prefix_saves_is_what_it_would_have_visited() -> None:
    """Against counting every mask entry of the cached positions."""
    for policy in POLICIES:
        engine = engine_of((None, 90))
        answer(engine, text(0, 2300), policy=policy)
        _, cold = answer(engine_of((None, 90)), text(0, 2300), 1, policy=policy)
        _, warm = answer(engine, text(0, 2300), 1, policy=policy)
        saved = mask_entries(policy, (None, 90), warm.cached_tokens, 2300)
        assert warm.visits.saved.prefix == 2 * saved
        assert warm.visits.total == cold.visits.total - 2 * saved
        assert warm.visits.dense == cold.visits.dense
        assert warm.cached_tokens == (2176 if policy.sparse_prefill else 2240)


def mask_entries(policy: CachePolicy, windows: tuple[int | None, ...], end: int, prompt_len: int) -> int:
    query, key = np.arange(end)[:, None], np.arange(end)[None, :]
    seen = 0
    for own in windows:
        mask = key <= query
        if policy.sparse_prefill and own is None:
            mask = mask & ((key < 128) | (query - key < 1920) | (query >= prompt_len - 100))
        elif own is None and policy.window is not None:
            mask = mask & ((key < policy.sinks) | (query - key < policy.window))
        elif own is not None:
            narrow = policy.window is not None and policy.window < own
            inside = query - key < (policy.window if narrow else own)
            mask = mask & (inside | (key < policy.sinks) if narrow else inside)
        seen += int(mask.sum())
    return seen


def test_rows_of_a_step_that_failed_are_not_shared() -> None:
    engine = engine_of(token_budget=640)
    policy = CachePolicy(kv_format="q4")

    def fail(batch: object) -> None:
        raise RuntimeError("the power went")

    sequence = ask(engine, text(0, 1200), 3, policy=policy)
    engine.step()
    engine.runner.on_step = fail  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError):
        engine.step()  # would have computed from 512 on and converted pages 1 to 5
    engine.end(sequence, Finish.CANCELLED)
    engine.runner.on_step = lambda batch: None  # type: ignore[attr-defined]
    _, receipt = answer(engine, text(0, 1200), 3, policy=policy)
    assert receipt.cached_tokens == 448  # behind 512 tokens pages 1 to 5 would have to be 4-bit
    account(engine.runner.cache, [])


def test_the_record_of_served_requests_is_bounded() -> None:
    engine = engine_of((None,), capacity_tokens=1 << 14)
    for seed in range(70):
        answer(engine, text(seed, 70))
    old, recent = (answer(engine, text(seed, 70) + text(99, 70))[1].prefix for seed in (0, 69))
    assert old == PrefixReport(64, None, "not_recorded")
    assert recent == PrefixReport(64, 70, "earlier_ended")
