"""The paged engine on tiny models of every family: cached = recomputed, in a batch = alone, counts = brute force."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from heedful.cost.receipt import Receipt
from heedful.engine.engine import Engine
from heedful.engine.scheduler import Scheduler
from heedful.engine.torch_runner import TorchRunner
from heedful.errors import BadParameter, CacheFull, ContextOverflow
from heedful.kernels.attention import DenseAttend
from heedful.models.config import ModelConfig, config_from_hf
from heedful.request import Finish, Request, SamplingParams, Sequence
from heedful.weights import names
from heedful.weights.safetensors_file import read_safetensors

GOLDEN = Path(__file__).parent.parent / "golden" / "tiny_decoders"
FAMILIES = sorted(folder.name for folder in GOLDEN.iterdir())
WITH_WINDOWS = ["mistral_swa16", "gemma3_text"]


def tiny_runner(family: str, capacity_tokens: int = 256, windows: tuple[int | None, ...] | None = None) -> TorchRunner:
    config = config_from_hf(json.loads((GOLDEN / family / "config.json").read_text()))
    weights = names.from_hf(read_safetensors(GOLDEN / family), config)
    if windows is not None:
        config = dataclasses.replace(config, windows=windows)
    return TorchRunner(config, weights, capacity_tokens=capacity_tokens, threads=2)


def tiny_engine(family: str, *, token_budget: int = 512, capacity_tokens: int = 256) -> Engine:
    runner = tiny_runner(family, capacity_tokens)
    engine = Engine(runner, model_name=family, context_len=runner.config.context_len, eos_ids=())
    engine.scheduler = Scheduler(runner.cache, token_budget)
    return engine


def answer(engine: Engine, prompt: list[int], max_tokens: int) -> tuple[list[int], Receipt]:
    sequence = engine.add(Request(tuple(prompt), SamplingParams(max_tokens=max_tokens)))
    while sequence.finish is None:
        engine.step()
    return sequence.token_ids[len(prompt) :], engine.receipt(sequence)


def greedy_without_cache(runner: TorchRunner, prompt: list[int], max_tokens: int) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(max_tokens):
            hidden = runner.decoder(torch.tensor(ids), torch.arange(len(ids)), DenseAttend([len(ids)]))
            ids.append(int(runner.decoder.logits(hidden[-1:]).argmax()))
    return ids[len(prompt) :]


def golden_prompts(family: str) -> tuple[list[list[int]], list[list[int]]]:
    recorded = load_file(GOLDEN / family / "golden.safetensors")
    return recorded["input_ids"].tolist(), recorded["greedy_ids"].tolist()


@pytest.mark.parametrize("token_budget", [512, 40, 7, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_cached_decoding_equals_the_recorded_continuations(family: str, token_budget: int) -> None:
    engine = tiny_engine(family, token_budget=token_budget)
    for prompt, expected in zip(*golden_prompts(family), strict=True):
        assert answer(engine, prompt, len(expected))[0] == expected


@pytest.mark.parametrize("windows", [(None, None, None), (5, None, 5), (70, 70, 70)])
def test_cached_decoding_equals_recomputation_under_other_windows(windows: tuple[int | None, ...]) -> None:
    runner = tiny_runner("mistral_swa16", windows=windows)
    engine = Engine(runner, model_name="tiny", context_len=256, eos_ids=())
    engine.scheduler = Scheduler(runner.cache, token_budget=30)
    prompt = golden_prompts("mistral_swa16")[0][0]
    assert answer(engine, prompt, 80)[0] == greedy_without_cache(runner, prompt, 80)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_a_batch_and_alone_the_tokens_are_the_same(family: str) -> None:
    engine = tiny_engine(family, token_budget=50, capacity_tokens=1024)
    prompts, expected = golden_prompts(family)
    lengths = [96, 33, 1]
    requests = [Request(tuple(prompt[:n]), SamplingParams(max_tokens=12)) for n in lengths for prompt in prompts]
    sequences = [engine.add(request) for request in requests]
    while engine.scheduler.has_work:
        engine.step()
    for sequence in sequences:
        alone, _ = answer(tiny_engine(family), list(sequence.request.prompt_ids), 12)
        assert sequence.token_ids[sequence.prompt_len :] == alone
    assert sequences[0].token_ids[96:] == expected[0][:12]
    assert engine.runner.cache.taken_bytes == 0


def mask_entries(config: ModelConfig, computed: int) -> tuple[int, int]:
    """(visits, dense visits) of `computed` tokens, entry by entry of every layer's mask."""
    made = dense = 0
    for window in config.windows:
        for query in range(computed):
            for key in range(query + 1):
                dense += config.num_heads
                if window is None or query - key < window:
                    made += config.num_heads
    return made, dense


