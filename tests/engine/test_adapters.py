"""Adapters per request: what peft computes, alone and beside others, in both runners; and what it costs, exactly."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.engine.adapter_cases import (
    ADAPTERS,
    CASES,
    KINDS,
    adapter_of,
    base,
    engine_of,
    greedy,
    logits,
    make,
    recorded,
)

from heedful.cache.disk import DiskTier
from heedful.cost.receipt import Receipt
from heedful.engine.engine import Engine
from heedful.engine.scheduler import Scheduler
from heedful.errors import BadParameter, UnsupportedModel
from heedful.kernels import native
from heedful.request import Request, SamplingParams
from heedful.weights import names
from heedful.weights.adapter import Adapter, load_adapter, merged_weights

TOLERANCE = 5e-4  # of logits that span 10 to 30
BOTH = [(case, kind) for case, family in CASES.items() for kind in (KINDS if family != "qwen3_5" else ["torch"])]
LLAMA = [case for case, family in CASES.items() if family == "llama_gqa"]
needs_native = pytest.mark.skipif(not native.is_built(), reason="no compiler: the native kernels are not built")


@pytest.mark.parametrize(("case", "kind"), BOTH)
def test_logits_are_those_of_peft(case: str, kind: str) -> None:
    """In one piece, and token by token behind a first one; the base's own are far away."""
    runner, wanted = make(kind, CASES[case], {"it": adapter_of(case)}), recorded(case)
    ids = wanted["input_ids"].tolist()
    for lengths in ([40], [33, 1, 1, 5]):
        found = logits(runner, ids, "it", lengths)
        assert np.abs(found - wanted["logits"]).max() < TOLERANCE, lengths
        assert np.abs(found - wanted["merged_logits"]).max() < TOLERANCE, lengths
    assert np.abs(logits(runner, ids, None, [40]) - wanted["logits"]).max() > 1


@pytest.mark.parametrize(("case", "kind"), BOTH)
def test_the_merged_base_computes_the_same(case: str, kind: str) -> None:
    _, weights = base(CASES[case])
    merged = merged_weights(weights, adapter_of(case))
    assert list(merged) == list(weights)
    wanted = recorded(case)
    found = logits(make(kind, CASES[case], {}, merged), wanted["input_ids"].tolist(), None, [40])
    assert np.abs(found - wanted["merged_logits"]).max() < TOLERANCE
    untouched = [name for name in weights if name not in adapter_of(case).updates]
    assert all(merged[name] is weights[name] for name in untouched)


def mixed(case_of: dict[str, str]) -> list[tuple[list[int], str | None]]:
    """Prompts for each adapter and for none, among each other."""
    prompts = [(recorded(case)["input_ids"].tolist(), name) for name, case in case_of.items()]
    ids = prompts[0][0]
    return [(ids, None), prompts[0], (ids[:7], prompts[1][1]), prompts[1], (ids[5:], None), prompts[2], (ids, "b")]


@pytest.mark.parametrize("budget", [512, 24])
@pytest.mark.parametrize("kind", KINDS)
def test_one_batch_mixes_adapters_and_none(kind: str, budget: int) -> None:
    """Greedy tokens are those that peft generates, and those that each request gets alone."""
    case_of = dict(zip("abc", LLAMA, strict=True))
    runner = make(kind, "llama_gqa", {name: adapter_of(case) for name, case in case_of.items()})
    asked = mixed(case_of)
    together = greedy(engine_of(runner, budget), asked, 12)
    for name, case in case_of.items():
        at = asked.index((recorded(case)["input_ids"].tolist(), name))
        assert together[at] == recorded(case)["greedy_ids"].tolist(), case
    adapters = {name: adapter_of(case) for name, case in case_of.items()}
    alone = [greedy(engine_of(make(kind, "llama_gqa", adapters)), [one], 12)[0] for one in asked]
    assert together == alone


@needs_native
def test_a_token_is_the_same_to_the_bit_in_any_chunk_batch_and_thread_count() -> None:
    case_of = dict(zip("abc", LLAMA, strict=True))
    adapters = {name: adapter_of(case) for name, case in case_of.items()}
    ids = recorded(LLAMA[0])["input_ids"].tolist()
    runner = make("native", "llama_gqa", adapters)
    for name in (None, *adapters):
        expected = logits(runner, ids, name, [40])
        for lengths in ([1] * 40, [13, 1, 26]):
            assert np.array_equal(logits(runner, ids, name, lengths), expected), (name, lengths)
        for threads in (1, 3):
            other = make("native", "llama_gqa", adapters, threads=threads)
            assert np.array_equal(logits(other, ids, name, [39, 1]), expected), (name, threads)
    bare = make("native", "llama_gqa", {})
    assert np.array_equal(logits(bare, ids, None, [40]), logits(runner, ids, None, [40]))


def read(engine: Engine, ids: list[int], adapter: str | None, *, salt: str = "") -> tuple[list[int], Receipt]:
    sampling = SamplingParams(max_tokens=6)
    sequence = engine.add(Request(tuple(ids), sampling, cache_salt=salt, adapter=adapter))
    while sequence.finish is None:
        engine.step()
    return sequence.token_ids[len(ids) :], engine.receipt(sequence)


