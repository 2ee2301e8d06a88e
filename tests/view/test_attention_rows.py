"""What a view says of attention, against a naive recomputation: one full matrix a layer and head, sums by hand."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heedful import LLM, CachePolicy
from heedful.engine.torch_runner import build_decoder
from heedful.kernels import reference
from heedful.models.decoder import Decoder
from heedful.testing import make_tiny_model
from heedful.view.analysis import BUDGETS, WINDOWS, mass_of_chosen, page_bounds
from heedful.view.record import make_view, recorded_run
from heedful.view.steps import RecordingRunner
from heedful.weights.load import load

LAYERS, HEADS, KV_HEADS = 2, 4, 2
PROMPT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 4


@dataclass
class Full:
    """An attend that keeps every row of the whole text, softmax and all."""

    rows: dict[int, torch.Tensor]

    def __call__(self, layer: int, q: Any, k: Any, v: Any, *, window: Any, scale: float, softcap: Any) -> torch.Tensor:
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        scores = scale * torch.einsum("ihd,jhd->hij", q, k)
        i, j = torch.arange(len(q))[:, None], torch.arange(len(q))[None, :]
        far = i - j >= (window or 1 << 30)
        self.rows[layer] = scores.masked_fill((j > i) | far, float("-inf")).softmax(-1)
        return torch.einsum("hij,jhd->ihd", self.rows[layer], v)


@dataclass(frozen=True)
class Case:
    view: dict[str, Any]
    rows: np.ndarray
    """(L, H, N, N)"""
    logits: np.ndarray
    hidden: list[np.ndarray]
    """After each block."""
    ids: list[int]
    prompt: int


@pytest.fixture(scope="module", params=[None, 50], ids=["full", "own window"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), sliding_window=request.param)
    policy = CachePolicy("f32", window=200, sinks=4) if request.param is None else CachePolicy("f32")
    llm = LLM(str(folder), policy=policy)
    recorder = RecordingRunner(llm.engine.runner)
    llm.engine.runner = recorder
    completion = llm.generate(PROMPT, max_tokens=40, ignore_eos=True)
    loaded = load(str(folder))
    network = build_decoder(loaded.config, loaded.weights)
    run = recorded_run(completion, policy, recorder.steps)
    view = make_view(run, "tiny", llm.config, recorder.cache, llm.tokenizer, network)
    full = Full({})
    hidden = naive_pass(network, run.token_ids, full)
    rows = np.stack([full.rows[layer].double().numpy() for layer in range(LAYERS)])
    logits = network.logits(network.norm(hidden[-1]))
    return Case(view, rows, logits.double().numpy(), [h.numpy() for h in hidden], run.token_ids, len(run.prompt_ids))


@torch.inference_mode()
def naive_pass(network: Decoder, ids: list[int], attend: Any) -> list[torch.Tensor]:
    """Hidden states after each block, all tokens at once."""
    from heedful.models.layers import rotary_table

    x = network.embed(torch.tensor(ids))
    rotary = rotary_table(network.config.rope, torch.arange(len(ids)))
    found = []
    for block in network.layers:
        x = block(x, rotary, attend)
        found.append(x)
    return found


def queries(case: Case) -> list[int]:
    return case.view["queries"]["at"]


def test_every_computed_position_is_looked_at_in_a_short_run(case: Case) -> None:
    prompt = [at for at in queries(case) if at < case.prompt]
    assert len(prompt) == 128
    assert queries(case)[len(prompt) :] == list(range(case.prompt, len(case.ids) - 1))


def test_entropy_distance_and_sinks_by_hand(case: Case) -> None:
    at, layers = queries(case), case.view["layers"]
    rows = case.rows[:, :, at]
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.nan_to_num(rows * np.log2(rows)).sum(-1).mean(-1)
    distance = np.array(at)[:, None] - np.arange(len(case.ids))[None, :]
    assert np.array(layers["entropy"]) == pytest.approx(entropy, abs=2e-3)
    assert np.array(layers["distance"]) == pytest.approx((rows * distance).sum(-1).mean(-1), abs=0.06)
    assert np.array(layers["sink_mass"]) == pytest.approx(rows[..., :4].sum(-1).mean(-1), abs=2e-4)


def test_light_and_kept_count_what_the_run_read(case: Case) -> None:
    at, layers = queries(case), case.view["layers"]
    q, k = np.array(at)[:, None], np.arange(len(case.ids))[None, :]
    read = (k <= q) & ((q - k < 200) | (k < 4))
    if case.view["shape"]["windows"][0] is not None:
        read = (k <= q) & (q - k < 50)
    rows = case.rows[:, :, at]
    light = ((rows < 1e-3) & read).sum((-1, -2)) / read.sum()
    assert np.array(layers["light"]) == pytest.approx(light, abs=2e-4)
    assert np.array(layers["kept"]) == pytest.approx((rows * read).sum(-1).mean(-1), abs=2e-4)


def test_surprisal_and_predictions(case: Case) -> None:
    logprobs = case.logits - np.log(np.exp(case.logits).sum(-1, keepdims=True))
    bits = [-logprobs[at - 1, case.ids[at]] / np.log(2) for at in range(1, len(case.ids))]
    tokens = case.view["tokens"]
    assert tokens["surprisal"][0] is None
    assert tokens["surprisal"][1:] == pytest.approx(bits, abs=0.011)
    first = np.exp(logprobs[queries(case)]).max(-1)
    assert [found[0][1] for found in case.view["queries"]["predicted"]] == pytest.approx(first, abs=2e-4)


def test_sources_are_the_most_looked_at_tokens_behind_the_sinks(case: Case) -> None:
    mean = case.rows.mean((0, 1))
    for at, pairs, sinks in zip(
        queries(case), case.view["queries"]["sources"], case.view["queries"]["sinks"], strict=True
    ):
        assert sinks == pytest.approx(mean[at, :4].sum(), abs=2e-4)
        shares = np.sort(mean[at, 4 : at + 1])[::-1][:6]
        assert [share for _, share in pairs] == pytest.approx(shares, abs=2e-4)
        assert all(mean[at, place] == pytest.approx(share, abs=2e-4) for place, share in pairs)


def test_page_mass(case: Case) -> None:
    pages = case.view["pages"]
    table = np.frombuffer(base64.b64decode(pages["mass"]), dtype=np.uint8)
    mass = (table.reshape(LAYERS + 1, len(pages["at"]), pages["count"]) / 255) ** 2
    by_head = np.pad(case.rows, [(0, 0)] * 3 + [(0, -len(case.ids) % 64)]).reshape(*case.rows.shape[:3], -1, 64)
    expected = by_head.sum(-1).mean(1)[:, pages["at"], : pages["count"]]
    assert mass[:-1] == pytest.approx(expected, abs=0.005)
    assert mass[-1] == pytest.approx(expected.mean(0), abs=0.005)


def test_coverage_of_windows(case: Case) -> None:
    answer = list(range(case.prompt, len(case.ids) - 1))
    q, k = np.array(answer)[:, None], np.arange(len(case.ids))[None, :]
    coverage = case.view["coverage"]
    assert coverage["queries"] == len(answer)
    for name, sinks in (("window", 0), ("sinks", 4)):
        points = coverage["curves"][name]
        assert [point["tokens"] - sinks for point in points] == [
            width for width in WINDOWS if width < len(case.ids) - 1
        ]
        for point in points:
            seen = (q - k < point["tokens"] - sinks) | (k < sinks)
            of_layers = (case.rows[:, :, answer] * seen).sum(-1).mean((1, 2))
            assert point["mass"] == pytest.approx(of_layers.mean(), abs=2e-4)
            assert point["layers_enough"] == int((of_layers >= 0.95).sum())


def test_the_lens_reads_every_block(case: Case, tmp_path: Path) -> None:
    lens = case.view["lens"]
    assert lens["at"][0] == case.prompt - 1
    assert lens["at"][-1] == len(case.ids) - 2
    final = np.exp(case.logits - case.logits.max(-1, keepdims=True))
    final /= final.sum(-1, keepdims=True)
    assert [share for _, share in lens["rows"][-1]] == pytest.approx(final[lens["at"]].max(-1), abs=2e-4)
    assert len(lens["rows"]) == LAYERS
    assert lens["rows"][0] != lens["rows"][1]


@pytest.mark.parametrize("least_listed", [1, 64])
def test_chosen_pages_one_query_at_a_time(least_listed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the reference op, which chooses for one query among its candidates."""
    monkeypatch.setattr("heedful.cache.policy.LISTED_PAGES", least_listed)
    generator = torch.Generator().manual_seed(3)
    length, head_dim, filled = 64 * 29 + 20, 32, 29
    keys = torch.randn(length, KV_HEADS, head_dim, generator=generator)
    q = torch.randn(3, HEADS, head_dim, generator=generator)
    at = torch.tensor([64 * filled + 5, 64 * 9 + 63, 64 * 4])
    mass = torch.rand(3, HEADS, filled + 1, generator=generator)
    for budget in BUDGETS[:2]:
        pages = budget // 64
        found = mass_of_chosen(page_bounds(q, keys), KV_HEADS, mass, at, pages)
        for row in range(3):
            own, local = int(at[row]) // 64, min(1, pages - 3)
            read = torch.zeros(KV_HEADS, filled + 1, dtype=torch.bool)
            if own + 1 <= pages:
                read[:] = True
            else:
                candidates = torch.arange(1, own - local)
                rotated = reference.hadamard(keys, 32)
                full = torch.stack([rotated[64 * page : 64 * page + 64] for page in candidates])
                bounds = reference.decode_bounds(reference.encode_bounds(full))
                scores = reference.page_bounds(reference.hadamard(q[row], 32), *bounds)
                promises = reference.page_promises(scores, KV_HEADS)
                listed = reference.choose_pages(promises, max(least_listed, 2 * pages))  # at most all
                for head in range(KV_HEADS):
                    of_head = mass[row, 2 * head : 2 * head + 2, candidates[listed[head]]]
                    best = candidates[listed[head]][(of_head / of_head.sum(-1, keepdim=True)).sum(0).argsort()]
                    chosen = best[len(best) - (pages - local - 2) :].tolist()
                    read[head, [0, *range(own - local, filled + 1), *chosen]] = True
            assert found[row] == pytest.approx((mass[row] * read.repeat_interleave(2, dim=0)).sum(-1), abs=1e-5)
