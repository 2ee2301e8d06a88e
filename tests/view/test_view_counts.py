"""The counts of a view: recorded and planned steps, against masks written out entry by entry and the receipt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import policy_cases

from heedful import LLM, CachePolicy, Completion
from heedful.cache.pages import pages_for
from heedful.engine.torch_runner import build_model
from heedful.errors import BadParameter, UnsupportedModel
from heedful.testing import make_tiny_model
from heedful.view.html import view_page
from heedful.view.record import Run, make_view, recorded_run, replanned_run
from heedful.view.sampled import choose_samples
from heedful.view.steps import RecordingRunner, Step, layer_visits, planned_steps, step_parts
from heedful.view.term import view_text
from heedful.weights.load import load

MADE = ("full", "window", "sink", "selected")
SAVED = ("saved_window", "saved_pages", "saved_prefix")
HEADS = 4
POLICIES = {
    "dense": CachePolicy(),
    "window": CachePolicy(window=100, sinks=4),
    "narrow": CachePolicy("q4", window=30, precise=0),
    "budget": CachePolicy(budget=256),
    "sparse": CachePolicy(sparse_prefill=True),
}
LONG = "tell me more of it, " * 120
"""2,400 tokens of the tiny model: longer than what a sparse prefill sees."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), context_len=4096)


def recorded(llm: LLM, prompt: str, **how: Any) -> tuple[Completion, list[Step]]:
    recorder = RecordingRunner(llm.engine.runner)
    llm.engine.runner = recorder
    completion = llm.generate(prompt, **how)
    return completion, recorder.steps


def view_of(model: Path, run: Run, llm: LLM) -> dict[str, Any]:
    loaded = load(str(model))
    network = build_model(loaded.config, loaded.weights)
    return make_view(run, "tiny", llm.config, llm.engine.runner.cache, llm.tokenizer, network)


def sums(steps: list[dict[str, Any]]) -> dict[str, int]:
    return {part: sum(step.get(part, 0) for step in steps) for part in (*MADE, *SAVED)}


@pytest.mark.parametrize("name", POLICIES)
def test_steps_sum_to_the_receipt_and_to_a_mask(model: Path, name: str) -> None:
    policy = POLICIES[name]
    llm = LLM(str(model), policy=policy)
    completion, steps = recorded(llm, LONG, max_tokens=9, ignore_eos=True)
    run = recorded_run(completion, policy, steps)
    parts = [step_parts(step.spans, HEADS) for step in steps]
    visits = completion.receipt.visits
    assert sum(part.made for part in parts) == visits.total
    assert sum(part.dense for part in parts) == visits.dense
    assert sum(part.saved_window for part in parts) == visits.saved.window
    assert sum(part.saved_pages for part in parts) == visits.saved.pages
    assert HEADS * sum(layer_visits(steps, 2)) == visits.total
    if name != "budget":  # the tiny model's two layers are those that read everything under a budget
        mask = policy_cases.mask(0, run.computed_len, None, policy, len(completion.prompt_token_ids))
        assert visits.total == 2 * HEADS * int(mask.sum())
    again = replanned_run(completion, policy, llm.config, llm.engine.runner.cache)
    assert [(step.start, step.end, step_parts(step.spans, HEADS)) for step in again.steps] == [
        (step.start, step.end, part) for step, part in zip(steps, parts, strict=True)
    ]


def test_planned_steps_have_room_for_rows_of_any_format() -> None:
    config = policy_cases.config_of([None], heads=4, kv_heads=2, head_dim=32)
    cache = policy_cases.plain_cache(config.windows, 2, 32, capacity_tokens=4096, default="q4")
    steps = planned_steps(config, cache, CachePolicy(kv_format="f32"), 1500, 0, 1600)
    assert steps[-1].end == 1600