def long_prompt() -> list[int]:
    return [3 + (i * 31) % 90 for i in range(140)]


@pytest.mark.parametrize("kind", KINDS)
def test_no_prefix_is_shared_between_adapters(kind: str) -> None:
    adapters = {name: adapter_of(case) for name, case in zip("abc", LLAMA, strict=True)}
    cold = {name: read(engine_of(make(kind, "llama_gqa", adapters)), long_prompt(), name)[0] for name in (None, *"abc")}
    engine = engine_of(make(kind, "llama_gqa", adapters))
    for name in (None, "a", "b", "c"):
        tokens, receipt = read(engine, long_prompt(), name)
        assert (tokens, receipt.cached_tokens) == (cold[name], 0)
        assert receipt.prefix is not None
        assert receipt.prefix.reason == ("none_before" if name is None else "adapter_differs")
    for name in ("c", None, "a"):
        tokens, receipt = read(engine, long_prompt(), name)
        assert (tokens, receipt.cached_tokens) == (cold[name], 128), name
    assert len(set(map(tuple, cold.values()))) == 4


@pytest.mark.parametrize("kind", KINDS[-1:])
def test_on_disk_a_prefix_belongs_to_what_is_in_an_adapter(tmp_path: Path, kind: str) -> None:
    """Another process that gives the name to other weights finds nothing, and one that gives them another name does."""

    def cached(adapters: dict[str, Adapter], name: str | None) -> int:
        engine = engine_of(make(kind, "llama_gqa", adapters))
        engine.scheduler = Scheduler(engine.runner.cache, disk=DiskTier(tmp_path, "ab" * 32, 1 << 24))
        receipt = read(engine, long_prompt(), name)[1]
        engine.close()
        return receipt.cached_tokens

    first, second = adapter_of(LLAMA[0]), adapter_of(LLAMA[1])
    assert cached({"a": first}, "a") == 0
    assert cached({"a": first}, None) == 0
    assert cached({"a": second}, "a") == 0
    assert cached({"renamed": first, "a": second}, "renamed") == 128
    assert cached({}, None) == 128


def test_a_waiting_prompt_does_not_wait_for_another_adapters_prefix() -> None:
    """Two equal prompts with one adapter: the second waits and shares; with two, they are computed side by side."""
    adapters = {"a": adapter_of(LLAMA[0]), "b": adapter_of(LLAMA[1])}
    for asked, running in ((("a", "a"), 1), (("a", "b"), 2), ((None, "a"), 2)):
        engine = engine_of(make("torch", "llama_gqa", adapters))
        for name in asked:
            engine.add(Request(tuple(long_prompt()), SamplingParams(max_tokens=2), adapter=name))
        engine.step()
        assert engine.last_step_sequences == running, asked


def weights_in(case: str) -> tuple[int, int]:
    """Of the adapter's file: all but those of the head, and those of the head."""
    sizes = {name: array.size for name, array in load_file(ADAPTERS / case / "adapter_model.safetensors").items()}
    head = sum(size for name, size in sizes.items() if "lm_head" in name)
    return sum(sizes.values()) - head, head


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", LLAMA)
def test_the_receipt_counts_what_the_adapter_added(case: str, kind: str) -> None:
    """40 tokens in and 5 out are 44 positions, 5 of them with logits, in 5 steps. In torch weights lie as they are, in
    the native panels rows come in eights, columns in pairs.
    """
    engine = engine_of(make(kind, "llama_gqa", {"it": adapter_of(case)}))
    ids, sampling = recorded(case)["input_ids"].tolist(), SamplingParams(max_tokens=5)
    receipts = []
    for name in (None, "it"):
        sequence = engine.add(Request(tuple(ids), sampling, adapter=name))
        while sequence.finish is None:
            engine.step()
        receipts.append(engine.receipt(sequence))
    plain, receipt = receipts
    linear, head = weights_in(case)
    assert plain.adapter is None
    assert receipt.adapter is not None
    assert (receipt.adapter.name, receipt.adapter.sha256) == ("it", adapter_of(case).sha256)
    assert receipt.adapter.flops == 2 * (44 * linear + 5 * head)
    assert receipt.flops.linear - plain.flops.linear == receipt.adapter.flops
    assert receipt.weights.bytes_read - plain.weights.bytes_read == receipt.adapter.bytes_read
    if kind == "torch":
        assert receipt.adapter.bytes_read == 5 * 4 * (linear + head)
    else:
        assert receipt.adapter.bytes_read == 5 * 4 * sum(
            _eights(update.rank) * update.shape[1] + _eights(update.shape[0]) * (update.rank + update.rank % 2)
            for update in adapter_of(case).updates.values()
        )
    assert receipt.visits == plain.visits
    assert receipt.to_dict()["adapter"]["bytes_read"] == receipt.adapter.bytes_read
    assert "adapter it" in receipt.line()