@pytest.mark.parametrize("token_budget", [512, 13])
@pytest.mark.parametrize("family", ["llama_gqa", *WITH_WINDOWS])
def test_the_receipt_counts_every_mask_entry(family: str, token_budget: int) -> None:
    engine = tiny_engine(family, token_budget=token_budget)
    config = engine.runner.config
    prompt = golden_prompts(family)[0][0][:70]
    _, receipt = answer(engine, prompt, 20)
    made, dense = mask_entries(config, 70 + 20 - 1)  # the last token is never fed back
    prefill, _ = mask_entries(config, 70)
    assert (receipt.visits.total, receipt.visits.dense) == (made, dense)
    assert (receipt.visits.prefill, receipt.visits.decode) == (prefill, made - prefill)
    assert receipt.visits.dense == receipt.visits.total + sum(dataclasses.asdict(receipt.visits.saved).values())
    assert receipt.flops.attention == 4 * config.head_dim * made
    row_bytes = 4 * config.head_dim
    assert receipt.kv.bytes_written == 89 * 2 * config.num_kv_heads * config.num_layers * row_bytes
    assert receipt.kv.bytes_read == receipt.kv.rows_read * row_bytes
    assert (receipt.prompt_tokens, receipt.output_tokens) == (70, 20)


def test_rows_read_counts_each_key_once_a_step() -> None:
    engine = tiny_engine("mistral_swa16", token_budget=10)
    config = engine.runner.config
    _, receipt = answer(engine, golden_prompts("mistral_swa16")[0][0][:25], 4)
    steps = [(0, 10), (10, 20), (20, 25), (25, 26), (26, 27), (27, 28)]
    seen = [end - max(0, start - 15) for start, end in steps]  # window 16: the oldest key of the first query
    assert receipt.kv.rows_read == sum(seen) * 2 * config.num_kv_heads * config.num_layers


def test_weight_bytes_of_a_shared_step_sum_to_the_whole() -> None:
    engine = tiny_engine("llama_gqa", capacity_tokens=1024)
    sequences = [engine.add(Request((1, 2, 3, 4), SamplingParams(max_tokens=5))) for _ in range(3)]
    steps = 0
    while engine.scheduler.has_work:
        engine.step()
        steps += 1
    facts = engine.runner.facts
    shares = [engine.receipt(sequence).weights.bytes_read for sequence in sequences]
    assert steps == 5
    assert sum(shares) == steps * (facts.linear_bytes + facts.head_bytes)
    assert max(shares) - min(shares) <= 2 * steps


def test_runner_facts_are_the_bytes_of_the_parameters() -> None:
    for family in FAMILIES:
        runner = tiny_runner(family)
        matrices = [p for name, p in runner.decoder.named_parameters() if p.dim() == 2 and "embed" not in name]
        linear = sum(p.nbytes for p in matrices if p is not runner.decoder.head.weight)
        assert (runner.facts.linear_bytes, runner.facts.head_bytes) == (linear, runner.decoder.head.weight.nbytes)


def test_finish_reasons() -> None:
    engine = tiny_engine("llama_gqa")
    prompt, expected = (rows[0] for rows in golden_prompts("llama_gqa"))
    engine.eos_ids = frozenset({expected[3]})
    stopped = engine.add(Request(tuple(prompt), SamplingParams(max_tokens=16)))
    while stopped.finish is None:
        engine.step()
    assert stopped.finish is Finish.STOP
    assert stopped.token_ids[96:] == expected[:3]
    ignoring = engine.add(Request(tuple(prompt), SamplingParams(max_tokens=16, ignore_eos=True)))
    while ignoring.finish is None:
        engine.step()
    assert ignoring.finish is Finish.LENGTH
    assert ignoring.token_ids[96:] == expected