@settings(max_examples=30, deadline=None)
@given(policy=policy_cases.policies, prompt=st.integers(1, 900), output=st.integers(1, 60), data=st.data())
def test_planned_steps_are_what_a_meter_counts(policy: CachePolicy, prompt: int, output: int, data: Any) -> None:
    windows = data.draw(st.lists(policy_cases.own_windows, min_size=1, max_size=4))
    config = policy_cases.config_of(windows, heads=4, kv_heads=2, head_dim=32)
    receipt = policy_cases.counted(config, policy, prompt, output)
    cache = policy_cases.plain_cache(config.windows, 2, 32, capacity_tokens=4096, default="q8")
    steps = planned_steps(config, cache, policy, prompt, 0, prompt + output - 1)
    parts = [step_parts(step.spans, 4) for step in steps]
    assert sum(part.made for part in parts) == receipt.visits.total
    assert sum(part.saved_pages for part in parts) == receipt.visits.saved.pages
    assert sum(part.dense for part in parts) == receipt.visits.dense
    assert 4 * sum(layer_visits(steps, len(windows))) == receipt.visits.total
    seen = sum(int(policy_cases.mask(0, prompt, own, policy, prompt).sum()) for own in windows)
    prefill = [part.made for step, part in zip(steps, parts, strict=True) if step.start < prompt]
    assert sum(prefill) == 4 * seen


def test_a_view_with_a_shared_prefix_and_guesses_adds_up(model: Path) -> None:
    llm = LLM(str(model), speculate=True)
    llm.generate(LONG, max_tokens=1)
    completion, steps = recorded(llm, LONG + "and again and again and again", max_tokens=40, ignore_eos=True)
    view = view_of(model, recorded_run(completion, CachePolicy(), steps), llm)
    visits = completion.receipt.visits
    assert completion.receipt.cached_tokens >= 2368
    assert completion.receipt.guesses.made
    found = sums(view["steps"])
    assert sum(found[part] for part in MADE) == visits.total
    assert found["saved_prefix"] == visits.saved.prefix
    assert sum(found.values()) == visits.dense
    again = replanned_run(completion, CachePolicy(), llm.config, llm.engine.runner.cache)
    assert sum(step_parts(step.spans, HEADS).made for step in again.steps) == visits.total - visits.rejected


def test_the_shortest_run_has_a_view(model: Path) -> None:
    llm = LLM(str(model))
    completion, steps = recorded(llm, "a", max_tokens=1, ignore_eos=True)
    view = view_of(model, recorded_run(completion, CachePolicy(), steps), llm)
    assert view["computed_tokens"] == 1
    assert view["queries"]["at"] == [0]
    assert view["layers"]["entropy"] == [[0.0] * HEADS] * 2
    assert all(points == [] for points in view["coverage"]["curves"].values())
    assert view["coverage"]["recommended"] is None
    assert "1 in (0 cached) · 1 out" in view_text(view)
    assert view_page(view).count("</html>") == 1


