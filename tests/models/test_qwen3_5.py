"""Qwen3.5's hybrid against logits, states and single layers recorded from transformers and a float64 reference."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from heedful.engine.torch_runner import build_hybrid
from heedful.kernels.attention import DenseAttend
from heedful.kernels.delta_rule import StatefulRecur
from heedful.models.carried import Carried, zero_state
from heedful.models.config import config_from_hf
from heedful.models.qwen3_5 import Qwen35
from heedful.weights import names
from heedful.weights.safetensors_file import read_safetensors

GOLDEN = Path(__file__).parent.parent / "golden" / "qwen3_5" / "lm"
LOGITS, STATE, TRACE = 2e-4, 1e-4, 1e-4


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterable[None]:
    with torch.inference_mode():
        yield


@cache
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "golden.safetensors")


def tiny(config_name: str = "config.json") -> Qwen35:
    config = config_from_hf(json.loads((GOLDEN / config_name).read_text()))
    return build_hybrid(config, names.from_hf(read_safetensors(GOLDEN), config))


def go_on(decoder: Qwen35, carried: Carried, ids: Tensor) -> Tensor:
    """Logits (T, V) of the next tokens."""
    positions = torch.arange(carried.length, carried.length + len(ids))
    return decoder.logits(decoder(ids.long(), positions, carried, carried))


@pytest.mark.parametrize("config_name", ["config.json", "config.alt.json"])
@pytest.mark.parametrize("length", [1, 3, 64, 130])
def test_logits_and_states_equal_the_recorded_ones(length: int, config_name: str) -> None:
    decoder = tiny(config_name)
    carried = Carried(decoder.config)
    logits = go_on(decoder, carried, golden()[f"input_ids_{length}"][0])
    assert (logits - golden()[f"logits_{length}"][0]).abs().max() < LOGITS
    check_state(carried, length)


def check_state(carried: Carried, length: int) -> None:
    for layer in range(3):
        recorded = f"state_{length}.layers.{layer}"
        rows = golden()[f"{recorded}.conv"][0, :, 1:].T  # its first column is never needed again
        assert (carried.state.rows[layer] - rows).abs().max() < STATE
        assert (carried.state.memory[layer] - golden()[f"{recorded}.recurrent"][0]).abs().max() < STATE
    if length == 64:
        for mine, name in ((carried.keys[0], "key"), (carried.values[0], "value")):
            assert (mine.transpose(0, 1) - golden()[f"state_64.layers.3.{name}"][0]).abs().max() < STATE


@pytest.mark.parametrize(
    "lengths",
    [[1] * 130, [64, *[1] * 66], [64, 64, 2], [50, 50, 30], [1, 129], [129, 1], [2, 1, 61, 1, 65], [3, *[1] * 127]],
    ids=lambda lengths: "-".join(map(str, lengths[:5])),
)
def test_any_way_of_cutting_the_prompt_gives_its_logits(lengths: list[int]) -> None:
    decoder = tiny()
    carried = Carried(decoder.config)
    parts = golden()["input_ids_130"][0].split(lengths)
    logits = torch.cat([go_on(decoder, carried, part) for part in parts])
    assert (logits - golden()["logits_130"][0]).abs().max() < LOGITS
    check_state(carried, 130)
    if lengths[:2] == [64, 1]:
        assert (logits - golden()["logits_130_prefill64_then_decode"][0]).abs().max() < LOGITS


def test_in_double_precision_cuts_agree_almost_to_the_bit() -> None:
    decoder = tiny().double()
    ids = golden()["input_ids_130"][0]

    def logits(lengths: list[int]) -> Tensor:
        carried = Carried(decoder.config)
        state = carried.state
        state.rows, state.memory = ([x.double() for x in side] for side in (state.rows, state.memory))
        return torch.cat([go_on(decoder, carried, part) for part in ids.split(lengths)])

    whole = logits([130])
    assert (whole - golden()["logits_130"][0]).abs().max() < 5e-5
    assert (whole - logits([1] * 130)).abs().max() < 1e-11
    assert (whole - logits([7, 64, 59])).abs().max() < 1e-11


@pytest.mark.parametrize("length", [1, 3, 64, 130])
def test_greedy_continuations_equal_the_recorded_ones(length: int) -> None:
    decoder = tiny()
    carried = Carried(decoder.config)
    logits, said = go_on(decoder, carried, golden()[f"input_ids_{length}"][0]), []
    for _ in range(16):
        said.append(int(logits[-1].argmax()))
        logits = go_on(decoder, carried, torch.tensor(said[-1:]))
    assert said == golden()[f"greedy_{length}"][0].tolist()


def test_branches_do_not_disturb_each_other_or_their_stem() -> None:
    """Two continuations of one prefix, run in turns, each as if it were alone."""
    decoder = tiny()
    stem = Carried(decoder.config)
    ids = golden()["input_ids_130"][0]
    go_on(decoder, stem, ids[:64])
    first, second = stem.copy(), stem.copy()
    other = torch.cat((go_on(decoder, second, ids[3:5]), go_on(decoder, second, ids[5:9])))
    got = torch.cat((go_on(decoder, first, ids[64:65]), go_on(decoder, first, ids[65:])))
    assert (got - golden()["logits_130"][0, 64:]).abs().max() < LOGITS
    alone = Carried(decoder.config)
    go_on(decoder, alone, ids[:64])
    assert (go_on(decoder, alone, ids[3:9]) - other).abs().max() < LOGITS
    assert stem.length == 64
    assert (go_on(decoder, stem, ids[64:]) - golden()["logits_130"][0, 64:]).abs().max() < LOGITS


class Watched(Carried):
    """Notes what goes through it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seen: dict[str, Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **facts: Any) -> Tensor:
        out = super().__call__(layer, q, k, v, **facts)
        self.seen |= {"q": q, "k": k, "attn": out.flatten(1)}
        return out

    def convolve(self, layer: int, rows: Tensor, weight: Tensor) -> Tensor:
        out = super().convolve(layer, rows, weight)
        if layer == 0:
            self.seen["conv_out"] = torch.nn.functional.silu(out)
        return out

    def delta(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        out = super().delta(layer, q, k, v, g, beta)
        if layer == 0:
            self.seen |= {"g": g, "beta": beta, "core": out}
        return out


def test_every_stage_of_both_layer_kinds_equals_the_recorded_one() -> None:
    decoder = tiny()
    carried, seen = Watched(decoder.config), {}

    def note(name: str, *, given: bool = False) -> Any:
        return lambda _, inputs, output: seen.__setitem__(name, inputs[0] if given else output)

    linear, full = decoder.layers[0].delta, decoder.layers[3].attn
    linear.register_forward_hook(note("0.mixer_out"))
    linear.out.register_forward_hook(note("0.gated", given=True))
    full.register_forward_hook(note("3.mixer_out"))
    full.out.register_forward_hook(note("3.gated", given=True))
    for layer, block in enumerate(decoder.layers):
        block.register_forward_hook(note(f"{layer}.layer_out"))
    go_on(decoder, carried, golden()["input_ids_64"][0, :12])
    seen |= {f"{3 if name in ('q', 'k', 'attn') else 0}.{name}": x for name, x in carried.seen.items()}
    seen["3.gate"] = seen.pop("3.gated") / seen["3.attn"]
    recorded = {name.removeprefix("trace_12.layers."): x for name, x in golden().items() if name.startswith("trace_12")}
    assert set(seen) == set(recorded)
    for name, x in recorded.items():
        assert (seen[name] - x).abs().max() < (2e-3 if name == "3.gate" else TRACE), name  # a quotient of small numbers


def test_several_sequences_in_one_call() -> None:
    """As the runner calls it: tokens one after another, a state each."""
    decoder = tiny()
    lengths = [64, 3, 130, 1]
    states = [zero_state(decoder.config) for _ in lengths]
    ids = torch.cat([golden()[f"input_ids_{n}"][0] for n in lengths])
    positions = torch.cat([torch.arange(n) for n in lengths])
    hidden = decoder(ids.long(), positions, DenseAttend(lengths), StatefulRecur(lengths, states))
    for n, logits in zip(lengths, decoder.logits(hidden).split(lengths), strict=True):
        assert (logits - golden()[f"logits_{n}"][0]).abs().max() < LOGITS
