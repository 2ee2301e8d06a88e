"""The native runner against the plain one for every family, and against golden results on real weights."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from heedful import LLM, CachePolicy
from heedful.engine.engine import Engine
from heedful.engine.runner import Runner
from heedful.engine.scheduler import Scheduler
from heedful.engine.torch_runner import TorchRunner
from heedful.errors import BadParameter, UnsupportedModel
from heedful.kernels import native
from heedful.kernels.attention import DenseAttend
from heedful.models.config import ModelConfig, config_from_gguf, config_from_hf
from heedful.request import Batch, Request, SamplingParams, Sequence
from heedful.testing import make_tiny_model
from heedful.weights import names
from heedful.weights.gguf_file import read_gguf
from heedful.weights.names import Weights
from heedful.weights.safetensors_file import read_safetensors

if native.is_built():
    from heedful.engine.native_runner import NativeRunner

GOLDEN = Path(__file__).parent.parent / "golden"
FAMILIES = sorted(folder.name for folder in (GOLDEN / "tiny_decoders").iterdir())
# of logits that span 10 to 30, with the weights at full precision; random models magnify rounding
KV_TOLERANCE = {"f32": 5e-4, "f16": 0.02, "q8": 0.4, "k=q8,v=f16": 0.4}

needs_native = pytest.mark.skipif(not native.is_built(), reason="no compiler: the native kernels are not built")


def test_where_there_is_a_compiler_the_kernels_are_built() -> None:
    assert native.is_built() or shutil.which("c++") is None


@cache
def tiny(family: str) -> tuple[ModelConfig, Weights]:
    folder = GOLDEN / "tiny_decoders" / family
    config = config_from_hf(json.loads((folder / "config.json").read_text()))
    return config, names.from_hf(read_safetensors(folder), config)


def native_runner(family: str, *, capacity_tokens: int = 1024, **options: Any) -> NativeRunner:
    config, weights = tiny(family)
    return NativeRunner(config, weights, capacity_tokens=capacity_tokens, **{"threads": 2, **options})


def last_logits(runner: Runner, ids: list[int], chunks: list[int]) -> np.ndarray:
    """Logits of the last token when `ids` are computed in pieces of these lengths."""
    sequence = Sequence(Request(tuple(ids)), list(ids))
    for length in chunks:
        chunk = runner.cache.plan(sequence, sequence.cached_len + length)
        logits = runner.run(Batch((chunk,)))
        sequence.cached_len = chunk.end
    runner.cache.release(sequence)
    return logits[0].copy()


def greedy(runner: Runner, prompts: list[list[int]], max_tokens: int, token_budget: int = 512) -> list[list[int]]:
    """All prompts in one batch."""
    engine = Engine(runner, model_name="tiny", context_len=runner.config.context_len, eos_ids=())
    engine.scheduler = Scheduler(runner.cache, token_budget)
    sequences = [engine.add(Request(tuple(prompt), SamplingParams(max_tokens=max_tokens))) for prompt in prompts]
    while engine.scheduler.has_work:
        engine.step()
    return [sequence.token_ids[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]


@needs_native
@pytest.mark.parametrize("kv_format", KV_TOLERANCE)
@pytest.mark.parametrize("variant", ["portable", ""])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_family(family: str, variant: str, kv_format: str) -> None:
    recorded = load_file(GOLDEN / "tiny_decoders" / family / "golden.safetensors")
    runner = native_runner(family, variant=variant, kv_format=kv_format)
    for ids, logits in zip(recorded["input_ids"].tolist(), recorded["logits"], strict=True):
        for length in (1, 17, 96):
            found = last_logits(runner, ids[:length], [length])
            assert np.abs(found - logits[length - 1]).max() < KV_TOLERANCE[kv_format]


@needs_native
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_continuations_equal_the_recorded_ones(family: str) -> None:
    recorded = load_file(GOLDEN / "tiny_decoders" / family / "golden.safetensors")
    found = greedy(native_runner(family, kv_format="f16"), recorded["input_ids"].tolist(), 16, token_budget=40)
    assert found == recorded["greedy_ids"].tolist()


@needs_native
@pytest.mark.parametrize("kv_format", ["f16", "q8"])
@pytest.mark.parametrize("family", ["llama_gqa", "mistral_swa16", "gemma3_text", "gpt2_mha"])
def test_a_token_is_the_same_to_the_bit_in_any_chunk_batch_and_thread_count(family: str, kv_format: str) -> None:
    ids = load_file(GOLDEN / "tiny_decoders" / family / "golden.safetensors")["input_ids"][0].tolist()
    runner = native_runner(family, kv_format=kv_format)
    expected = last_logits(runner, ids, [96])
    for chunks in ([1] * 96, [64, 32], [63, 1, 32], [5, 90, 1], [95, 1]):
        assert np.array_equal(last_logits(runner, ids, chunks), expected), chunks
    for threads in (1, 3):
        other = native_runner(family, kv_format=kv_format, threads=threads)
        assert np.array_equal(last_logits(other, ids, [80, 16]), expected), threads
    assert np.array_equal(logits_in_a_batch(runner, ids), expected)


def logits_in_a_batch(runner: Runner, ids: list[int]) -> np.ndarray:
    """Of the second of three sequences that are computed in one step."""
    others = [ids[:40], ids, ids[10:80]]
    sequences = [Sequence(Request(tuple(other)), list(other)) for other in others]
    chunks = tuple(runner.cache.plan(sequence, len(sequence.token_ids)) for sequence in sequences)
    logits = runner.run(Batch(chunks))
    for sequence in sequences:
        runner.cache.release(sequence)
    return logits[1].copy()


@needs_native
def test_a_long_context_crosses_segments_alike_in_decode_and_prefill(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, context_len=4096)
    config = config_from_hf(json.loads((folder / "config.json").read_text()))
    weights = names.from_hf(read_safetensors(folder), config)
    ids = [(i * 7919) % 250 for i in range(1300)]
    runner = NativeRunner(config, weights, capacity_tokens=4096, threads=2)
    plain = TorchRunner(config, weights, capacity_tokens=4096, threads=2)
    whole = last_logits(runner, ids, [512, 512, 276])
    assert np.array_equal(last_logits(runner, ids, [512, 512, 275, 1]), whole)
    assert np.array_equal(last_logits(runner, ids, [500, 500, 299, 1]), whole)
    assert np.abs(whole - last_logits(plain, ids, [1300])).max() < KV_TOLERANCE["q8"]


@needs_native
def test_pages_in_any_order_and_with_stale_contents() -> None:
    runner = native_runner("mistral_swa16")
    ids = [3, 5, 7, 11] * 24
    expected = last_logits(runner, ids, [96])
    for arena in runner.cache.arenas:
        for buffer in arena.buffers.values():
            buffer.fill(0xFF)  # NaN as a scale, -1 as a code
        arena._free.reverse()
    assert np.array_equal(last_logits(runner, ids, [50, 46]), expected)


@dataclasses.dataclass(frozen=True)
class Real:
    folder: Path
    config: ModelConfig
    weights: Weights


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Real:
    file = read_gguf(smollm2_path)
    config = config_from_gguf(file.metadata, {name: tensor.shape for name, tensor in file.tensors.items()})
    return Real(GOLDEN / "smollm2", config, names.from_gguf(file.tensors, config))


@pytest.fixture(scope="module")
def exact_logprobs(smollm2: Real) -> torch.Tensor:
    """Log-probabilities of the plain float32 model at every position of the first 600 tokens of the passage."""
    ids = torch.tensor(json.loads((smollm2.folder / "passage.json").read_text())["ids"][:600])
    decoder = TorchRunner(smollm2.config, smollm2.weights, capacity_tokens=64, threads=2).decoder
    with torch.inference_mode():
        hidden = decoder(ids, torch.arange(len(ids)), DenseAttend([len(ids)]))
        return decoder.logits(hidden[:-1]).log_softmax(-1)


@needs_native
@pytest.mark.parametrize("kv_format", ["f16", "q8"])
def test_quality_on_the_golden_passage(smollm2: Real, exact_logprobs: torch.Tensor, kv_format: str) -> None:
    """8-bit activations (and KV) against float32: mean NLL within 0.01, mean KLD as small as 8-bit arithmetic gives."""
    passage = json.loads((smollm2.folder / "passage.json").read_text())["ids"][:600]
    recorded = load_file(smollm2.folder / "passage_nll.safetensors")["nll"][:599]
    runner = NativeRunner(smollm2.config, smollm2.weights, capacity_tokens=1024, threads=2, kv_format=kv_format)
    sequence = Sequence(Request(tuple(passage)), [])
    nll, kld = [], []
    for i, token in enumerate(passage[:-1]):
        sequence.token_ids.append(token)
        logits = torch.from_numpy(runner.run(Batch((runner.cache.plan(sequence, i + 1),)))[0])
        sequence.cached_len = i + 1
        found = logits.log_softmax(-1)
        nll.append(-float(found[passage[i + 1]]))
        kld.append(float((exact_logprobs[i].exp() * (exact_logprobs[i] - found)).sum()))
    assert abs(np.mean(nll) - recorded.mean()) < 0.01
    assert np.mean(kld) < 0.005


@needs_native
def test_greedy_tokens_are_the_recorded_ones_while_their_margin_exceeds_a_half(smollm2: Real) -> None:
    runner = NativeRunner(smollm2.config, smollm2.weights, capacity_tokens=2048, threads=2)
    compared = 0
    for case in json.loads((smollm2.folder / "cases.json").read_text())["cases"]:
        sequence = Sequence(Request(tuple(case["ids"])), list(case["ids"]))
        for expected, margin in zip(case["greedy_ids"], case["greedy_margins"], strict=True):
            chosen = 0
            while sequence.cached_len < len(sequence.token_ids):
                end = min(len(sequence.token_ids), sequence.cached_len + 512)
                chosen = runner.run(Batch((runner.cache.plan(sequence, end),)))
                sequence.cached_len = end
            if margin > 0.5:
                assert int(np.argmax(chosen[0])) == expected, case["name"]
                compared += 1
            sequence.token_ids.append(expected)  # along the recorded path, whatever was chosen
        runner.cache.release(sequence)
    assert compared > 200


@needs_native
def test_the_default_path_imports_no_torch(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    program = (
        "import sys\n"
        "from heedful.cli.main import run\n"
        f"assert run(['generate', '-m', {str(folder)!r}, '--max-tokens', '3', 'hello']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@needs_native
def test_llm_takes_native_unless_told_otherwise(tmp_path: Path) -> None:
    folder = str(make_tiny_model(tmp_path))
    assert isinstance(LLM(folder).engine.runner, NativeRunner)
    assert LLM(folder).generate("a", max_tokens=2).receipt.kv.format == "q8"
    assert LLM(folder, policy=CachePolicy(kv_format="f16")).generate("a", max_tokens=2).receipt.kv.format == "f16"
    plain = LLM(folder, runner="torch")
    assert isinstance(plain.engine.runner, TorchRunner)
    assert plain.generate("a", max_tokens=2).receipt.kv.format == "f32"
    with pytest.raises(BadParameter, match="q3"):
        LLM(folder, policy=CachePolicy(kv_format="q3"))
    with pytest.raises(BadParameter, match="runner"):
        LLM(folder, runner="cuda")


def test_without_native_kernels_torch_runs_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "is_built", lambda: False)
    folder = str(make_tiny_model(tmp_path))
    assert isinstance(LLM(folder).engine.runner, TorchRunner)
    assert len(caplog.records) == 1
    assert "running on PyTorch" in caplog.records[0].message
    with pytest.raises(UnsupportedModel, match="not built"):
        LLM(folder, runner="native")


@needs_native
def test_weights_that_do_not_fit_the_config_are_refused() -> None:
    config, weights = tiny("llama_gqa")
    for wrong, message in (
        ({k: v for k, v in weights.items() if k != "layers.1.mlp.up.weight"}, r"layers\.1\.mlp\.up"),
        ({**weights, "norm.weight": weights["layers.0.attn.q.weight"]}, "shape"),
        ({**weights, "layers.7.attn.q.weight": weights["norm.weight"]}, r"layers\.7"),
    ):
        with pytest.raises(UnsupportedModel, match=message):
            NativeRunner(config, wrong, capacity_tokens=64, threads=1)
