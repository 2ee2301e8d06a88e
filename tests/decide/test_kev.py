"""Kev on an attention-only base and on a hybrid one: hidden states, logits and answers as recorded; the kept state."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kev_cases import (
    ATTENTION,
    CASES,
    FOLDERS,
    GOLDEN,
    HYBRID,
    IDS,
    SEVERAL,
    kev_of,
    network_of,
    recorded_input,
    request_of,
    requests_of,
)
from safetensors.torch import load_file

from heedful.decide.answer import Answer, NoulAnswer
from heedful.decide.calibrate import Calibration
from heedful.decide.kev import Kev
from heedful.decide.kev_cache import StateCache
from heedful.decide.kev_input import KevOverflow
from heedful.decide.question import Choice, Noul, questions_from_json
from heedful.engine import torch_branches
from heedful.engine.torch_branches import read_state, run_branches
from heedful.engine.torch_kev import KevNetwork, make_kev
from heedful.engine.torch_runner import build_decoder
from heedful.errors import BadLogits
from heedful.kernels.attention import DenseAttend
from heedful.models.carried import Carried
from heedful.models.decoder import Decoder
from heedful.testing import make_tiny_model
from heedful.weights.kev_files import load_kev
from heedful.weights.load import load
from heedful.weights.lora import LoraAdapter

PROBABILITIES = {ATTENTION: 2e-4, HYBRID: 5e-5}
HIDDEN, LOGITS = 3e-4, 5e-4
WHOLE = [pytest.param(*case, id=name) for case, name in zip(CASES, IDS, strict=True) if "long_state" not in name]
"""Those whose state was not cut when they were recorded."""


def whole_row(decoder: Any, row: list[int]) -> torch.Tensor:
    """Hidden states (T, C) by the plain definition: one causal text, nothing shared."""
    ids, positions = torch.tensor(row), torch.arange(len(row))
    if isinstance(decoder, Decoder):
        return decoder(ids, positions, DenseAttend([len(row)]))
    carried = Carried(decoder.config)
    return decoder(ids, positions, carried, carried)


@pytest.mark.parametrize(("folder", "request_"), CASES, ids=IDS)
def test_hidden_states_are_the_recorded_ones_and_those_of_the_whole_row(folder: str, request_: dict[str, Any]) -> None:
    expected = load_file(GOLDEN / folder / "hidden.safetensors")
    decoder, read = network_of(kev_of(folder)).decoder, recorded_input(kev_of(folder)._reader, request_)
    state = read_state(decoder, read.state_ids)
    found = run_branches(decoder, state, [branch.ids for branch in read.branches])
    for branch, hidden, name in zip(read.branches, found, request_["questions_expected"], strict=True):
        of_question = f"{request_['name']}.{name}"
        assert (hidden[-1] - expected[f"{of_question}.decide"]).abs().max() < HIDDEN
        assert (hidden[list(branch.markers)] - expected[f"{of_question}.options"]).abs().max() < HIDDEN
        row = whole_row(decoder, [*read.state_ids, *branch.ids])
        assert (hidden - row[len(read.state_ids) :]).abs().max() < HIDDEN


@pytest.mark.parametrize(("folder", "request_"), CASES, ids=IDS)
def test_logits_are_the_recorded_ones(folder: str, request_: dict[str, Any]) -> None:
    network, read = network_of(kev_of(folder)), recorded_input(kev_of(folder)._reader, request_)
    branches = [branch.ids for branch in read.branches]
    found = network.logits(network.read(read.state_ids), branches, [branch.markers for branch in read.branches])
    other = {ATTENTION: "logits_row_form", HYBRID: "logits_prefix_reused"}[folder]
    for logits, expected in zip(found, request_["questions_expected"].values(), strict=True):
        assert logits == pytest.approx(expected["logits"], abs=LOGITS)
        assert logits == pytest.approx(expected[other], abs=LOGITS)


def shares_of(answer: Answer) -> list[float]:
    if isinstance(answer, NoulAnswer):
        return [1 - answer.noul, answer.noul]
    probabilities = answer.probabilities
    return list(probabilities.values() if isinstance(probabilities, dict) else probabilities)


@pytest.mark.parametrize(("folder", "request_"), WHOLE)
def test_answers_are_the_recorded_ones(folder: str, request_: dict[str, Any]) -> None:
    questions = questions_from_json(request_["questions"])
    answers = kev_of(folder).decide(request_["state"], questions)
    logits = kev_of(folder).logits(request_["state"], questions)
    for of_question, (name, expected) in zip(logits, request_["questions_expected"].items(), strict=True):
        assert of_question == pytest.approx(expected["logits"], abs=LOGITS)
        shares = shares_of(answers[name])
        assert shares == pytest.approx(expected["probabilities"], abs=PROBABILITIES[folder])
        key = expected["answer"]["type"]  # under which the answer itself stands too
        recorded = expected["answer"][key]
        assert answers[name].to_dict()[key] == (recorded if key == "choice" else pytest.approx(recorded, abs=2e-3))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_calibration_replaces_the_checkpoints_temperature(folder: str) -> None:
    request = request_of(folder, SEVERAL[folder])
    kev = kev_of(folder)
    plain = Kev("kev", kev._tokenizer, network_of(kev), calibration=Calibration({}), digits=3)
    answers = plain.decide(request["state"], questions_from_json(request["questions"]))
    for name, expected in request["questions_expected"].items():
        assert shares_of(answers[name]) == pytest.approx(expected["probabilities_T1"], abs=6e-4)
        assert all(round(share, 3) == pytest.approx(share) for share in shares_of(answers[name]))


@pytest.mark.parametrize("folder", FOLDERS)
def test_without_the_adapter_the_logits_are_others(folder: str) -> None:
    request = request_of(folder, SEVERAL[folder])
    loaded = replace(load_kev(str(GOLDEN / folder / "adapter")), lora=LoraAdapter({}))
    bare = Kev("bare", loaded.tokenizer, make_kev(loaded, threads=1))
    found = bare.logits(request["state"], questions_from_json(request["questions"]))
    recorded = [expected["logits"] for expected in request["questions_expected"].values()]
    moved = [
        abs(a - b) for ours, theirs in zip(found, recorded, strict=True) for a, b in zip(ours, theirs, strict=True)
    ]
    assert max(moved) > 0.5


@pytest.mark.parametrize("folder", FOLDERS)
def test_company_and_order_change_nothing(folder: str) -> None:
    request = request_of(folder, SEVERAL[folder])
    questions = questions_from_json(request["questions"])
    together = kev_of(folder).logits(request["state"], questions)
    turned = kev_of(folder).logits(request["state"], questions[::-1])[::-1]
    for question, a, b in zip(questions, together, turned, strict=True):
        (alone,) = kev_of(folder).logits(request["state"], [question])
        assert a == pytest.approx(alone, abs=5e-5)
        assert b == pytest.approx(alone, abs=5e-5)


@pytest.mark.parametrize("folder", FOLDERS)
def test_threads_may_share_one(folder: str) -> None:
    requests = [request for request in requests_of(folder) if request["name"] != "long_state"]

    def found(request: dict[str, Any]) -> list[tuple[float, ...]]:
        return kev_of(folder).logits(request["state"], questions_from_json(request["questions"]))

    with ThreadPoolExecutor(4) as pool:
        for request, logits in zip(requests, pool.map(found, requests), strict=True):
            recorded = [expected["logits"] for expected in request["questions_expected"].values()]
            assert [list(of_one) for of_one in logits] == [pytest.approx(of_one, abs=LOGITS) for of_one in recorded]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_state_read_in_steps_is_the_same(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_of(folder, SEVERAL[folder])
    read, network = recorded_input(kev_of(folder)._reader, request), network_of(kev_of(folder))
    branches, markers = [b.ids for b in read.branches], [b.markers for b in read.branches]
    monkeypatch.setattr(torch_branches, "STEP_TOKENS", 7)
    state = network.read(read.state_ids)
    assert state.steps == [7] * (len(read.state_ids) // 7) + [len(read.state_ids) % 7]
    found = network.logits(state, branches, markers)
    for logits, expected in zip(found, request["questions_expected"].values(), strict=True):
        assert logits == pytest.approx(expected["logits"], abs=LOGITS)


def test_windows_hide_in_branches_what_they_hide_in_a_whole_text(tmp_path: Path) -> None:
    loaded = load(str(make_tiny_model(tmp_path, sliding_window=16)))
    decoder = build_decoder(loaded.config, loaded.weights)
    rng = np.random.default_rng(1)
    state, *branches = (rng.integers(0, 256, size=n).tolist() for n in (40, 9, 30, 1))
    found = run_branches(decoder, read_state(decoder, state), branches)
    for branch, hidden in zip(branches, found, strict=True):
        row = whole_row(decoder, state + branch)[40:]
        assert (hidden - row).abs().max() < 1e-5


# ---- the kept state ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_kept_state_is_found_again_and_is_as_good(folder: str) -> None:
    request = request_of(folder, SEVERAL[folder])
    questions = questions_from_json(request["questions"])
    shortest = min(questions, key=lambda question: len(json.dumps(question.to_dict())))
    kev = Kev("kev", kev_of(folder)._tokenizer, network_of(kev_of(folder)), cache=StateCache(1 << 24))
    first = kev.decide(request["state"], [shortest]).receipt.to_dict()
    second = kev.decide(request["state"], questions)  # longer branches: room is made behind the kept state
    assert (first["cached_tokens"], first["visits"]["saved"]["prefix"]) == (0, 0)
    state_len = len(recorded_input(kev._reader, request).state_ids)
    assert second.receipt.to_dict()["cached_tokens"] == state_len * len(questions)
    for _ in range(2):
        for logits, expected in zip(
            kev.logits(request["state"], questions), request["questions_expected"].values(), strict=True
        ):
            assert logits == pytest.approx(expected["logits"], abs=LOGITS)
    other = kev.decide("Another state", [shortest])
    assert other.receipt.to_dict()["cached_tokens"] == 0
    assert kev.decide(request["state"], [shortest]).receipt.to_dict()["cached_tokens"] == 0  # one state alone is kept


def test_a_state_over_the_bound_is_not_kept_and_a_stranger_finds_none() -> None:
    kev = kev_of(ATTENTION)
    network = network_of(kev)
    state = network.read([1, 2, 3])
    assert state.num_bytes == 3 * 2 * 2 * 2 * 16 * 4  # tokens, sides, layers, KV heads, channels, float32
    cache = StateCache(state.num_bytes)
    cache.keep(network, [1, 2, 3], state)
    assert cache.find(network, (1, 2, 3)) is state
    assert cache.find(object(), (1, 2, 3)) is None
    assert cache.find(network, (1, 2)) is None
    state.make_room(1)
    cache.keep(network, [1, 2, 3], state)
    assert cache.find(network, (1, 2, 3)) is None


def test_a_hybrid_states_bytes_are_counted() -> None:
    """One layer of keys and values; three that carry 3 rows of 96 channels and 2 matrices of 16 × 16."""
    state = network_of(kev_of(HYBRID)).read([1, 2, 3])
    assert state.num_bytes == 4 * (3 * 2 * 2 * 32 + 3 * (3 * 96 + 2 * 16 * 16))


# ---- refused ----------------------------------------------------------------------------------------------------


def test_a_row_beyond_the_bases_context_is_refused() -> None:
    """1,024 tokens; 1 + 1,010 of the state and at least 11 of the branch."""
    with pytest.raises(KevOverflow, match=r"question 'q' have 1,0\d\d tokens and may have 1,024"):
        kev_of(ATTENTION).decide("0" * 1010, [Noul("q", "Is it so that it is too long?")])


def test_numbers_that_are_none_are_an_error() -> None:
    kev = kev_of(ATTENTION)
    head = network_of(kev).head
    broken = Kev("kev", kev._tokenizer, KevNetwork(network_of(kev).decoder, type(head)(64, 64).requires_grad_(False)))
    network_of(broken).head.q.weight.fill_(float("nan"))
    with pytest.raises(BadLogits):
        broken.decide("state", [Choice("q", ["a", "b"])])
