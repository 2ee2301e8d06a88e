"""Cache policies in the native runner: against the plain one, and to the bit in any chunk, batch and thread count."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from heedful.cache import pages as cache_pages
from heedful.engine.runner import Runner
from heedful.engine.torch_runner import TorchRunner
from heedful.kernels import native
from heedful.models.config import ModelConfig, config_from_hf
from heedful.request import Batch, CachePolicy, Request, Sequence
from heedful.weights import names
from heedful.weights.names import Weights
from heedful.weights.safetensors_file import read_safetensors

if not native.is_built():
    pytest.skip("no compiler: the native kernels are not built", allow_module_level=True)

from heedful.engine.native_runner import NativeRunner

GOLDEN = Path(__file__).parent.parent / "golden"
# heads of 32 channels, without and with windows; heads of 16 with two kinds of layers, never rotated
FAMILIES = ["llama3_rope", "qwen3_qknorm", "mistral_swa16", "gemma3_text"]
PROMPT_LEN, LENGTH = 378, 388  # decoding crosses a page and a stride
SMALLER = {"STRIDE": 128, "SPARSE_SINKS": 70, "SPARSE_WINDOW": 90, "SPARSE_TAIL": 30}

# Root mean square of the difference, of logits that deviate by 0.7 to 2.6. Floats: sums in another order (5e-6 seen).
# Rounded rows: codes a step apart, queries and weights rounded by the native kernels (8-bit queries for 4-bit keys),
# magnified by random weights: about twice what was seen.
EXACT = 5e-5
CASES = {
    "floats": (CachePolicy(kv_format="f32"), EXACT),
    "window": (CachePolicy(kv_format="f32", window=40), EXACT),
    "sinks": (CachePolicy(kv_format="f32", window=40, sinks=5), EXACT),
    "many sinks": (CachePolicy(kv_format="f32", window=20, sinks=150), EXACT),
    "sparse": (CachePolicy(kv_format="f32", sparse_prefill=True), EXACT),
    "halves": (CachePolicy(kv_format="f16"), 1e-3),
    "8 bits": (CachePolicy(kv_format="q8"), 0.01),
    "8-bit keys, 4-bit values": (CachePolicy(kv_format="k=q8,v=q4", precise=0), 0.03),
    "float keys, 4-bit values, window": (CachePolicy(kv_format="k=f32,v=q4", precise=64, window=100, sinks=3), 0.01),
    "4-bit keys": (CachePolicy(kv_format="k=q4,v=f32", precise=0), 0.3),
    "4 bits": (CachePolicy(kv_format="q4", precise=0), 0.3),
    "4 bits, newest precise": (CachePolicy(kv_format="q4", precise=64), 0.1),
    "4 bits, sparse": (CachePolicy(kv_format="q4", sparse_prefill=True), 0.1),
    "4 bits, sinks": (CachePolicy(kv_format="q4", window=100, sinks=70), 0.1),
}
REACH = ("window", "sinks", "many sinks", "sparse")

Floats = npt.NDArray[np.float32]


@pytest.fixture(autouse=True)
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few hundred tokens meet every border."""
    for name, value in SMALLER.items():
        monkeypatch.setattr(cache_pages, name, value)


@cache
def tiny(family: str) -> tuple[ModelConfig, Weights]:
    folder = GOLDEN / "tiny_decoders" / family
    config = config_from_hf(json.loads((folder / "config.json").read_text()))
    return config, names.from_hf(read_safetensors(folder), config)


def native_runner(family: str, *, threads: int = 2) -> NativeRunner:
    return NativeRunner(*tiny(family), capacity_tokens=1 << 14, threads=threads)


@cache
def ids_of(family: str) -> list[int]:
    vocab_size = tiny(family)[0].vocab_size
    ids: list[int] = np.random.default_rng(0).integers(0, vocab_size, LENGTH).tolist()
    return ids