def test_an_answer_ends_where_the_context_does() -> None:
    engine = tiny_engine("llama_gqa")
    engine.context_len = 100
    tokens, _ = answer(engine, golden_prompts("llama_gqa")[0][0], 50)
    assert len(tokens) == 100 - 96
    assert len(answer(engine, [1] * 100, 50)[0]) == 1  # a prompt that fills the context still gets one token


def test_requests_that_can_never_run_are_refused() -> None:
    engine = tiny_engine("llama_gqa")
    with pytest.raises(ContextOverflow, match=r"257 tokens and the context is 256") as refused:
        engine.add(Request((1,) * 257))
    assert (refused.value.prompt_tokens, refused.value.context_len) == (257, 256)
    with pytest.raises(BadParameter, match="prompt"):
        engine.add(Request(()))
    with pytest.raises(BadParameter, match="96"):
        engine.add(Request((96,)))
    with pytest.raises(CacheFull, match=r"200 tokens need 0\.\d+ MB of KV cache and there are 0\.\d+"):
        tiny_engine("llama_gqa", capacity_tokens=128).add(Request((1,) * 150, SamplingParams(max_tokens=51)))
    assert not engine.scheduler.has_work


def test_sequences_that_do_not_fit_together_wait_their_turn() -> None:
    engine = tiny_engine("llama_gqa", capacity_tokens=192)
    expected, _ = answer(engine, [5] * 90, 30)
    sequences = [engine.add(Request((5,) * 90, SamplingParams(max_tokens=30))) for _ in range(3)]
    while engine.scheduler.has_work:
        engine.step()
    assert [sequence.token_ids[90:] for sequence in sequences] == [expected] * 3


def test_an_aborted_sequence_frees_its_pages_at_once_and_its_receipt_says_what_was_done() -> None:
    engine = tiny_engine("llama_gqa", token_budget=20)
    sequence = engine.add(Request((5,) * 90, SamplingParams(max_tokens=30)))
    waiting = engine.add(Request((5,) * 90, SamplingParams(max_tokens=160)))
    for _ in range(2):
        engine.step()
    engine.end(sequence, Finish.CANCELLED)
    engine.end(sequence, Finish.CANCELLED)
    engine.end(waiting, Finish.CANCELLED)
    assert engine.runner.cache.taken_bytes == 0
    receipt = engine.receipt(sequence)
    assert receipt.visits.prefill == mask_entries(engine.runner.config, 40)[0]
    assert receipt.output_tokens == 0
    assert engine.receipt(waiting).visits.dense == 0


def test_decoding_goes_first_when_a_long_prefill_runs() -> None:
    engine = tiny_engine("llama_gqa", token_budget=16, capacity_tokens=1024)
    short = engine.add(Request((1, 2, 3), SamplingParams(max_tokens=6)))
    engine.step()
    engine.add(Request((7,) * 200, SamplingParams(max_tokens=2)))
    for expected in range(2, 6):
        engine.step()
        assert short.output_len == expected


def test_scheduling_is_pure_and_stays_within_its_budget() -> None:
    runner = tiny_runner("mistral_swa16", capacity_tokens=4096)
    scheduler = Scheduler(runner.cache, token_budget=64)
    sequences = [Sequence(Request((n,) * n), [n] * n) for n in (100, 3, 70)]
    for sequence in sequences:
        scheduler.add(sequence, longest=len(sequence.token_ids))
    seen: list[int] = []
    for _ in range(3):
        batch = scheduler.schedule()
        seen.append(sum(chunk.end - chunk.start for chunk in batch.chunks))
        for chunk in batch.chunks:
            chunk.sequence.cached_len = chunk.end
    assert seen == [64, 64, 45]
    assert scheduler.schedule().chunks == ()


def test_logits_do_not_depend_on_stale_page_contents() -> None:
    """Pages are reused without being cleared; NaN in a slot that is not read must not reach the logits."""
    engine = tiny_engine("mistral_swa16")
    expected, _ = answer(tiny_engine("mistral_swa16"), [3] * 70, 10)
    answer(engine, [4] * 70, 10)
    for arena in engine.runner.cache.arenas:
        for buffer in arena.buffers.values():
            buffer.fill(0xFF)  # NaN, read as floats
    assert answer(engine, [3] * 70, 10)[0] == expected
