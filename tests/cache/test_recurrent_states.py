"""Models whose layers carry a recurrent state, under the same traffic as those without: every state that a step begins
from is the one of exactly its tokens, every slot is accounted for, and what is reused is what was kept."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from heedful.cache.disk import DiskTier
from heedful.cache.pages import StateLayout
from heedful.cache.prefix import PrefixReport
from heedful.cost.receipt import Receipt
from heedful.engine.engine import Engine
from heedful.engine.scheduler import Scheduler
from heedful.errors import CacheFull
from heedful.models.config import DeltaNet
from heedful.request import CachePolicy, Finish, Request, SamplingParams, Sequence
from witness import VOCAB, WitnessRunner, account

STATES = StateLayout(layers=2, layer_bytes=1024)  # as much as two pages of one of the layers of a window's group
POLICIES = (
    CachePolicy(),
    CachePolicy(kv_format="q4"),
    CachePolicy(window=70),
    CachePolicy(window=150, sinks=4),
    CachePolicy(budget=256),
    CachePolicy(sparse_prefill=True),
)


def engine_of(
    capacity_tokens: int = 4096,
    token_budget: int = 512,
    states: StateLayout = STATES,
    disk: DiskTier | None = None,
) -> Engine:
    runner = WitnessRunner((None, 90, None), capacity_tokens, states)
    engine = Engine(runner, model_name="witness", context_len=1 << 20, eos_ids=())
    engine.scheduler = Scheduler(runner.cache, token_budget, disk)
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


@pytest.mark.parametrize(("layer_bytes", "capacity_tokens"), [(64, 3000), (1024, 3000), (8192, 6000)])
def test_random_requests_and_every_state_is_right(layer_bytes: int, capacity_tokens: int) -> None:
    """Small states, of which many are kept, and large ones, which drive pages out."""
    rng = random.Random(layer_bytes)
    states = replace(STATES, layer_bytes=layer_bytes)
    engine = engine_of(capacity_tokens, token_budget=300, states=states)
    cache = engine.runner.cache
    waiting, running, turns, reused = 60, [], [text(i, 500) for i in range(3)] * 2, 0
    while waiting or running:
        while waiting and len(running) < 6:
            source = rng.choice(turns)
            prompt = source[: rng.randint(1, len(source))] + text(rng.randrange(3), rng.choice([0, 1, 5, 64, 90]))
            policy, salt = POLICIES[min(int(rng.expovariate(0.5)), 5)], rng.choice(["", "", "b"])
            running.append(ask(engine, prompt[:600], rng.choice([1, 3, 70]), policy=policy, cache_salt=salt))
            waiting -= 1
        if rng.random() < 0.03:
            engine.end(rng.choice(running), Finish.CANCELLED)
        engine.step()
        if rng.random() < 0.05:
            account(cache, running)
        for sequence in [s for s in running if s.finish is not None]:
            running.remove(sequence)
            reused += engine.receipt(sequence).cached_tokens
            if rng.random() < 0.2:
                turns[rng.randrange(3, 6)] = tuple(sequence.token_ids)
    account(cache, [])
    assert cache.taken_bytes == 0
    assert reused > 300


def test_whoever_had_to_give_its_state_back_computes_it_again() -> None:
    engine = engine_of(capacity_tokens=640)
    prompts = [text(seed, 70) for seed in range(2)]
    asked = [ask(engine, prompt, 400) for prompt in prompts]
    answers = [(finish(engine, sequence), sequence.token_ids)[1] for sequence in asked]
    assert engine.scheduler.preemptions > 0
    account(engine.runner.cache, [])
    assert answers == [answer(engine_of(), prompt, 400)[0] for prompt in prompts]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_second_turn_goes_on_at_the_newest_page_of_the_answer(policy: CachePolicy) -> None:
    engine = engine_of(capacity_tokens=8192)
    said, first = answer(engine, text(1, 300), 100, policy=policy)
    assert first.prefix == PrefixReport(0, None, "none_before")
    question = (*said, *text(2, 30))
    warm, second = answer(engine, question, 20, policy=policy)
    kept = 384
    if policy.budget is not None:
        kept = 256  # a selection begins in the answer: what follows depends on more than its tokens
    if policy.sparse_prefill:
        kept = 192  # the last 100 tokens of the prompt saw more than they would in a longer one
    assert second.cached_tokens == kept
    cold = engine_of(capacity_tokens=8192, token_budget=40)
    assert answer(cold, question, 20, policy=policy)[0] == warm


def test_where_prompts_part_a_state_is_kept_for_the_next_one() -> None:
    engine = engine_of()
    answer(engine, text(0, 200) + text(1, 100))
    _, second = answer(engine, text(0, 200) + text(2, 100))
    assert second.prefix == PrefixReport(0, None, "no_state_kept")
    _, third = answer(engine, text(0, 200) + text(3, 100))
    assert third.prefix == PrefixReport(192, 200, "tokens_differ")
    assert answer(engine, text(0, 200) + text(2, 100))[1].prefix == PrefixReport(256, None, "page_border")


def test_prompts_that_come_together_share_from_the_first_one_on() -> None:
    """Those that wait have the state kept where they part from the one that runs."""
    engine = engine_of(token_budget=100)
    asked = [ask(engine, text(0, 200) + text(seed, 100)) for seed in (1, 2, 3)]
    asked.append(ask(engine, text(0, 140) + text(4, 100)))
    receipts = [finish(engine, sequence) for sequence in asked]
    assert [receipt.cached_tokens for receipt in receipts] == [0, 192, 192, 128]
    account(engine.runner.cache, [])


def test_two_that_begin_from_one_state_do_not_disturb_it() -> None:
    engine = engine_of()
    said, _ = answer(engine, text(0, 200), 3)
    both = [ask(engine, (*said[:200], *text(seed, 40)), 90) for seed in (5, 6)]
    engine.step()
    account(engine.runner.cache, both)
    assert [finish(engine, sequence).cached_tokens for sequence in both] == [192, 192]
    assert answer(engine, text(0, 200), 3)[1].cached_tokens == 192


def test_a_long_answer_leaves_one_state() -> None:
    engine = engine_of()
    answer(engine, text(0, 70), 400)
    states = engine.runner.cache.states
    assert states is not None
    resting = [page for page in engine.runner.cache.registered.resting if page in range(states.num_pages)]
    assert len(resting) == 2  # at 64 and at 448
    assert states.users.total() == 0


def test_a_cancelled_request_frees_its_slot() -> None:
    engine = engine_of()
    sequence = ask(engine, text(0, 300), 50)
    for _ in range(5):
        engine.step()
    assert engine.runner.cache.taken_bytes > 0
    engine.end(sequence, Finish.CANCELLED)
    assert engine.runner.cache.taken_bytes == 0
    account(engine.runner.cache, [])


def test_states_count_as_memory_that_a_request_needs() -> None:
    engine = engine_of(capacity_tokens=640, states=StateLayout(2, 1 << 20))
    with pytest.raises(CacheFull):
        ask(engine, text(0, 10))


def test_bytes_of_states_are_in_the_receipt() -> None:
    """Each step reads the state that the one before it wrote; layers with a state make no visits."""
    plain = Engine(WitnessRunner((None, 90, None), 4096), model_name="w", context_len=1 << 20, eos_ids=())
    _, without = answer(plain, text(0, 50), 5)
    engine = engine_of()
    delta = DeltaNet((0, 1), key_heads=1, value_heads=1, key_dim=16, value_dim=16, conv_len=1)  # a state of 1,024 bytes
    engine.runner.config = replace(engine.runner.config, num_layers=5, delta=delta)
    _, receipt = answer(engine, text(0, 50), 5)
    assert receipt.visits == without.visits
    assert receipt.kv.bytes_held_peak - without.kv.bytes_held_peak == 2 * 1024
    assert receipt.kv.bytes_read - without.kv.bytes_read == 4 * 2 * 1024
    assert receipt.kv.bytes_written - without.kv.bytes_written == 5 * 2 * 1024


def test_a_step_that_fails_ends_those_whose_states_it_touched() -> None:
    engine = engine_of(token_budget=150)
    touched, waiting = ask(engine, text(0, 300), 5), ask(engine, text(0, 300) + text(1, 5), 5)
    engine.step()

    def fail(batch: object) -> None:
        raise RuntimeError("the power went")

    engine.runner.on_step = fail  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError):
        engine.step()
    assert (touched.finish, str(touched.error)) == (Finish.ERROR, "the power went")
    engine.runner.on_step = lambda batch: None  # type: ignore[attr-defined]
    assert finish(engine, waiting).output_tokens == 5
    account(engine.runner.cache, [])


def test_states_go_to_disk_with_their_pages(tmp_path: Path) -> None:
    def tier() -> DiskTier:
        return DiskTier(tmp_path, "0" * 64, max_bytes=1 << 30)

    first = engine_of(disk=tier())
    said, _ = answer(first, text(0, 200), 100)
    first.close()
    later = engine_of(disk=tier())
    assert answer(later, (*said, *text(1, 10)))[1].cached_tokens == 256
    assert answer(later, text(0, 200) + text(2, 10))[1].cached_tokens == 192
    later.close()
    account(later.runner.cache, [])


def test_guesses_are_off_where_a_state_cannot_be_taken_back() -> None:
    engine = engine_of()
    _, receipt = answer(engine, text(0, 8) * 30, 60, speculate=True)
    assert receipt.guesses.made == 0
