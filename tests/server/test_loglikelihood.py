"""Log-likelihoods as lm-eval asks for them (its local-completions model), against the plain model in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tests.server.conftest import RunningServer

from heedful.engine.torch_runner import TorchRunner
from heedful.kernels.attention import DenseAttend
from heedful.weights.load import load

CONTEXTS = ["The capital of France is", "Two and two make", "a" * 100]
ENDINGS = [" Paris", " four, as everybody knows.", "b"]


@pytest.fixture(scope="module")
def logprobs_of(tiny_dir: Path) -> Any:
    """Token ids → (T - 1, vocab) log-probabilities of every next token, all attended densely."""
    loaded = load(str(tiny_dir))
    runner = TorchRunner(loaded.config, loaded.weights, capacity_tokens=64, threads=1)

    def compute(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            hidden = runner.decoder(torch.tensor(ids), torch.arange(len(ids)), DenseAttend([len(ids)]))
            return torch.log_softmax(runner.decoder.logits(hidden).double(), dim=-1)[:-1]

    return compute


def encode(server: RunningServer, text: str) -> list[int]:
    answer = httpx.post(f"{server.url}/tokenize", json={"content": text})
    tokens: list[int] = answer.json()["tokens"]
    return tokens


def ask(server: RunningServer, prompts: Any, **more: Any) -> list[dict[str, Any]]:
    """The body that lm-eval sends."""
    body = {
        "model": "tiny",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    exact = {"heedful": {"kv": "f32"}}
    answer = httpx.post(f"{server.url}/v1/completions", json={**body, **exact, **more})
    answer.raise_for_status()
    return sorted(answer.json()["choices"], key=lambda choice: choice["index"])


def parsed(choice: dict[str, Any], context_len: int) -> tuple[float, bool]:
    """As lm-eval reads it: the sum over the ending, and whether greedy decoding would have said it."""
    logprobs = choice["logprobs"]
    total = sum(logprobs["token_logprobs"][context_len:-1])
    greedy = True
    for token, top in zip(logprobs["tokens"][context_len:-1], logprobs["top_logprobs"][context_len:-1], strict=True):
        greedy &= token == max(top, key=top.get)
    return total, greedy


def test_batches_of_token_ids_give_the_models_own_likelihoods(server: RunningServer, logprobs_of: Any) -> None:
    cases = [(encode(server, context), encode(server, ending)) for context in CONTEXTS for ending in ENDINGS]
    for _ in range(2):  # again, when the prefixes are in the cache
        choices = ask(server, [context + ending for context, ending in cases])
        for (context, ending), choice in zip(cases, choices, strict=True):
            ids = context + ending
            expected = logprobs_of(ids)[len(context) - 1 :]
            total, greedy = parsed(choice, len(context))
            assert total == pytest.approx(float(expected.gather(1, torch.tensor(ending)[:, None]).sum()), abs=2e-3)
            assert greedy == bool((expected.argmax(dim=1) == torch.tensor(ending)).all())


def test_the_greedy_continuation_is_found_to_be_greedy(server: RunningServer, logprobs_of: Any) -> None:
    ids = encode(server, CONTEXTS[0])
    context_len = len(ids)
    for _ in range(5):
        ids.append(int(logprobs_of([*ids, 0])[-1].argmax()))
    (choice,) = ask(server, [ids])
    assert parsed(choice, context_len)[1] is True


def test_columns_have_one_entry_a_token_and_the_first_has_none(server: RunningServer) -> None:
    ids = encode(server, CONTEXTS[1])
    for max_tokens in (0, 1, 5):
        (choice,) = ask(server, ids, max_tokens=max_tokens, ignore_eos=True)
        logprobs = choice["logprobs"]
        assert {len(column) for column in logprobs.values()} == {len(ids) + max_tokens}
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
        assert choice["text"].startswith(CONTEXTS[1])
        assert choice["finish_reason"] == "length"


def test_a_text_gives_what_its_tokens_give(server: RunningServer) -> None:
    (of_text,) = ask(server, CONTEXTS[0])
    (of_ids,) = ask(server, encode(server, CONTEXTS[0]))
    assert of_text["logprobs"] == of_ids["logprobs"]


def test_tokens_that_are_no_text_are_told_apart(server: RunningServer) -> None:
    """A byte of a character is no text of its own, and different bytes must not share a name."""
    (choice,) = ask(server, "é", logprobs=20)
    assert choice["logprobs"]["tokens"][:2] == ["bytes:\\xc3", "bytes:\\xa9"]
    top = choice["logprobs"]["top_logprobs"][1]
    assert len(top) == 20
    assert np.all(np.diff(list(top.values())) <= 0)


def test_a_stream_has_the_same_columns(server: RunningServer) -> None:
    text = "Once 🙂 upon"
    for max_tokens in (0, 12):
        more = {"max_tokens": max_tokens, "ignore_eos": True, "logprobs": 2}
        (whole,) = ask(server, text, **more)
        body = {"model": "tiny", "prompt": text, "temperature": 0, "seed": 1234, "echo": True, "heedful": {"kv": "f32"}}
        answer = httpx.post(f"{server.url}/v1/completions", json={**body, **more, "stream": True})
        events = [json.loads(line[6:])["choices"][0] for line in answer.text.split("\n") if line.startswith("data: {")]
        columns: dict[str, list[Any]] = {}
        for event in events:
            for name, column in (event["logprobs"] or {}).items():
                columns.setdefault(name, []).extend(column)
        assert columns == whole["logprobs"]
        assert "".join(event["text"] for event in events) == whole["text"]


def test_offsets_are_places_in_the_text(server: RunningServer) -> None:
    text = "é🙂 ok"
    (choice,) = ask(server, text, max_tokens=0)
    offsets = choice["logprobs"]["text_offset"]
    # every byte is a token: two of é, four of the smile
    assert offsets == [0, 0, 1, 1, 1, 1, 2, 3, 4]
