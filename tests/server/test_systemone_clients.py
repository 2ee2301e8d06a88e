"""System One's own client and conformance suite against real deciders: a chat model's likelihoods, in steps shared with
everybody else's requests, and Laya."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typesafe_sdk
from openai import OpenAI
from tests.server.conftest import KEYS, RunningServer, start_server
from tests.server.test_hang_up import is_idle, post, tiny, wait_until
from typesafe_sdk import AsyncTypeSafeClient, Choice, Noul, RetryPolicy, Score, TypeSafeClient

from heedful import LLM
from heedful.decide import Likelihood
from heedful.decide.laya import Laya
from heedful.decide.question import questions_from_json
from heedful.testing import make_tiny_model

GOLDEN_LAYA = Path(__file__).parent.parent / "golden" / "decisions" / "laya" / "parallel"
LONG_STATE = {"mails": ["I was charged twice for order 88, and nobody answers."] * 25}
QUESTIONS: dict[str, Any] = {
    "refund": {"type": "noul", "instructions": "Is money wanted back?"},
    "team": {"type": "choice", "instructions": "Who answers?", "criteria": {"billing": "invoices", "sales": None}},
    "anger": {"type": "score", "instructions": "How upset?", "criteria": ["calm", "annoyed", "furious"]},
}
OF_THE_SDK: dict[str, Any] = {
    "refund": Noul(instructions="Is money wanted back?"),
    "team": Choice(instructions="Who answers?", criteria={"billing": "invoices", "sales": None}),
    "anger": Score(instructions="How upset?", criteria=["calm", "annoyed", "furious"]),
}


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its context holds 255 options, a token a byte."""
    return make_tiny_model(tmp_path_factory.mktemp("wide"), context_len=16384)


@pytest.fixture(scope="module")
def chatting(wide_dir: Path) -> Iterator[RunningServer]:
    running = start_server(wide_dir)
    yield running
    running.stop()


def load_laya(name: str) -> Laya:
    """With room for 255 options; its tokenizer knows so few words that some Korean has to be cut."""
    return Laya.load(str(GOLDEN_LAYA), threads=1, max_len=8000, head_max_len=8000, truncate=True)


@pytest.fixture(scope="module")
def locked_laya(wide_dir: Path) -> Iterator[RunningServer]:
    running = start_server(wide_dir, load_decider=load_laya, deciders=("laya",), api_keys=KEYS)
    yield running
    running.stop()


def conformance(server: RunningServer, folder: Path, *more: str) -> dict[str, Any]:
    report = folder / "report.json"
    command = [sys.executable, "-m", "jevcompat.cli", "test", server.url, "--json", str(report), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))["summary"]
    return found


def test_jevcompat_without_a_key(chatting: RunningServer, tmp_path: Path) -> None:
    summary = conformance(chatting, tmp_path)
    assert summary["verdict"] == "conformant"
    assert summary["MUST"] == {"passed": 32, "failed": 0, "skipped": 1, "tested": 32}
    assert summary["SHOULD"] == {"passed": 13, "failed": 0, "skipped": 2, "tested": 13}


def test_jevcompat_with_a_key(locked_laya: RunningServer, tmp_path: Path) -> None:
    summary = conformance(locked_laya, tmp_path, "--key", KEYS[0])
    assert summary["verdict"] == "conformant"
    assert summary["MUST"] == {"passed": 32, "failed": 0, "skipped": 1, "tested": 32}
    assert summary["SHOULD"] == {"passed": 15, "failed": 0, "skipped": 0, "tested": 15}


def client(server: RunningServer, **options: Any) -> TypeSafeClient:
    retry = RetryPolicy(max_retries=0)
    return TypeSafeClient(api_key="local", base_url=server.url, retry=retry, **{"timeout": 60, **options})


@pytest.mark.parametrize("compression", ["zstd", False])
def test_the_sdk_with_a_long_state(chatting: RunningServer, wide_dir: Path, compression: Any) -> None:
    """What it is told is what the decider says on a path of its own; zstd begins at 1 KiB."""
    assert len(json.dumps(LONG_STATE)) > 1024
    with client(chatting, compression=compression) as made:
        answer = made.system_one(state=LONG_STATE, questions=OF_THE_SDK)
    sent = answer.raw_http_response.request.headers
    assert sent.get("content-encoding") == (compression or None)
    assert answer.request_id.startswith("req_")
    assert answer.model == "tiny"
    expected = Likelihood(LLM(str(wide_dir), threads=1)).decide(LONG_STATE, questions_from_json(QUESTIONS))
    assert answer.nouls["refund"].noul == pytest.approx(expected["refund"].to_dict()["noul"], abs=1e-5)
    team, anger = expected["team"].to_dict(), expected["anger"].to_dict()
    assert answer.choices["team"].choice == team["choice"]
    assert answer.choices["team"].probabilities == pytest.approx(team["probabilities"], abs=1e-5)
    assert answer.choices["team"].confidence == pytest.approx(team["confidence"], abs=1e-5)
    assert list(answer.scores["anger"].probabilities.values()) == pytest.approx(
        list(anger["probabilities"].values()), abs=1e-5
    )
    assert answer.scores["anger"].legend == {0: "calm", 1: "annoyed", 2: "furious"}
    assert answer.usage.input_tokens == expected.receipt.prompt_tokens
    assert answer.usage.output_tokens == 0


