"""Shared prefixes with real runners: cold and warm give the same tokens, and natively the same logits to the bit."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from heedful import LLM, CachePolicy
from heedful.cache.disk import DiskTier
from heedful.cli.prefix_options import prefix_cache_from_options
from heedful.cost.receipt import Receipt
from heedful.engine.engine import Engine
from heedful.engine.prefix_identity import prefix_fingerprint
from heedful.engine.runner import Runner
from heedful.engine.scheduler import Scheduler
from heedful.errors import BadParameter
from heedful.kernels import native
from heedful.models.config import ModelConfig, config_from_hf
from heedful.request import Batch, Request, SamplingParams
from heedful.testing import make_tiny_model
from heedful.weights import names
from heedful.weights.load import load
from heedful.weights.names import Weights
from heedful.weights.safetensors_file import read_safetensors

TINY = Path(__file__).parent.parent / "golden" / "tiny_decoders"
FAMILIES = sorted(folder.name for folder in TINY.iterdir())
LEARNED_POSITIONS = ("gpt2_mha",)
POLICIES = {
    "own": CachePolicy(),
    "f32": CachePolicy(kv_format="f32"),
    "q4": CachePolicy(kv_format="q4", precise=0),
    "mixed": CachePolicy(kv_format="q4"),
    "k_v_apart": CachePolicy(kv_format="k=q8,v=q4", precise=64),
    "sinks": CachePolicy(window=100, sinks=4),
    "mixed_sinks": CachePolicy(kv_format="q4", window=200, sinks=70),
    "budget": CachePolicy(budget=256),
    "sparse": CachePolicy(sparse_prefill=True),
}
needs_native = pytest.mark.skipif(not native.is_built(), reason="no compiler: the native kernels are not built")


@cache
def tiny(family: str) -> tuple[ModelConfig, Weights]:
    config = config_from_hf(json.loads((TINY / family / "config.json").read_text()))
    return config, names.from_hf(read_safetensors(TINY / family), config)


def new_engine(kind: str, family: str, *, token_budget: int = 512, disk: DiskTier | None = None) -> Engine:
    config, weights = tiny(family)
    if kind == "native":
        from heedful.engine.native_runner import NativeRunner

        runner: Runner = NativeRunner(config, weights, capacity_tokens=8192, threads=2)
    else:
        from heedful.engine.torch_runner import TorchRunner

        runner = TorchRunner(config, weights, capacity_tokens=4096, threads=1)
    engine = Engine(runner, model_name=family, context_len=128 if family in LEARNED_POSITIONS else 4096, eos_ids=())
    engine.scheduler = Scheduler(runner.cache, token_budget, disk)
    return engine


def ask(
    engine: Engine, prompt: list[int], max_tokens: int, policy: CachePolicy, salt: str = ""
) -> tuple[list[int], npt.NDArray[np.float32], Receipt]:
    """(prompt and answer, logits of every answered token, receipt)."""
    sequence = engine.add(Request(tuple(prompt), SamplingParams(max_tokens=max_tokens), policy, cache_salt=salt))
    logits: list[npt.NDArray[np.float32]] = []
    run: Callable[[Batch], npt.NDArray[np.float32]] = engine.runner.run

    def recording(batch: Batch) -> npt.NDArray[np.float32]:
        rows = run(batch)
        logits.extend(row.copy() for row in rows)
        return rows

    engine.runner.run = recording  # type: ignore[method-assign]
    try:
        while sequence.finish is None:
            engine.step()
    finally:
        engine.runner.run = run  # type: ignore[method-assign]
    return sequence.token_ids, np.array(logits), engine.receipt(sequence)


def two_turns(family: str) -> tuple[list[int], int, list[int]]:
    """(first prompt, tokens of the answer, what the second turn adds)."""
    vocab, long = tiny(family)[0].vocab_size, family not in LEARNED_POSITIONS
    tokens = np.random.default_rng(3).integers(0, vocab, 700).tolist()
    return (tokens[:600], 60, tokens[600:630]) if long else (tokens[:60], 45, tokens[600:612])


def shareable(first: list[int], said: list[int], policy: CachePolicy, windows: tuple[int | None, ...]) -> int:
    if policy.sparse_prefill:
        return max(0, len(first) - 100)
    if policy.budget is not None and None in windows and len(said) > policy.budget:
        return max(len(first), policy.budget)
    return len(said) - 1  # the last token of an answer is not fed back


def check_second_turn(kind: str, family: str, policy: CachePolicy) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Returns the logits of the second answer, cold and warm."""
    first, answer_len, question = two_turns(family)
    engine = new_engine(kind, family)
    said, _, _ = ask(engine, first, answer_len, policy)
    expected, cold, _ = ask(new_engine(kind, family), [*said, *question], 8, policy)
    found, warm, receipt = ask(engine, [*said, *question], 8, policy)
    windows = tiny(family)[0].windows
    assert receipt.cached_tokens == shareable(first, said, policy, windows) // 64 * 64
    assert found == expected
    return cold, warm


