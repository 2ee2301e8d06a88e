"""Logprobs of a prompt's end: the same bits as from reading all of it, without reading a shared beginning again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from heedful import LLM, CachePolicy, Receipt, SamplingParams
from heedful.cache.policy import PAGE_LEN
from heedful.engine.scheduler import LOGITS_ROWS, Scheduler
from heedful.errors import BadParameter
from heedful.request import Request
from heedful.testing import make_tiny_model

SHARED = "The quick brown fox jumps over the lazy dog, and then it sleeps. " * 4  # four pages of bytes, and a bit
POLICIES = {
    "own": CachePolicy(),
    "q4": CachePolicy(kv_format="q4"),
    "sinks": CachePolicy(window=100, sinks=4),
    "sparse": CachePolicy(sparse_prefill=True),
}


def new_llm(folder: Path, runner: str = "auto") -> LLM:
    return LLM(str(make_tiny_model(folder)), runner=runner)


def read(
    llm: LLM, ids: list[int], first: int, policy: CachePolicy = POLICIES["own"], max_tokens: int = 0
) -> tuple[list[Any], Receipt]:
    sampling = SamplingParams(max_tokens=max_tokens, prompt_logprobs=2, prompt_logprobs_from=first, ignore_eos=True)
    sequence = llm.engine.add(Request(tuple(ids), sampling, policy))
    while sequence.finish is None:
        llm.engine.step()
    assert sequence.error is None
    return sequence.prompt_logprobs, llm.engine.receipt(sequence)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_shared_beginning_is_not_read_again_and_the_values_are_the_same_bits(tmp_path: Path, policy: str) -> None:
    llm = new_llm(tmp_path)
    beginning = llm.tokenizer.encode(SHARED)
    prompts = [beginning + llm.tokenizer.encode(end) for end in ("yes, of course it does", "no", "perhaps" * 30)]
    everything = [read(new_llm(tmp_path), ids, 0, POLICIES[policy])[0] for ids in prompts]
    for at, (ids, expected) in enumerate(zip(prompts, everything, strict=True)):
        found, receipt = read(llm, ids, len(beginning), POLICIES[policy])
        assert found == expected[len(beginning) - 1 :]
        assert len(found) == len(ids) - len(beginning)
        shareable = len(beginning) - 1
        if policy == "sparse":  # a prompt's last 100 tokens see everything, so their rows are its own
            longest_before = max(map(len, prompts[:at]), default=0)
            shareable = max(0, min(shareable, longest_before - 100, len(ids) - 100))
        assert receipt.cached_tokens == (shareable // PAGE_LEN * PAGE_LEN if at else 0)
        visits = receipt.visits
        saved = visits.saved
        assert visits.dense == visits.total + saved.window + saved.pages + saved.prefix
        assert bool(saved.prefix) == bool(receipt.cached_tokens)


def test_together_the_first_computes_the_beginning_and_the_others_wait_for_it(tmp_path: Path) -> None:
    llm = new_llm(tmp_path)
    beginning = llm.tokenizer.encode(SHARED)
    prompts = [beginning + llm.tokenizer.encode(end) for end in ("yes", "no", "perhaps")]
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=2, prompt_logprobs_from=len(beginning))
    running = [llm.engine.add(Request(tuple(ids), sampling)) for ids in prompts]
    while any(sequence.finish is None for sequence in running):
        llm.engine.step()
    cached = [llm.engine.receipt(sequence).cached_tokens for sequence in running]
    assert cached == [0, *[(len(beginning) - 1) // PAGE_LEN * PAGE_LEN] * 2]
    for ids, sequence in zip(prompts, running, strict=True):
        assert sequence.prompt_logprobs == read(new_llm(tmp_path), ids, 0)[0][len(beginning) - 1 :]


@pytest.mark.parametrize("first", [0, 1, 2, 63, 64, 65, 66, 128, 129, 200, 259, 260, 261, 10_000])
def test_any_position_does(tmp_path: Path, first: int) -> None:
    llm = new_llm(tmp_path)
    ids = llm.tokenizer.encode(SHARED)[:260]
    expected, _ = read(llm, ids, 0)
    found, receipt = read(llm, ids, first)
    assert found == expected[max(0, first - 1) :]
    reusable = min(len(ids) - 1, max(0, first - 1))  # the logits wanted first are of the token before
    assert receipt.cached_tokens == reusable // PAGE_LEN * PAGE_LEN


def test_small_steps_change_nothing_and_only_wanted_rows_are_computed(tmp_path: Path) -> None:
    llm = new_llm(tmp_path)
    ids = llm.tokenizer.encode(SHARED)[:250]
    expected, _ = read(llm, ids, 0)
    rows: list[int] = []
    for budget in (3, 7, 512):
        slow = new_llm(tmp_path)
        slow.engine.scheduler = Scheduler(slow.engine.runner.cache, budget)
        run = slow.engine.runner.run
        rows.clear()

        def counting(batch: Any, run: Any = run) -> Any:
            rows.extend(chunk.num_logits for chunk in batch.chunks)
            return run(batch)

        slow.engine.runner.run = counting  # type: ignore[method-assign]
        assert read(slow, ids, 100)[0] == expected[99:]
        assert sum(rows) == 250 - 99
        assert max(rows) <= LOGITS_ROWS


def test_after_a_preemption_nothing_is_missing_or_twice(tmp_path: Path) -> None:
    llm = new_llm(tmp_path)
    scheduler = llm.engine.scheduler = Scheduler(llm.engine.runner.cache, 64)
    prompts = [llm.tokenizer.encode(text) for text in ("one" + SHARED + SHARED[:200], "two" + SHARED)]
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=2, prompt_logprobs_from=70)
    running = [llm.engine.add(Request(tuple(ids), sampling)) for ids in prompts]
    victim = running[1]
    while not 0 < len(victim.prompt_logprobs) < 100:
        llm.engine.step()
    scheduler._preempt(victim, [])
    while any(sequence.finish is None for sequence in running):
        llm.engine.step()
    for ids, sequence in zip(prompts, running, strict=True):
        assert sequence.prompt_logprobs == read(new_llm(tmp_path), ids, 0)[0][69:]


def test_an_answer_can_follow(tmp_path: Path) -> None:
    llm = new_llm(tmp_path)
    by_all = llm.generate(SHARED, max_tokens=5, prompt_logprobs=0)
    by_end = llm.generate(SHARED, max_tokens=5, prompt_logprobs=0, prompt_logprobs_from=150)
    assert by_end.token_ids == by_all.token_ids
    assert by_all.prompt_logprobs is not None
    assert by_end.prompt_logprobs == by_all.prompt_logprobs[149:]


def test_on_torch(tmp_path: Path) -> None:
    llm = new_llm(tmp_path, "torch")
    ids = llm.tokenizer.encode(SHARED)
    expected, _ = read(llm, ids, 0)
    found, receipt = read(llm, ids, 200)
    assert receipt.cached_tokens == 192
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in expected[199:]], abs=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_logprobs": 0, "prompt_logprobs_from": -1}, "must be 0 or more"),
        ({"prompt_logprobs": 0, "prompt_logprobs_from": None}, "must be a whole number"),
        ({"prompt_logprobs": 0, "prompt_logprobs_from": 1.5}, "must be a whole number"),
        ({"prompt_logprobs_from": 3}, "only with prompt_logprobs"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameter, match=message) as refused:
        SamplingParams(**fields)
    assert refused.value.field == "prompt_logprobs_from"
