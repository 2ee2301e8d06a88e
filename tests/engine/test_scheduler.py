"""The scheduler on arrivals of any kind: everybody gets the answer that they would get alone, memory is never exceeded,
nobody starves, and all pages come back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.scripted_runner import ScriptedRunner

from heedful.cache.pages import pages_for
from heedful.cache.policy import PAGE_LEN
from heedful.engine.engine import Engine
from heedful.engine.scheduler import PREFILL_BESIDE_DECODE, Scheduler
from heedful.request import Batch, CachePolicy, Finish, Request, SamplingParams, Sequence

VOCAB = 7


def logits_of(sequence: Sequence) -> npt.NDArray[np.float32]:
    """Depends on all tokens so far and on nothing else."""
    state = 1
    for token in sequence.token_ids:
        state = (state * 31 + token + 7) % 1_000_003
    return np.random.default_rng(state).normal(size=VOCAB).astype(np.float32)


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: tuple[int, ...]
    max_tokens: int
    policy: CachePolicy = CachePolicy()  # noqa: RUF009  # frozen
    cancelled_at: int | None = None

    @property
    def request(self) -> Request:
        return Request(self.prompt, SamplingParams(max_tokens=self.max_tokens), self.policy)


def make_engine(capacity_tokens: int, token_budget: int = 512) -> Engine:
    runner = ScriptedRunner(logits_of, vocab_size=VOCAB, capacity_tokens=capacity_tokens)
    engine = Engine(runner, model_name="scripted", context_len=4096, eos_ids=())
    engine.scheduler = Scheduler(runner.cache, token_budget)
    return engine


def alone(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """By the definition, without an engine."""
    request = Request(prompt)
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(int(logits_of(Sequence(request, ids)).argmax()))
    return ids[len(prompt) :]


def serve(engine: Engine, arrivals: list[Arrival], most_steps: int = 5000) -> list[Sequence]:
    sequences: dict[Arrival, Sequence] = {}
    step = 0
    while len(sequences) < len(arrivals) or engine.scheduler.has_work:
        for arrival in arrivals:
            if arrival.step == step:
                sequences[arrival] = engine.add(arrival.request)
            if arrival.cancelled_at == step and arrival in sequences:
                engine.end(sequences[arrival], Finish.CANCELLED)
        engine.step()
        cache = engine.runner.cache
        assert cache.taken_bytes + cache.resting_bytes <= cache.budget_bytes
        step += 1
        assert step < most_steps, "somebody starves"
    return [sequences[arrival] for arrival in arrivals]


policies = st.sampled_from(
    [CachePolicy(), CachePolicy(window=100, sinks=4), CachePolicy(kv_format="q4"), CachePolicy(budget=256)]
)
prompts = st.one_of(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=400),
    st.integers(65, 500).map(lambda n: [1, 2, 3] * (n // 3)),  # beginnings in common
).map(tuple)
arrival_lists = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 30),
        prompt=prompts,
        max_tokens=st.integers(1, 80),
        policy=policies,
        cancelled_at=st.none() | st.integers(0, 60),
    ),
    min_size=1,
    max_size=8,
    unique=True,
)


@settings(max_examples=60, deadline=None)
@given(arrivals=arrival_lists, capacity_pages=st.integers(16, 60), token_budget=st.sampled_from([512, 100, 9]))
def test_everybody_gets_the_answer_that_they_would_get_alone(
    arrivals: list[Arrival], capacity_pages: int, token_budget: int
) -> None:
    engine = make_engine(capacity_pages * PAGE_LEN, token_budget)
    for arrival, sequence in zip(arrivals, serve(engine, arrivals), strict=True):
        output = sequence.token_ids[sequence.prompt_len :]
        expected = alone(arrival.prompt, arrival.max_tokens)
        assert output == expected[: len(output)]
        assert sequence.finish is not None
        if sequence.finish is not Finish.CANCELLED:
            assert output == expected
        receipt = engine.receipt(sequence)
        saved = receipt.visits.saved
        assert receipt.visits.dense == receipt.visits.total + saved.window + saved.pages + saved.prefix
    assert engine.runner.cache.taken_bytes == 0


def test_when_memory_runs_out_the_youngest_waits_and_loses_nothing() -> None:
    engine = make_engine(8 * PAGE_LEN)
    arrivals = [Arrival(0, (token,) * 150, 200) for token in (1, 2)]
    first, second = serve(engine, arrivals)
    assert engine.scheduler.preemptions > 0
    for arrival, sequence in zip(arrivals, (first, second), strict=True):
        assert sequence.token_ids[150:] == alone(arrival.prompt, 200)
    assert engine.receipt(first).visits.recomputed == 0
    # what was not found again as a prefix was computed twice, and is said to be
    assert engine.receipt(second).visits.recomputed > 0


def test_a_preempted_answer_is_found_again_where_its_pages_still_rest() -> None:
    recomputed = []
    for pages in (9, 10):  # one more page than the older answer needs keeps two of the younger one's
        engine = make_engine(pages * PAGE_LEN)
        _, younger = serve(engine, [Arrival(0, (1,) * 150, 200), Arrival(0, (2,) * 100, 200)])
        assert engine.scheduler.preemptions == 1
        recomputed.append(engine.receipt(younger).visits.recomputed)
    assert 0 < recomputed[1] < recomputed[0]


@pytest.mark.parametrize("long_len", [700, 3000])
def test_a_long_prompt_stalls_decoding_by_a_bounded_step(long_len: int) -> None:
    engine = make_engine(20_000)
    batches: list[Batch] = []
    engine.runner.on_step = batches.append  # type: ignore[attr-defined]
    short = engine.add(Request((1, 2, 3), SamplingParams(max_tokens=100)))
    engine.step()
    engine.add(Request((4,) * long_len, SamplingParams(max_tokens=1)))
    decoded = short.output_len
    while short.finish is None:
        engine.step()
        assert short.output_len == decoded + 1, "a token in every step"
        decoded = short.output_len
        computed = sum(chunk.end - chunk.start for chunk in batches[-1].chunks)
        assert computed <= 1 + PREFILL_BESIDE_DECODE


def test_short_prompts_pass_a_long_one_and_cannot_starve_it() -> None:
    engine = make_engine(20_000)
    long = engine.add(Request((4,) * 3000, SamplingParams(max_tokens=1)))
    engine.step()
    for i in range(200):
        short = engine.add(Request((5, i % VOCAB, 6) * 20, SamplingParams(max_tokens=1)))
        engine.step()
        if long.finish is not None:
            break
        assert short.finish is not None, "it fits beside the long one's half"
    assert long.finish is Finish.LENGTH
    assert i <= 3000 / 256 + 1


def test_a_prompt_waits_for_the_pages_that_another_is_just_computing() -> None:
    engine = make_engine(20_000)
    prompt = (1, 2, 3) * 300
    first, *others = [engine.add(Request(prompt, SamplingParams(max_tokens=3))) for _ in range(4)]
    while engine.scheduler.has_work:
        engine.step()
    assert engine.receipt(first).cached_tokens == 0
    for other in others:
        assert engine.receipt(other).cached_tokens == (len(prompt) - 1) // PAGE_LEN * PAGE_LEN
        assert other.token_ids == first.token_ids


def test_other_keys_do_not_wait_for_each_other() -> None:
    engine = make_engine(20_000)
    prompt = (1, 2, 3) * 300
    for salt in ("a", "b"):
        engine.add(Request(prompt, SamplingParams(max_tokens=3), cache_salt=salt))
    engine.step()
    assert engine.scheduler.num_running == 2


def test_a_selected_answer_is_never_preempted() -> None:
    engine = make_engine(24 * PAGE_LEN)
    chosen = Arrival(0, (1,) * 600, 300, CachePolicy(budget=256))
    others = [Arrival(1, (token,) * 100, 300) for token in (2, 3, 4)]
    first, *_ = serve(engine, [chosen, *others])
    assert first.token_ids[600:] == alone(chosen.prompt, 300)
    assert engine.receipt(first).visits.recomputed == 0


def test_pages_are_taken_as_tokens_come() -> None:
    engine = make_engine(20_000)
    engine.add(Request((1,) * 10, SamplingParams(max_tokens=3000)))
    engine.step()
    page_bytes = sum(engine.runner.cache.page_bytes_by_group(engine.runner.cache.default))
    assert engine.runner.cache.taken_bytes == pages_for(10) * page_bytes


@pytest.mark.parametrize("token_budget", [512, 50])
def test_sinks_stand_apart_only_where_the_window_has_left_them_behind(token_budget: int) -> None:
    """Chunks stop at the window's length, so that no cut of a prompt decides for a query."""
    engine = make_engine(20_000, token_budget)
    batches: list[Batch] = []
    engine.runner.on_step = batches.append  # type: ignore[attr-defined]
    engine.add(Request((1,) * 300, SamplingParams(max_tokens=3), CachePolicy(window=100, sinks=4)))
    while engine.scheduler.has_work:
        engine.step()
    for chunk in (chunk for batch in batches for chunk in batch.chunks):
        assert chunk.end <= 100 or chunk.start >= 100
        assert {span.sinks for span in chunk.spans} == {0 if chunk.end <= 100 else 4}


def test_one_tenant_cannot_shut_the_others_out() -> None:
    engine = make_engine(20_000)
    for i in range(100):
        engine.add(Request((i % VOCAB, *[1] * 20), SamplingParams(max_tokens=50 + i), cache_salt="greedy"))
    engine.step()
    late = engine.add(Request((2, 3, 4), SamplingParams(max_tokens=1), cache_salt="modest"))
    while late.finish is None:
        engine.step()
        assert engine.scheduler.num_waiting >= 36 - 1, "it did not have to wait until the others had their turn"