@needs_native
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_turn_computes_the_same_bits_from_the_first_one_as_alone(family: str, policy: str) -> None:
    np.testing.assert_array_equal(*check_second_turn("native", family, POLICIES[policy]))


@pytest.mark.parametrize("policy", ["own", "mixed", "sinks"])
@pytest.mark.parametrize("family", ["llama_gqa", "gemma3_text", "mistral_swa16", "gpt2_mha"])
def test_a_second_turn_on_torch(family: str, policy: str) -> None:
    """PyTorch's own products round in another way for other numbers of rows."""
    cold, warm = check_second_turn("torch", family, POLICIES[policy])
    np.testing.assert_allclose(warm, cold, rtol=1e-4, atol=2e-3 if policy == "mixed" else 1e-4)


@needs_native
@pytest.mark.parametrize("family", ["llama_gqa", "gemma3_text"])
def test_from_disk_the_bits_are_the_same_too(tmp_path: Path, family: str) -> None:
    first, answer_len, question = two_turns(family)
    for name, policy in POLICIES.items():
        folder = tmp_path / name
        writing = new_engine("native", family, disk=DiskTier(folder, "ab" * 32, 1 << 30))
        said, _, _ = ask(writing, first, answer_len, policy)
        expected, cold, _ = ask(new_engine("native", family), [*said, *question], 8, policy)
        writing.close()
        reading = new_engine("native", family, disk=DiskTier(folder, "ab" * 32, 1 << 30))
        found, warm, receipt = ask(reading, [*said, *question], 8, policy)
        reading.close()
        assert receipt.cached_tokens == shareable(first, said, policy, tiny(family)[0].windows) // 64 * 64, name
        assert found == expected, name
        np.testing.assert_array_equal(warm, cold, name)


@needs_native
def test_concurrent_requests_with_one_beginning() -> None:
    """They come while the first one is being computed, and each gets what it would get alone."""
    first, _, _ = two_turns("gemma3_text")
    prompts = [[*first[:cut], *range(1, 20 + cut % 7)] for cut in (600, 300, 590, 64, 450)]
    alone = [ask(new_engine("native", "gemma3_text"), prompt, 12, CachePolicy())[0] for prompt in prompts]
    engine = new_engine("native", "gemma3_text", token_budget=96)
    sequences = []
    for prompt in [*prompts, *prompts]:
        sequences.append(engine.add(Request(tuple(prompt), SamplingParams(max_tokens=12))))
        engine.step()
        engine.step()
    while engine.scheduler.has_work:
        engine.step()
    assert [sequence.token_ids for sequence in sequences] == [*alone, *alone]
    cached = [engine.receipt(sequence).cached_tokens for sequence in sequences]
    assert cached[0] == 0
    assert sum(cached) > 1000
    for prompt in prompts:
        assert ask(engine, prompt, 1, CachePolicy())[2].cached_tokens == (len(prompt) - 1) // 64 * 64
    assert engine.runner.cache.taken_bytes == 0


@needs_native
def test_requests_with_other_salts_are_computed_whole() -> None:
    engine = new_engine("native", "llama_gqa")
    prompt = two_turns("llama_gqa")[0][:200]
    cached = [ask(engine, prompt, 2, CachePolicy(), salt)[2].cached_tokens for salt in ("", "a", "b", "a", "")]
    assert cached == [0, 0, 0, 192, 192]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), context_len=2048, sliding_window=100)


PROMPT = "The sun rose over the hills and the river ran on, as it had always done. " * 4


