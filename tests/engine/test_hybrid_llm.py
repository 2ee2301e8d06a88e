"""A hybrid of gated DeltaNet and full attention through the whole engine: the recorded answers, however a prompt is
cut, shared, batched, begun from a prefix or computed again."""

from __future__ import annotations

import json
import logging
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from heedful import LLM, CachePolicy
from heedful.cli.main import run
from heedful.cost.formulas import Shape, generation_cost
from heedful.cost.receipt import Receipt
from heedful.cost.shapes import Dimensions
from heedful.engine.decoder_embedder import DecoderEmbedder
from heedful.engine.engine import Engine
from heedful.engine.scheduler import Scheduler
from heedful.engine.torch_runner import TorchRunner, build_hybrid
from heedful.errors import UnsupportedModel
from heedful.models.carried import Carried
from heedful.models.config import ModelConfig, config_from_hf
from heedful.request import KVFormat, Request, SamplingParams, Sequence
from heedful.weights import names
from heedful.weights.names import Weights
from heedful.weights.safetensors_file import read_safetensors

GOLDEN = Path(__file__).parent.parent / "golden" / "qwen3_5" / "lm"
LENGTHS = (1, 3, 64, 130)


@cache
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "golden.safetensors")


@cache
def files() -> tuple[ModelConfig, Weights]:
    config = config_from_hf(json.loads((GOLDEN / "config.json").read_text()))
    return config, names.from_hf(read_safetensors(GOLDEN), config)


def prompt_of(length: int) -> list[int]:
    return golden()[f"input_ids_{length}"][0].tolist()