def _eights(rows: int) -> int:
    return -(-rows // 8) * 8


def test_a_step_reads_an_adapter_once_and_those_that_use_it_share() -> None:
    case_of = dict(zip("abc", LLAMA, strict=True))
    engine = engine_of(make("torch", "llama_gqa", {name: adapter_of(case) for name, case in case_of.items()}))
    ids, sampling = recorded(LLAMA[0])["input_ids"].tolist(), SamplingParams(max_tokens=4)
    asked: tuple[str | None, ...] = ("a", None, "b", "a", "a")
    sequences = [engine.add(Request(tuple(ids[at:]), sampling, adapter=name)) for at, name in enumerate(asked)]
    steps = 0
    while engine.scheduler.has_work:
        engine.step()
        steps += 1
    used = [use for sequence in sequences if (use := engine.receipt(sequence).adapter) is not None]
    assert steps == 4
    for name, case, count in (("a", LLAMA[0], 3), ("b", LLAMA[1], 1)):
        mine = [use.bytes_read for use in used if use.name == name]
        assert len(mine) == count
        assert sum(mine) == steps * 4 * sum(weights_in(case))


def test_an_adapter_that_is_not_loaded_is_refused_by_name() -> None:
    engine = engine_of(make("torch", "llama_gqa", {"a": adapter_of(LLAMA[0])}))
    with pytest.raises(BadParameter, match="adapter: none is called 'c'") as refused:
        engine.add(Request((5, 6), adapter="c"))
    assert "a" in refused.value.remedy
    assert not engine.scheduler.has_work


@needs_native
def test_the_kernels_refuse_updates_and_tokens_that_do_not_fit() -> None:
    runner = make("native", "llama_gqa", {"a": adapter_of(LLAMA[0])})
    decoder = runner._decoder  # type: ignore[attr-defined]
    panels = np.zeros(4 * 8 * 64, dtype=np.uint8)
    for place, problem in (
        ((0, 0, "qkv", 3, 8), "no such part"),
        ((0, 0, "up", 0, 8), "b is not"),
        ((0, 0, "qkv", 0, 9), "a is not"),
        ((-1, 0, "qkv", 0, 8), "an adapter and a rank"),
    ):
        with pytest.raises(ValueError, match=problem):
            decoder.set_update(*place, panels, panels)
    ids = recorded(LLAMA[0])["input_ids"].tolist()
    run = decoder.run

    class Spoilt:
        def __getattr__(self, name: str) -> object:
            return getattr(decoder, name)

        def run(self, *arguments: object) -> None:
            run(*arguments[:-2], self.table, arguments[-1])

    for table in ([(1, 0, 40)], [(0, 0, 41)], [(0, 5, 5)], [(0, 3, 9), (0, 8, 12)], [(-1, 0, 3)]):
        spoilt = Spoilt()
        spoilt.table = np.array(table, dtype=np.int32)  # type: ignore[attr-defined]
        runner._decoder = spoilt  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="adapter"):
            logits(runner, ids, "a", [40])


def test_kernels_of_another_version_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module from a build before calls had numbers."""
    old = ModuleType("heedful._native")
    old.__file__ = "somewhere/_native.so"
    monkeypatch.setitem(sys.modules, "heedful._native", old)
    with pytest.raises(UnsupportedModel, match=r"somewhere/_native\.so are of another heedful") as refused:
        native.module()
    assert "pip install" in refused.value.remedy


GGUF_NAMES = {"attn.q": "attn_q", "attn.k": "attn_k", "attn.v": "attn_v", "attn.out": "attn_output"}
GGUF_NAMES |= {"mlp.gate": "ffn_gate", "mlp.up": "ffn_up", "mlp.down": "ffn_down", "mlp_norm": "ffn_norm"}
GGUF_TOP = {"embed.weight": "token_embd.weight", "norm.weight": "output_norm.weight", "head.weight": "output.weight"}


def gguf_name(name: str) -> str:
    if name in GGUF_TOP:
        return GGUF_TOP[name]
    _, layer, part = name.removesuffix(".weight").split(".", 2)
    return f"blk.{layer}.{GGUF_NAMES.get(part, part)}.weight"


@pytest.mark.parametrize("case", LLAMA)
def test_on_a_gguf_base_whose_rotary_rows_lie_otherwise(case: str) -> None:
    """llama.cpp's converter reorders the rows of q and k; an adapter has them in the order of its training."""
    config, weights = base("llama_gqa")
    stored = {}
    for name, tensor in weights.items():
        if name.endswith(("attn.q.weight", "attn.k.weight")):
            rows = np.arange(tensor.shape[0])  # convert_hf_to_gguf.py, LlamaModel.permute
            heads = tensor.shape[0] // config.head_dim
            tensor = tensor.take_rows(rows.reshape(heads, 2, config.head_dim // 2).swapaxes(1, 2).ravel())
        stored[gguf_name(name)] = tensor
    from_file = names.from_gguf(stored, config)
    adapter = load_adapter(str(ADAPTERS / case), config, from_file)
    found = logits(
        make("torch", "llama_gqa", {"it": adapter}, from_file), recorded(case)["input_ids"].tolist(), "it", [40]
    )
    assert np.abs(found - recorded(case)["logits"]).max() < TOLERANCE
