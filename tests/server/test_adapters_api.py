"""Adapters over HTTP: each a model of its own in the list, chosen by its name, in every API that generates."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.server.running import RunningServer, start_server

from heedful.engine.llm import LLM
from heedful.testing import make_tiny_adapter

ASKED = [{"role": "user", "content": "tell me"}]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: str(make_tiny_adapter(folder / name, seed=seed)) for seed, name in enumerate(("law", "verse"))}


@pytest.fixture(scope="module")
def served(tiny_dir: Path, adapters: dict[str, str]) -> Iterator[RunningServer]:
    running = start_server(tiny_dir, adapters=adapters)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(served: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def alone(tiny_dir: Path, adapters: dict[str, str]) -> LLM:
    """The same model and adapters without a server."""
    return LLM(str(tiny_dir), threads=1, adapters=adapters)


def receipt_of(answer: Any) -> dict[str, Any]:
    return answer.usage.model_extra["heedful"]  # type: ignore[no-any-return]


def test_each_is_listed_as_a_model_with_its_parent(client: openai.OpenAI) -> None:
    found = {model.id: model.model_extra or {} for model in client.models.list()}
    assert list(found) == ["tiny", "other", "law", "verse"]
    assert [about.get("parent") for about in found.values()] == [None, None, "tiny", "tiny"]
    assert client.models.retrieve("law").id == "law"


def test_the_model_that_a_request_names_answers(client: openai.OpenAI, alone: LLM) -> None:
    """All at once, so that steps mix them."""
    names = [None, "law", "verse", "law", None]

    def ask(name: str | None) -> Any:
        model = name or "tiny"
        return client.chat.completions.create(model=model, messages=ASKED, temperature=0, max_tokens=12)  # type: ignore[arg-type]

    with ThreadPoolExecutor(len(names)) as threads:
        answers = list(threads.map(ask, names))
    texts = [alone.chat(ASKED, max_tokens=12, adapter=name).text for name in names]
    assert [answer.choices[0].message.content for answer in answers] == texts
    assert len(set(texts)) == 3
    assert [answer.model for answer in answers] == [name or "tiny" for name in names]
    used = [receipt_of(answer)["adapter"] for answer in answers]
    assert [use and use["name"] for use in used] == names
    assert all(use is None or use["bytes_read"] > 0 for use in used)


def test_the_other_apis_know_it_too(served: RunningServer, client: openai.OpenAI, alone: LLM) -> None:
    wanted = alone.generate("once", max_tokens=8, adapter="verse").text
    completion = client.completions.create(model="verse", prompt="once", temperature=0, max_tokens=8)
    assert (completion.choices[0].text, completion.model) == (wanted, "verse")
    chat = alone.chat(ASKED, max_tokens=8, adapter="verse").text
    body = {"model": "verse", "messages": ASKED, "max_tokens": 8, "temperature": 0}
    message = httpx.post(f"{served.url}/v1/messages", json=body).json()
    assert (message["content"][0]["text"], message["model"]) == (chat, "verse")
    response = client.responses.create(model="verse", input="tell me", temperature=0, max_output_tokens=16)
    assert response.output_text == alone.chat(ASKED, max_tokens=16, adapter="verse").text
    stream = client.chat.completions.create(
        model="verse",
        messages=ASKED,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=8,
        stream=True,
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == chat


def test_decisions_are_made_through_it(served: RunningServer) -> None:
    """Its likelihoods, not the base's."""
    questions = {"go": {"type": "choice", "instructions": "Where to?", "criteria": {"left": None, "right": None}}}

    def shares(model: str) -> dict[str, float]:
        body = {"model": model, "state": "at a fork", "questions": questions}
        answer = httpx.post(f"{served.url}/v1/systemone", json=body).json()
        assert answer["model"] == model
        return answer["answers"]["go"]["probabilities"]  # type: ignore[no-any-return]

    base, law = shares("tiny"), shares("law")
    assert law != base
    assert shares("law") == law
    listed = httpx.get(f"{served.url}/v1/models").json()["models"]
    assert {"law", "verse"} <= {model["name"] for model in listed}


def test_a_name_that_nobody_has_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="prose", messages=ASKED)  # type: ignore[arg-type]
    assert refused.value.code == "model_not_found"
    assert "tiny, other, law, verse" in str(refused.value)


def test_no_vectors_are_made_with_an_adapter(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="law is an adapter") as refused:
        client.embeddings.create(model="law", input="a text")
    assert refused.value.param == "model"