def recorded(length: int) -> list[int]:
    return golden()[f"greedy_{length}"][0].tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded model with a tokenizer of its 96 tokens."""
    folder = tmp_path_factory.mktemp("hybrid")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, folder)
    letters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), threads=1)


def engine_of(*, token_budget: int = 512, capacity_tokens: int = 4096) -> Engine:
    config, weights = files()
    runner = TorchRunner(config, weights, capacity_tokens=capacity_tokens, threads=1)
    engine = Engine(runner, model_name="hybrid", context_len=512, eos_ids=())
    engine.scheduler = Scheduler(runner.cache, token_budget)
    return engine


def ask(engine: Engine, prompt: list[int], max_tokens: int = 16, **fields: Any) -> Sequence:
    return engine.add(Request(tuple(prompt), SamplingParams(max_tokens=max_tokens), **fields))


def finish(engine: Engine, sequence: Sequence) -> tuple[list[int], Receipt]:
    while sequence.finish is None:
        engine.step()
    return sequence.token_ids[sequence.prompt_len :], engine.receipt(sequence)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_recorded_answers(llm: LLM, length: int) -> None:
    answer = llm.generate(prompt_of(length), max_tokens=16, ignore_eos=True)
    assert list(answer.token_ids) == recorded(length)


@pytest.mark.parametrize("token_budget", [1, 7, 50, 64])
def test_a_prompt_in_chunks(token_budget: int) -> None:
    engine = engine_of(token_budget=token_budget)
    assert finish(engine, ask(engine, prompt_of(130)))[0] == recorded(130)


def test_several_at_once_of_different_lengths() -> None:
    engine = engine_of(token_budget=40)
    asked = [ask(engine, prompt_of(length)) for length in LENGTHS]
    assert [finish(engine, sequence)[0] for sequence in asked] == [recorded(length) for length in LENGTHS]
    assert engine.runner.cache.taken_bytes == 0


def test_sampling_and_logprobs_are_those_of_the_recorded_logits(llm: LLM) -> None:
    answer = llm.generate(prompt_of(130), max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    logprobs = golden()["logits_130"][0].log_softmax(-1)
    expected = [float(logprobs[i, token]) for i, token in enumerate(prompt_of(130)[1:])]
    assert answer.prompt_logprobs is not None
    found = [sampled.logprob for sampled in answer.prompt_logprobs]
    assert found == pytest.approx(expected, abs=4e-4)


def test_a_prefix_gives_the_same_tokens_and_says_how_much_there_was() -> None:
    engine = engine_of()
    cold, first = finish(engine, ask(engine, prompt_of(130)))
    warm, second = finish(engine, ask(engine, prompt_of(130)))
    assert cold == warm == recorded(130)
    assert (first.cached_tokens, second.cached_tokens) == (0, 128)
    assert second.visits.saved.prefix == 4 * (128 * 129 // 2)  # four heads of the one attention layer
    assert second.visits.dense == first.visits.dense


def test_prompts_that_part_share_what_they_have_in_common() -> None:
    stem = prompt_of(130)[:70]
    continuations = [[*stem, *prompt_of(64)[at : at + 30]] for at in (0, 10, 20)]
    alone = []
    for prompt in continuations:
        engine = engine_of()
        alone.append(finish(engine, ask(engine, prompt))[0])
    shared = engine_of()
    in_turn = [finish(shared, ask(shared, prompt)) for prompt in continuations]
    assert [tokens for tokens, _ in in_turn] == alone
    assert [receipt.cached_tokens for _, receipt in in_turn] == [0, 64, 64]  # 64 is the first one's last whole page too
    together = engine_of(token_budget=32)
    asked = [ask(together, prompt) for prompt in continuations]
    assert [finish(together, sequence)[0] for sequence in asked] == alone


def test_a_second_turn_begins_behind_the_answer_of_the_first_one() -> None:
    engine = engine_of()
    said, _ = finish(engine, ask(engine, prompt_of(64), 80))
    question = [*prompt_of(64), *said, *prompt_of(3)]
    warm, receipt = finish(engine, ask(engine, question))
    assert receipt.cached_tokens == 128
    fresh = engine_of()
    assert finish(fresh, ask(fresh, question))[0] == warm


def test_whoever_has_to_give_memory_back_says_the_same() -> None:
    engine = engine_of(capacity_tokens=8 * 64)
    asked = [ask(engine, [*prompt_of(130)[at:], *prompt_of(3)], 90) for at in (0, 20, 40)]
    answers = [finish(engine, sequence) for sequence in asked]
    assert engine.scheduler.preemptions > 0
    assert sum(receipt.visits.recomputed for _, receipt in answers) > 0
    for sequence, (tokens, _) in zip(asked, answers, strict=True):
        alone = engine_of()
        assert finish(alone, ask(alone, list(sequence.request.prompt_ids), 90))[0] == tokens


def test_a_closed_stream_frees_its_state(llm: LLM) -> None:
    stream = llm.stream(prompt_of(64), max_tokens=100, ignore_eos=True)
    pieces = iter(stream)
    next(pieces)
    assert llm.engine.runner.cache.taken_bytes > 0
    stream.close()
    assert llm.engine.runner.cache.taken_bytes == 0


def test_a_window_narrows_the_attention_layers_alone() -> None:
    class Windowed(Carried):
        def __call__(self, *tensors: Any, **facts: Any) -> Tensor:
            return super().__call__(*tensors, **{**facts, "window": 20})

    decoder = build_hybrid(*files())
    carried, ids, said = Windowed(decoder.config), torch.tensor(prompt_of(130)), list[int]()
    with torch.inference_mode():
        for _ in range(16):
            positions = torch.arange(carried.length, carried.length + len(ids))
            said.append(int(decoder.logits(decoder(ids, positions, carried, carried)[-1:]).argmax()))
            ids = torch.tensor(said[-1:])
    assert said != recorded(130)
    engine = engine_of(token_budget=50)
    tokens, receipt = finish(engine, ask(engine, prompt_of(130), policy=CachePolicy(window=20)))
    assert tokens == said
    assert receipt.visits.total == 4 * sum(min(position + 1, 20) for position in range(145))


@pytest.mark.parametrize(
    ("policy", "kept"), [(CachePolicy(window=64, sinks=4), 384), (CachePolicy(sparse_prefill=True), 256)], ids=str
)
def test_policies_share_prefixes_too(policy: CachePolicy, kept: int) -> None:
    prompt = (prompt_of(130) * 3)[:390]
    engine, chunked = engine_of(), engine_of(token_budget=60)
    cold, _ = finish(engine, ask(engine, prompt, policy=policy))
    warm, receipt = finish(engine, ask(engine, prompt, policy=policy))
    assert receipt.cached_tokens == kept
    assert cold == warm == finish(chunked, ask(chunked, prompt, policy=policy))[0]


def test_visits_and_bytes_are_those_on_paper() -> None:
    engine = engine_of()
    _, receipt = finish(engine, ask(engine, prompt_of(64)))
    config, _ = files()
    policy = engine.runner.cache.policy(CachePolicy(kv_format="f32"))
    cost = generation_cost(Shape.from_config(config), 64, 16, policy=policy)
    assert policy.main == KVFormat("f32", "f32")
    assert (receipt.visits.total, receipt.visits.dense) == (cost.visits, cost.dense_visits)
    assert (receipt.kv.bytes_read, receipt.kv.bytes_written) == (cost.kv_bytes_read, cost.kv_bytes_written)
    passed, said = 64 + 15, 16
    matrices = 2 * (config.linear_weights * passed + config.head_weights * said)
    assert receipt.flops.linear == cost.linear_flops == matrices + passed * 3 * 7 * (4 * 16 * 24)
    assert Dimensions.from_config(config).shape() == Shape.from_config(config)


def test_the_native_runner_says_that_it_cannot(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UnsupportedModel, match="lack the DeltaNet layers"):
        LLM(str(folder), runner="native")
    with caplog.at_level(logging.WARNING, "heedful"):
        LLM(str(folder), speculate=True, threads=1)
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "DeltaNet" in line] == [line for line in lines if "PyTorch" in line]
    assert sum("PyTorch" in line for line in lines) == 1
    assert sum("speculate is off" in line for line in lines) == 1


def test_prefixes_are_kept_on_disk(folder: Path, tmp_path: Path) -> None:
    first = LLM(str(folder), threads=1, prefix_cache=tmp_path)
    first.generate(prompt_of(130), max_tokens=1, ignore_eos=True)
    first.close()
    second = LLM(str(folder), threads=1, prefix_cache=tmp_path)
    answer = second.generate(prompt_of(130), max_tokens=16, ignore_eos=True)
    second.close()
    assert list(answer.token_ids) == recorded(130)
    assert answer.receipt.cached_tokens == 128


def test_its_hidden_states_as_embeddings(folder: Path) -> None:
    decoder, ids = build_hybrid(*files()), torch.tensor(prompt_of(64))
    carried = Carried(decoder.config)
    with torch.inference_mode():
        hidden = decoder(ids, torch.arange(64), carried, carried).mean(0)
    embedder = DecoderEmbedder.load(str(folder), threads=1)
    text = embedder.tokenizer.decode(ids.tolist())
    assert embedder.tokenizer.encode(text) == ids.tolist()
    (vector,) = embedder.embed([text, "ab"]).vectors[:1]
    expected = (hidden / hidden.norm()).numpy()
    np.testing.assert_allclose(vector / np.linalg.norm(vector), expected, atol=1e-5)


def test_show_tells_both_kinds_of_layers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", str(folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["layers"], shown["delta_layers"], shown["windows"]) == (4, 3, {"full": 1})
    assert shown["state_bytes"] == 4 * 3 * (3 * 160 + 4 * 16 * 24)
    assert shown["visits_per_token"] == {"512": 512 * 4}
    assert shown["kv_bytes_per_1000_tokens"]["f32"] == 1000 * 2 * 2 * 32 * 4
    assert run(["show", str(folder)]) == 0
    assert "3 of gated DeltaNet" in capsys.readouterr().out


def test_cost_counts_its_attention_layers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cost", str(folder), "--context", "100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["visits"] == 100 * 4
    assert run(["cost", str(folder), "--layers", "3"]) == 2
    assert "no attention layer" in capsys.readouterr().err
