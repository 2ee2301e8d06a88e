"""Guesses never change an answer; they only make it shorter in steps, and the wrong ones are in the receipt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.scripted_runner import ScriptedRunner

from heedful import LLM
from heedful.engine.drafts import FIRST_GUESS, LONGEST_GUESS, SHORTEST_REST, Drafter
from heedful.engine.engine import Engine
from heedful.kernels import native
from heedful.request import CachePolicy, Request, SamplingParams, Sequence
from heedful.testing import make_tiny_model

VOCAB = 11


def repeating(sequence: Sequence) -> npt.NDArray[np.float32]:
    """Says what came after the newest two tokens before, but now and then something else."""
    ids = sequence.token_ids
    wanted = (ids[-1] * 3 + len(ids) // 40) % VOCAB
    for i in range(len(ids) - 2, 1, -1):
        if ids[i - 2 : i] == ids[-2:] and len(ids) % 17:
            wanted = ids[i]
            break
    logits = np.linspace(0, 1, VOCAB, dtype=np.float32)
    logits[wanted] = 3
    return logits


def answer(prompt: list[int], sampling: SamplingParams, *, speculate: bool) -> tuple[Sequence, Engine, int]:
    runner = ScriptedRunner(repeating, vocab_size=VOCAB)
    engine = Engine(runner, model_name="scripted", context_len=4096, eos_ids={5})
    sequence = engine.add(Request(tuple(prompt), sampling, speculate=speculate))
    while sequence.finish is None:
        engine.step()
    return sequence, engine, runner.steps


@settings(max_examples=80, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=150),
    max_tokens=st.integers(1, 200),
    temperature=st.sampled_from([0.0, 0.3]),
    ignore_eos=st.booleans(),
)
def test_the_same_tokens_with_guesses_and_without(
    prompt: list[int], max_tokens: int, temperature: float, ignore_eos: bool
) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1, ignore_eos=ignore_eos, logprobs=1)
    plain, plain_engine, steps = answer(prompt, sampling, speculate=False)
    guessed, engine, fewer = answer(prompt, sampling, speculate=True)
    assert guessed.token_ids == plain.token_ids
    assert guessed.finish is plain.finish
    assert fewer <= steps
    expected, receipt = plain_engine.receipt(plain), engine.receipt(guessed)
    # every visit without guesses is also made with them; what is more was rejected
    assert receipt.visits.total - receipt.visits.rejected <= expected.visits.total
    assert receipt.visits.dense == receipt.visits.total
    assert engine.runner.cache.taken_bytes == 0


def test_repetition_takes_fewer_steps_and_no_visits_more() -> None:
    prompt = [1, 2, 3, 4, 6, 7, 8, 9] * 10
    sampling = SamplingParams(max_tokens=64, ignore_eos=True)
    plain, _, steps = answer(prompt, sampling, speculate=False)
    guessed, engine, fewer = answer(prompt, sampling, speculate=True)
    assert guessed.token_ids == plain.token_ids
    assert fewer < 0.6 * steps
    assert engine.receipt(guessed).visits.recomputed == 0


def test_rejected_visits_are_those_of_the_wrong_guesses_by_hand() -> None:
    """The prompt promises 4, 6, 7, 8 after 1, 2, 3; the model says 9 and stops."""
    runner = ScriptedRunner(
        lambda s: np.eye(VOCAB, dtype=np.float32)[3 if len(s.token_ids) == 8 else 9], vocab_size=VOCAB
    )
    engine = Engine(runner, model_name="scripted", context_len=4096, eos_ids=())
    prompt = (1, 2, 3, 4, 6, 7, 1, 2)  # then it says 3: and 4, 6, 7, 1 are guessed
    sequence = engine.add(Request(prompt, SamplingParams(max_tokens=6), speculate=True))
    engine.step()
    engine.step()
    assert sequence.token_ids[8:] == [3, 9]
    while sequence.finish is None:
        engine.step()
    heads, layers = runner.config.num_heads, runner.config.num_layers
    # four guesses stood at positions 9, 10, 11 and 12, and saw 10, 11, 12 and 13 tokens
    receipt = engine.receipt(sequence)
    assert receipt.visits.rejected == heads * layers * (10 + 11 + 12 + 13)
    assert (receipt.guesses.made, receipt.guesses.right) == (4, 0)


def test_guessing_rests_where_it_is_wrong_and_grows_where_it_is_right() -> None:
    ids = [1, 2, 3, 4] * 50
    drafter = Drafter(ids)
    assert len(drafter.guess(100)) == FIRST_GUESS
    for _ in range(5):
        drafter.judge(FIRST_GUESS, FIRST_GUESS)
    assert len(drafter.guess(100)) == LONGEST_GUESS
    assert len(drafter.guess(2)) == 2
    while drafter.guess(100):
        drafter.judge(LONGEST_GUESS, 0)
    ids += [1, 2, 3, 4] * (SHORTEST_REST // 4 - 1) + [1, 2, 3]
    assert drafter.guess(100) == []
    ids += [4]
    assert 0 < len(drafter.guess(100)) < FIRST_GUESS


def test_short_and_new_texts_are_not_guessed() -> None:
    assert Drafter([1, 2, 3]).guess(8) == []
    assert Drafter([1, 2, 3, 4, 5, 6, 7]).guess(8) == []


@pytest.mark.parametrize("policy", [CachePolicy(), CachePolicy(window=70, sinks=4), CachePolicy(kv_format="q4")])
@pytest.mark.parametrize("runner", ["native", "torch"])
def test_a_real_model_says_the_same_with_guesses(tmp_path: Path, policy: CachePolicy, runner: str) -> None:
    if runner == "native" and not native.is_built():
        pytest.skip("the native kernels are not built here")
    if runner == "torch" and policy.kv_format == "q4":
        pytest.skip("the native test has it")
    llm = LLM(str(make_tiny_model(tmp_path)), runner=runner)
    prompt = llm.tokenizer.encode("one two three one two three " * 8)
    said = []
    for speculate in (False, True):
        request = Request(tuple(prompt), SamplingParams(max_tokens=120, ignore_eos=True), policy, speculate=speculate)
        sequence = llm.engine.add(request)
        while sequence.finish is None:
            llm.engine.step()
        said.append(sequence.token_ids)
        llm.engine.receipt(sequence)
    assert said[0] == said[1]


def test_prompt_logprobs_are_those_of_reading_token_by_token(tmp_path: Path) -> None:
    llm = LLM(str(make_tiny_model(tmp_path)))
    ids = llm.tokenizer.encode("The quick brown fox jumps over the lazy dog, twice." * 4)
    for _ in range(2):  # the second time the prompt's prefix is there, and must be read nevertheless
        sequence = llm.engine.add(Request(tuple(ids), SamplingParams(max_tokens=0, prompt_logprobs=2)))
        while sequence.finish is None:
            llm.engine.step()
        receipt = llm.engine.receipt(sequence)
        assert receipt.output_tokens == 0
        assert receipt.cached_tokens == 0
        assert len(sequence.prompt_logprobs) == len(ids) - 1
    for at in (0, 1, 63, 64, 130):
        step = llm.engine.add(
            Request(tuple(ids[: at + 1]), SamplingParams(max_tokens=1, logprobs=300, ignore_eos=True))
        )
        (token,) = [t for _ in range(3) for t in llm.engine.step()][:1]
        llm.engine.receipt(step)
        alone = dict(token.sampled.top_logprobs)
        read = sequence.prompt_logprobs[at]
        assert read.token_id == ids[at + 1]
        assert read.logprob == alone[ids[at + 1]]
        assert dict(read.top_logprobs) == dict(token.sampled.top_logprobs[:2])