def test_pages_say_what_was_read_and_held(model: Path) -> None:
    """Windows: pages behind are given back, sinks stay; a policy in few bits keeps its newest pages precise."""
    policy = CachePolicy("q4", window=200, sinks=4)
    llm = LLM(str(model), policy=policy)
    completion, steps = recorded(llm, LONG, max_tokens=20, ignore_eos=True)
    view = view_of(model, recorded_run(completion, policy, steps), llm)
    rows, count = view["pages"]["at"], view["pages"]["count"]
    read, held = (_table(view["pages"][name], len(rows), count) for name in ("read", "held"))
    last = rows[-1]
    keys = np.arange(last + 1)
    visible = (last - keys < 200) | (keys < 4)
    pages = np.unique(keys[visible] // 64)
    assert set(np.flatnonzero(read[-1])) == set(pages) == set(np.flatnonzero(held[-1]))
    assert view["pages"]["formats"][-1][0][0] == "q8"
    assert view["pages"]["formats"][-1][1][0] == "q4"
    assert view["pages"]["formats"][-1][0][1] == 0
    assert view["pages"]["formats"][-1][-1][2] == pages_for(last + 1)


def _table(text: str, rows: int, columns: int) -> Any:
    import base64

    return np.frombuffer(base64.b64decode(text), dtype=np.uint8).reshape(rows, columns)


def test_chosen_pages_are_those_that_the_kernel_chose(tmp_path: Path) -> None:
    """Under a budget all layers but the first choose; what the last read is what the run's own selection holds."""
    deep = make_deep_model(tmp_path)
    policy = CachePolicy("f32", budget=256)
    llm = LLM(str(deep), policy=policy)
    completion, steps = recorded(llm, LONG[:900], max_tokens=6, ignore_eos=True)
    span = steps[-1].spans[0]
    assert span.selection is not None
    chosen = [of_head for layer in span.selection.chosen[1:] for of_head in layer]
    view = view_of(deep, recorded_run(completion, policy, steps), llm)
    read = _table(view["pages"]["read"], len(view["pages"]["at"]), view["pages"]["count"])[-1]
    expected = np.full(view["pages"]["count"], 1.0)
    for of_head in chosen:
        expected[of_head] += 2 / len(chosen)
    assert np.abs(read - np.round(255 * expected / 3)).max() <= 1
    assert view["layers"]["kept"][2] != [1.0] * HEADS
    assert view["layers"]["kept"][0] == pytest.approx([1.0] * HEADS, abs=1e-3)
    totals = sums(view["steps"])
    assert totals["selected"] > 0
    assert totals["saved_pages"] == completion.receipt.visits.saved.pages
    again = replanned_run(completion, policy, llm.config, llm.engine.runner.cache)
    guessed = view_of(deep, again, llm)
    assert sums(guessed["steps"]) == totals
    likely = _table(guessed["pages"]["read"], len(view["pages"]["at"]), view["pages"]["count"])[-1]
    assert int(likely.sum()) == pytest.approx(int(read.sum()), abs=20), "as many pages, whichever they were"


def make_deep_model(folder: Path) -> Path:
    """The tiny model with its second layer a second time."""
    import json

    from safetensors.numpy import load_file, save_file

    make_tiny_model(folder, context_len=4096)
    weights = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(5)
    for name in [name for name in weights if ".layers.1." in name]:
        noise = rng.normal(0, 0.1, weights[name].shape) if weights[name].ndim == 2 else 0
        weights[name.replace(".layers.1.", ".layers.2.")] = (weights[name] + noise).astype("<f4")
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    return folder


def test_a_stopped_answer_is_refused_in_words(model: Path) -> None:
    """Steps that do not come to the receipt's sum are not shown."""
    from dataclasses import replace

    llm = LLM(str(model))
    completion = llm.generate("hello", max_tokens=5)
    wrong = replace(completion.receipt, visits=replace(completion.receipt.visits, total=17))
    with pytest.raises(UnsupportedModel, match="17 visits do not follow"):
        replanned_run(replace(completion, receipt=wrong), CachePolicy(), llm.config, llm.engine.runner.cache)


def test_too_long_a_run_is_refused_with_both_numbers(model: Path) -> None:
    llm = LLM(str(model))
    completion, steps = recorded(llm, "hello", max_tokens=3)
    run = Run((1,) * 5000, (), CachePolicy(), completion.receipt, tuple(steps))
    with pytest.raises(BadParameter, match=r"5,000 tokens are more than 4,096"):
        view_of(model, run, llm)


@given(prompt=st.integers(1, 9000), output=st.integers(0, 9000), layers=st.integers(1, 100))
def test_samples_are_bounded_ascending_and_within(prompt: int, output: int, layers: int) -> None:
    computed = prompt + output
    pages = pages_for(computed)
    samples = choose_samples(prompt, computed, pages, layers)
    assert list(samples.queries) == sorted(set(samples.queries))
    assert samples.queries[-1] == computed - 1
    assert len(samples.queries) <= 384
    if computed <= 128:
        assert samples.queries == tuple(range(computed))
    assert list(samples.map_rows) == sorted(set(samples.map_rows))
    assert (layers + 1) * pages * len(samples.map_rows) <= max(360_000, (layers + 1) * pages)
    assert all(0 <= row < len(samples.queries) for row in samples.map_rows)
    assert all(prompt - 1 <= at < computed for at in samples.lens)