def test_the_next_process_reads_what_this_one_computed(tiny_folder: Path, tmp_path: Path) -> None:
    first = LLM(tiny_folder, prefix_cache=tmp_path)
    expected = first.generate(PROMPT, max_tokens=5)
    first.close()
    first.close()
    assert first.generate(PROMPT, max_tokens=5).token_ids == expected.token_ids  # answers, and writes no more
    second = LLM(str(tiny_folder), prefix_cache=str(tmp_path), prefix_cache_bytes=10**9)
    again = second.generate(PROMPT, max_tokens=5)
    assert again.token_ids == expected.token_ids
    assert again.receipt.cached_tokens == again.receipt.prompt_tokens // 64 * 64
    assert again.receipt.to_dict()["prefix"] == {
        "cached_tokens": again.receipt.cached_tokens, "diverged_at": None, "reason": "page_border",
    }  # fmt: skip
    second.close()


def test_a_conversation_reuses_its_turns(tiny_folder: Path) -> None:
    llm = LLM(tiny_folder)
    messages = [{"role": "user", "content": PROMPT}]
    first = llm.chat(messages, max_tokens=3)
    second = llm.chat(
        [*messages, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}], max_tokens=3
    )
    assert second.receipt.cached_tokens == first.receipt.prompt_tokens // 64 * 64
    assert second.receipt.prefix is not None
    assert second.receipt.prefix.reason in ("tokens_differ", "earlier_ended")
    assert second.receipt.prefix.diverged_at == first.receipt.prompt_tokens


def fingerprint(folder: Path, **options: Any) -> str:
    llm = LLM(folder, **options)
    return prefix_fingerprint(load(str(folder)), llm.engine.runner, options.get("weights"))


def test_another_model_tokenizer_or_runner_has_another_fingerprint(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "a")
    fingerprints = [fingerprint(folder), fingerprint(folder)]
    fingerprints.append(fingerprint(make_tiny_model(tmp_path / "b", seed=1)))
    fingerprints.append(fingerprint(make_tiny_model(tmp_path / "c", sliding_window=100)))
    fingerprints.append(fingerprint(make_tiny_model(tmp_path / "d", chat=False)))
    fingerprints.append(fingerprint(make_tiny_model(tmp_path / "e", context_len=1024)))
    if native.is_built():
        fingerprints.append(fingerprint(folder, weights="q8"))
        fingerprints.append(fingerprint(folder, runner="torch"))
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == len(fingerprints) - 1


def test_a_changed_model_finds_nothing_on_disk(tmp_path: Path) -> None:
    for seed in (0, 1):
        llm = LLM(make_tiny_model(tmp_path / f"model{seed}", seed=seed), prefix_cache=tmp_path / "pages")
        assert llm.generate(PROMPT, max_tokens=2).receipt.cached_tokens == 0
        llm.close()
    assert len(list((tmp_path / "pages").iterdir())) == 2


def test_folders_and_sizes_that_will_not_do(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadParameter, match="prefix_cache: "):
        LLM(tiny_folder, prefix_cache=tmp_path / "file")
    with pytest.raises(BadParameter, match="prefix_cache_bytes"):
        LLM(tiny_folder, prefix_cache=tmp_path, prefix_cache_bytes=0)
    for size, number in {
        "2GB": 2 * 10**9,
        "500mb": 5 * 10**8,
        "1.5k": 1500,
        "70000": 70000,
        " 3 TB": 3 * 10**12,
    }.items():
        assert prefix_cache_from_options(tmp_path, size)["prefix_cache_bytes"] == number
    for size in ("", "GB", "-1GB", "0", "1e9", "2GiB", "٣GB"):
        with pytest.raises(BadParameter, match="prefix-cache-size"):
            prefix_cache_from_options(tmp_path, size)


def test_a_folder_that_vanishes_costs_the_reuse_and_nothing_else(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pages = tmp_path / "pages"
    llm = LLM(tiny_folder, prefix_cache=pages)
    for entry in pages.iterdir():
        entry.rmdir()
    pages.rmdir()
    pages.write_text("now a file")
    with caplog.at_level(logging.WARNING):
        answer = llm.generate(PROMPT, max_tokens=4)
        llm.close()
    assert len(answer.token_ids) == 4
    assert "pages cannot be kept" in caplog.text