def answer_logits(runner: Runner, family: str, policy: CachePolicy, most: int) -> Floats:
    """(LENGTH - PROMPT_LEN + 1, vocab): the prompt in chunks of up to `most` tokens, then token by token."""
    ids = ids_of(family)
    sequence = Sequence(Request(tuple(ids[:PROMPT_LEN]), policy=policy), ids[:PROMPT_LEN])
    rows = []
    while sequence.cached_len < LENGTH:
        end = min(sequence.cached_len + most, len(sequence.token_ids))
        chunk = runner.cache.plan(sequence, runner.cache.chunk_end(sequence, end))
        logits = runner.run(Batch((chunk,)))
        sequence.cached_len = chunk.end
        if chunk.reaches_end:
            rows.append(logits[0].copy())
            sequence.token_ids.append(ids[min(chunk.end, LENGTH - 1)])
    runner.cache.release(sequence)
    return np.stack(rows)


def cases() -> list[tuple[str, str]]:
    """Reach on every family, number formats where heads are rotated."""
    return [(family, name) for name in CASES for family in (FAMILIES if name in REACH else FAMILIES[:2])]


@pytest.mark.parametrize(("family", "name"), cases())
def test_logits_are_the_plain_runner_s(family: str, name: str) -> None:
    policy, tolerance = CASES[name]
    plain = TorchRunner(*tiny(family), capacity_tokens=4096, threads=2)
    found = answer_logits(native_runner(family), family, policy, 512)
    difference = found - answer_logits(plain, family, policy, 512)
    assert np.sqrt(np.mean(difference**2)) < tolerance


BIT_CASES = ["many sinks", "sparse", "4 bits, newest precise", "float keys, 4-bit values, window", "4 bits, sinks"]


@pytest.mark.parametrize("name", BIT_CASES)
@pytest.mark.parametrize("family", ["llama3_rope", "gemma3_text"])
def test_a_token_is_the_same_to_the_bit_in_any_chunk_and_thread_count(family: str, name: str) -> None:
    policy = CASES[name][0]
    whole = answer_logits(native_runner(family), family, policy, 512)
    for most, threads in ((1, 2), (7, 3), (100, 1)):
        found = answer_logits(native_runner(family, threads=threads), family, policy, most)
        assert np.array_equal(found, whole), (most, threads)


def test_sequences_of_different_policies_share_a_step() -> None:
    """To the bit as when each is alone."""
    family = "llama3_rope"
    runner = native_runner(family)
    policies = [CASES[name][0] for name in BIT_CASES] + [CachePolicy()]
    ids = ids_of(family)
    alone = [answer_logits(runner, family, policy, 512) for policy in policies]
    sequences = [Sequence(Request(tuple(ids[:PROMPT_LEN]), policy=policy), ids[:PROMPT_LEN]) for policy in policies]
    for _ in range(2 * LENGTH):
        running = [sequence for sequence in sequences if sequence.cached_len < LENGTH]
        if not running:
            break
        chunks = [_next_chunk(runner, sequence) for sequence in running]
        logits = runner.run(Batch(tuple(chunks)))
        ends = [chunk for chunk in chunks if chunk.reaches_end]
        for chunk, row in zip(ends, logits, strict=True):
            expected = alone[sequences.index(chunk.sequence)][chunk.end - PROMPT_LEN]
            assert np.array_equal(row, expected), chunk.sequence.request.policy
            chunk.sequence.token_ids.append(ids[min(chunk.end, LENGTH - 1)])
        for chunk in chunks:
            chunk.sequence.cached_len = chunk.end
    assert all(sequence.cached_len == LENGTH for sequence in sequences)


def _next_chunk(runner: Runner, sequence: Sequence) -> cache_pages.Chunk:
    end = min(sequence.cached_len + 90, len(sequence.token_ids))
    return runner.cache.plan(sequence, runner.cache.chunk_end(sequence, end))


def test_pages_of_a_format_that_comes_later() -> None:
    """Arenas are handed over as requests ask for them; those before stay as they are."""
    family = "qwen3_qknorm"
    runner = native_runner(family)
    first = answer_logits(runner, family, CachePolicy(), 512)
    answer_logits(runner, family, CachePolicy(kv_format="q4"), 512)
    assert len(runner.cache.arenas) == 2
    assert np.array_equal(answer_logits(runner, family, CachePolicy(), 512), first)
    exact = answer_logits(runner, family, CachePolicy(kv_format="f32"), 512)
    assert not np.array_equal(exact, first)
