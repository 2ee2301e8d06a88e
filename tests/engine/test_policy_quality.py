"""A policy's loss on a text: by hand on scripted distributions, and on a real runner against the engine's own steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import log
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from scripted_runner import ScriptedRunner

from heedful import LLM
from heedful.cache.policy_text import parse_policy
from heedful.engine.make_runner import make_runner
from heedful.engine.policy_quality import (
    CONTROL,
    EXACT,
    acts_from,
    in_float32,
    measure_passage,
    passage_ids,
    predictions,
    shipped_text,
)
from heedful.errors import BadLogits, BadParameter, CacheFull
from heedful.request import Batch, CachePolicy, Request, SamplingParams, Sequence
from heedful.testing import make_tiny_model
from heedful.text.tokenizer import Tokenizer
from heedful.weights.load import load

EVEN = [0.25, 0.25, 0.25, 0.25]
UNEVEN = [0.5, 0.25, 0.125, 0.125]
CACHED = CachePolicy(kv_format="q8")


def logits(probabilities: list[float]) -> npt.NDArray[np.float32]:
    """As a model might give them: shifted by any number."""
    return (np.log(probabilities) + 7).astype(np.float32)


def scripted(under_policy: Callable[[int], list[float]]) -> ScriptedRunner:
    """UNEVEN under exact attention, EVEN in the control; what a policy makes of it depends on the position."""

    def of(sequence: Sequence) -> npt.NDArray[np.float32]:
        known = {EXACT: UNEVEN, CONTROL: EVEN}
        return logits(known.get(sequence.request.policy) or under_policy(len(sequence.token_ids) - 1))

    return ScriptedRunner(of)


def test_loss_by_hand() -> None:
    """Position 3 and 4 predict tokens 0 and 2 of six; there the policy is EVEN, at position 2 it is exact."""
    runner = scripted(lambda position: UNEVEN if position == 2 else EVEN)
    (loss,) = measure_passage(runner, [1, 1, 1, 3, 0, 2], [CACHED], text="six tokens")
    kld = 0.5 * log(2) - 0.25 * log(2)  # 0.5·ln(0.5/0.25) + 2·0.125·ln(0.125/0.25)
    assert loss.tokens == 3
    assert loss.mean_kld == pytest.approx(2 * kld / 3, abs=1e-7)
    assert loss.p50_kld == pytest.approx(kld, abs=1e-7)
    assert loss.max_kld == pytest.approx(kld, abs=1e-7)
    assert loss.mean_delta_nll == pytest.approx((0 + log(2) - log(2)) / 3, abs=1e-7)
    assert loss.agreement == 1.0
    assert loss.noise_kld == pytest.approx(kld, abs=1e-7)
    assert loss.text == "six tokens"


def test_agreement_and_the_sign_of_the_loss() -> None:
    turned = UNEVEN[::-1]
    (loss,) = measure_passage(scripted(lambda p: turned if p % 2 else UNEVEN), [0] * 200, [CACHED], text="")
    assert loss.agreement == 0.5
    assert loss.mean_delta_nll == pytest.approx(log(0.5 / 0.125) / 2, abs=1e-6)  # the policy loses where it is positive
    kld = (0.5 - 0.125) * log(0.5 / 0.125) + (0.25 - 0.125) * log(0.25 / 0.125)
    assert loss.mean_kld == pytest.approx(kld / 2, abs=1e-6)
    assert loss.p99_kld == pytest.approx(kld, abs=1e-6)


def test_kld_is_of_the_policy_from_exact_attention_not_the_other_way() -> None:
    (loss,) = measure_passage(scripted(lambda p: [0.7, 0.1, 0.1, 0.1]), [0] * 20, [CACHED], text="")
    assert loss.mean_kld == pytest.approx(
        0.5 * log(0.5 / 0.7) + 0.25 * log(0.25 / 0.1) + 2 * 0.125 * log(0.125 / 0.1), abs=1e-6
    )


def test_the_first_half_is_a_prompt_and_the_second_is_decoded_in_lockstep() -> None:
    seen: list[list[tuple[int, int, bool]]] = []

    def look(batch: Batch) -> None:
        for chunk in batch.chunks:
            assert chunk.sequence.prompt_len == 700
        seen.append([(c.start, c.end, c.spans[0].selection is not None) for c in batch.chunks])

    runner = scripted(lambda p: EVEN)
    runner.on_step = look
    done: list[int] = []
    policies = [parse_policy("kv=q8"), parse_policy("kv=q8,budget=256")]
    measure_passage(runner, [1] * 1400, policies, text="", progress=done.append)
    assert seen[:8] == 4 * [[(0, 512, False)], [(512, 700, False)]]
    assert seen[8:] == [[(p, p + 1, selects) for selects in (False, False, False, True)] for p in range(700, 1399)]
    assert sum(done) == 4 * 1399
    assert runner.cache.taken_bytes == 0


def test_pages_go_back_when_a_step_fails() -> None:
    runner = scripted(lambda p: EVEN)

    def fail(batch: Batch) -> None:
        if batch.chunks[0].start == 60:
            raise KeyboardInterrupt

    runner.on_step = fail
    with pytest.raises(KeyboardInterrupt):
        measure_passage(runner, [1] * 100, [CACHED], text="")
    assert runner.cache.taken_bytes == 0


def test_logits_that_are_no_numbers_are_refused() -> None:
    runner = ScriptedRunner(lambda sequence: np.full(4, np.nan, dtype=np.float32))
    with pytest.raises(BadLogits, match="not finite"):
        measure_passage(runner, [1] * 100, [CACHED], text="")


def test_what_does_not_fit_is_refused_before_anything_is_computed() -> None:
    runner = ScriptedRunner(lambda sequence: logits(EVEN), capacity_tokens=1000)
    with pytest.raises(CacheFull, match=r"4 sequences of 900 tokens need .* MB"):
        measure_passage(runner, [1] * 900, [CACHED, CACHED], text="")
    assert runner.steps == 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(make_tiny_model(tmp_path_factory.mktemp("tiny"), sliding_window=40)), runner="torch")


def test_a_real_runner_predicts_in_lockstep_what_it_predicts_alone(tiny: LLM) -> None:
    runner = tiny.engine.runner
    ids = [(i * 37) % 250 for i in range(150)]
    together = [row for row, _ in predictions(runner, ids, [EXACT, CachePolicy(kv_format="f32")], prompt_len=70)]
    for position in (70, 100, 149):
        sequence = Sequence(Request(tuple(ids[:position]), SamplingParams()), ids[:position])
        alone = runner.run(Batch((runner.cache.plan(sequence, position),)))[0].copy()
        runner.cache.release(sequence)
        np.testing.assert_allclose(together[position - 70], np.stack([alone, alone]), atol=2e-5)
    (loss,) = measure_passage(runner, ids, [EXACT], text="")
    assert loss.max_kld < 1e-9
    assert loss.agreement == 1.0


def test_in_float32_the_weights_are_the_same_and_the_noise_is_gone(smollm2_path: Path) -> None:
    loaded = load(str(smollm2_path))
    floats = in_float32(loaded)
    assert {tensor.format_name for tensor in floats.weights.values()} == {"F32"}
    for name in ("embed.weight", "layers.7.mlp.down.weight", "norm.weight"):
        np.testing.assert_array_equal(floats.weights[name].to_float32(), loaded.weights[name].to_float32())
        assert floats.weights[name].shape == loaded.weights[name].shape
    runner = make_runner(
        floats, kind="auto", kv_format="f32", weights_format=None, context_len=256, threads=2, free_memory_bytes=0
    )
    ids, _ = passage_ids(loaded.tokenizer, context_len=40, policies=[])
    (loss,) = measure_passage(runner, ids, [CACHED], text="")
    assert loss.noise_kld < 1e-5 < loss.mean_kld < 0.01


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_file(make_tiny_model(tmp_path_factory.mktemp("bytes")) / "tokenizer.json")


def test_the_shipped_text_is_the_golden_one(golden: Path) -> None:
    passage = json.loads((golden / "smollm2" / "passage.json").read_text())["text"]
    assert shipped_text().startswith(passage.strip())
    assert shipped_text().endswith("said Alice.\n")


def test_the_shipped_text_goes_as_far_as_the_context(tokenizer: Tokenizer) -> None:
    text = shipped_text().encode()
    ids, what = passage_ids(tokenizer, context_len=100_000, policies=[CACHED])
    assert ids_to_bytes(tokenizer, ids) == text
    assert what == (
        f"Alice's Adventures in Wonderland, chapters I and VII, the last {len(text) - len(text) // 2:,} of "
        f"{len(text):,} tokens"
    )
    ids, what = passage_ids(tokenizer, context_len=501, policies=[CACHED])
    assert ids_to_bytes(tokenizer, ids) == text[:501]
    assert what.endswith("the last 251 of 501 tokens")


def ids_to_bytes(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(tokenizer.token_bytes(token) for token in ids)


def test_generated_sentences_come_before_it_where_more_is_wanted(tokenizer: Tokenizer) -> None:
    wide = parse_policy("kv=q8,window=6000,sinks=4")
    ids, what = passage_ids(tokenizer, context_len=100_000, policies=[CACHED, wide])
    assert len(ids) == 3 * 6004
    assert "VII after generated sentences, the last 9,006 of 18,012 tokens" in what
    assert shipped_text()[:9000].encode() in ids_to_bytes(tokenizer, ids)
    assert passage_ids(tokenizer, context_len=100_000, policies=[wide])[0] == ids


def test_a_given_text_is_taken_as_it_is(tokenizer: Tokenizer) -> None:
    ids, what = passage_ids(tokenizer, context_len=1000, policies=[CACHED], text="x" * 300, tokens=200)
    assert (len(ids), what) == (200, "the given text, the last 100 of 200 tokens")
    with pytest.raises(BadParameter, match="the text has 300"):
        passage_ids(tokenizer, context_len=1000, policies=[CACHED], text="x" * 300, tokens=301)
    with pytest.raises(BadParameter, match="too few"):
        passage_ids(tokenizer, context_len=1000, policies=[CACHED], text="")


@pytest.mark.parametrize(
    ("policy", "tokens"),
    [
        ("kv=q4,precise=0", 0),
        ("kv=q4", 512),
        ("kv=k:q8/v:q4,precise=400", 1024),
        ("kv=q4,precise=384", 512),
        ("kv=q8,window=700,sinks=4", 704),
        ("kv=q8,budget=600", 600),
        ("kv=q8,prefill=sparse", 2048),
        ("kv=q8,prefill=sparse,budget=4096", 4096),
    ],
)
def test_a_policy_that_is_not_in_force_on_the_text_is_not_measured_on_it(
    tokenizer: Tokenizer, policy: str, tokens: int
) -> None:
    asked = parse_policy(policy)
    assert acts_from(asked) == tokens
    passage_ids(tokenizer, context_len=10_000, policies=[asked], tokens=tokens + 16)
    if tokens:
        with pytest.raises(BadParameter, match="is not in force within"):
            passage_ids(tokenizer, context_len=10_000, policies=[CACHED, asked], tokens=tokens)