def test_the_async_sdk_and_its_errors(locked_laya: RunningServer) -> None:
    async def asked() -> None:
        options: dict[str, Any] = {"base_url": locked_laya.url, "retry": RetryPolicy(max_retries=0), "timeout": 60}
        async with AsyncTypeSafeClient(api_key=KEYS[1], **options) as made:
            answer = await made.system_one(state="I was charged twice", questions=OF_THE_SDK)
            assert set(answer.answers) == set(OF_THE_SDK)
            assert answer.model == "laya"
            with pytest.raises(typesafe_sdk.TypeSafeBadRequestError, match="Unknown model: foo"):
                await made.system_one(state="x", questions=OF_THE_SDK, model="foo")
            with pytest.raises(typesafe_sdk.TypeSafeUnprocessableEntityError, match="assets"):
                await made.system_one(state="x", questions=OF_THE_SDK, extra_body={"assets": {"a": {}}})
        async with AsyncTypeSafeClient(api_key="wrong", **options) as made:
            with pytest.raises(typesafe_sdk.TypeSafeAuthenticationError, match="wrong"):
                await made.system_one(state="x", questions=OF_THE_SDK)

    asyncio.run(asked())


def test_both_kinds_of_client_read_the_list_of_models(locked_laya: RunningServer) -> None:
    with TypeSafeClient(api_key=KEYS[0], base_url=locked_laya.url) as made:
        listed = made.models.list()
    assert [model.name for model in listed.models] == ["jev-latest", "jev-preview", "laya", "tiny", "other"]
    assert "laya" in listed.models[0].description
    with OpenAI(api_key=KEYS[0], base_url=f"{locked_laya.url}/v1") as other:
        assert [model.id for model in other.models.list()] == ["tiny", "other"]


def decide(server: RunningServer) -> dict[str, Any]:
    body = {"state": LONG_STATE, "questions": QUESTIONS}
    answer = httpx.post(f"{server.url}/v1/systemone", json=body, timeout=60)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def test_decisions_and_answers_of_one_model_share_its_steps(chatting: RunningServer) -> None:
    """Neither changes the other: the same tokens and the same probabilities as alone."""
    body = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True, "temperature": 0}

    def complete() -> str:
        answer = httpx.post(f"{chatting.url}/v1/completions", json=body, timeout=60)
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["text"])

    alone, decided = complete(), decide(chatting)["answers"]
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(complete())) for _ in range(3)]
    for thread in threads:
        thread.start()
    together = [decide(chatting)["answers"] for _ in range(3)]
    for thread in threads:
        thread.join()
    assert texts == [alone] * 3
    for answers in together:
        assert answers["team"]["probabilities"] == pytest.approx(decided["team"]["probabilities"], abs=1e-5)
        assert answers["anger"]["probabilities"] == pytest.approx(decided["anger"]["probabilities"], abs=1e-5)
    wait_until(lambda: is_idle(chatting), "all requests end")


def test_the_receipt_adds_up_over_groups(chatting: RunningServer) -> None:
    """150 choices of 2 are three groups; their visits are those that the engine has counted."""
    questions = {str(i): {"type": "choice", "criteria": {f"a{i}": None, f"b{i}": None}} for i in range(150)}
    before = tiny(chatting).llm.ledger.visits
    answer = httpx.post(f"{chatting.url}/v1/systemone", json={"state": "x", "questions": questions}, timeout=60).json()
    assert list(answer["answers"]) == list(questions)
    receipt = answer["x_heedful"]
    assert receipt["questions"] == 150
    assert receipt["sequences"] == 300
    assert receipt["visits"]["total"] == tiny(chatting).llm.ledger.visits - before
    assert receipt["prompt_tokens"] == answer["usage"]["input_tokens"]
    assert receipt["visits"]["dense"] == receipt["visits"]["total"] + sum(receipt["visits"]["saved"].values())


def test_a_caller_that_hangs_up_frees_the_pages(chatting: RunningServer) -> None:
    decide(chatting)
    engine = tiny(chatting).llm.engine
    options = {f"Queue {i:03d}": f"Tickets of queue {i}" for i in range(60)}
    body = {"state": "x" * 8000, "questions": {"q": {"type": "choice", "criteria": options}}}
    connection = post(chatting, "/v1/systemone", body)
    wait_until(lambda: engine.scheduler.cache.taken_bytes > 0, "it is being read")
    connection.close()
    wait_until(lambda: is_idle(chatting), "it ends")
    assert decide(chatting)["model"] == "tiny"


def test_keys_share_no_states(wide_dir: Path) -> None:
    running = start_server(wide_dir, api_keys=KEYS)
    try:

        def cached(key: str) -> int:
            body = {"state": LONG_STATE, "questions": {"q": QUESTIONS["refund"]}}
            headers = {"authorization": f"Bearer {key}"}
            answer = httpx.post(f"{running.url}/v1/systemone", json=body, headers=headers, timeout=60).json()
            return int(answer["x_heedful"]["cached_tokens"])

        first = cached(KEYS[0])
        assert cached(KEYS[0]) > first
        assert cached(KEYS[1]) == first
    finally:
        running.stop()
