"""A view of an answer from the server: made on request, for its own caller, and opened from the page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.browser import opened
from tests.server.running import KEYS, RunningServer, start_server

from heedful.request import Request
from heedful.server import view_api
from heedful.server.view_api import Answered, Views
from heedful.testing import make_tiny_model

ENTER = "\ue007"


@pytest.fixture(scope="module")
def viewed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = start_server(make_tiny_model(tmp_path_factory.mktemp("viewed"), context_len=1024), api_keys=KEYS)
    yield running
    running.stop()


def client(server: RunningServer, key: str = KEYS[0]) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=60)


def answer(one: httpx.Client, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "x" * 300}], "max_tokens": 10, **more}
    usage = one.post("/v1/chat/completions", json=body).raise_for_status().json()["usage"]
    receipt: dict[str, Any] = usage["heedful"]
    return receipt


def data_of(html: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(html.partition('id="data">')[2].partition("</script>")[0])
    return found


def test_a_view_has_the_receipt_and_adds_up_to_it(viewed: RunningServer) -> None:
    with client(viewed) as one:
        receipt = answer(one, heedful={"window": 64, "sinks": 4})
        assert receipt["visits"]["saved"]["window"]
        made = one.post("/view", json={"receipt": receipt})
        assert made.status_code == 201, made.text
    response = httpx.get(viewed.url + made.json()["url"])  # a link brings no key
    assert response.status_code == 200
    rules = response.headers["content-security-policy"]
    assert rules.startswith("default-src 'none'; script-src 'sha256-")
    assert response.headers["cache-control"] == "no-store"
    view = data_of(response.text)
    assert view["receipt"] == receipt
    sums = {part: sum(step.get(part, 0) for step in view["steps"]) for part in ("window", "sink", "saved_window")}
    assert sums["window"] + sums["sink"] == receipt["visits"]["total"]
    assert sums["saved_window"] == receipt["visits"]["saved"]["window"]


def test_only_its_own_caller_finds_an_answer(viewed: RunningServer) -> None:
    with client(viewed) as one, client(viewed, KEYS[1]) as other:
        receipt = answer(one)
        refused = other.post("/view", json={"receipt": receipt})
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "answer_gone"
        assert httpx.post(f"{viewed.url}/view", json={"receipt": receipt}).status_code == 401
    assert httpx.get(f"{viewed.url}/view/view_0123456789").status_code == 404
    assert httpx.get(f"{viewed.url}/view/../metrics", follow_redirects=False).status_code in (401, 404)


def test_without_torch_it_says_so(viewed: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from heedful.view import network

    monkeypatch.setattr(network, "has_torch", lambda: False)
    with client(viewed) as one:
        refused = one.post("/view", json={"receipt": answer(one)})
    assert refused.status_code == 400
    assert "pip install 'heedful[torch]'" in refused.json()["error"]["message"]


def test_what_is_too_long_or_stopped_in_between_is_refused(
    viewed: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_api, "MOST_TOKENS", 100)
    with client(viewed) as one:
        refused = one.post("/view", json={"receipt": answer(one)})
    assert refused.status_code == 400
    assert re.search(r"3\d\d tokens are more than 100", refused.json()["error"]["message"])


def test_answers_and_pages_are_bounded(viewed: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from heedful.engine.llm import LLM

    llm = LLM(str(viewed.model_dir), threads=1)
    views, answers = Views(), [llm.generate("hello", max_tokens=3) for _ in range(4)]
    monkeypatch.setattr(view_api, "MOST_ANSWERS", 3)
    for completion in answers:
        views.keep(Answered("tiny", completion, Request((1,), cache_salt="a")))
    found = [views.find("a", one.receipt.to_dict()["seconds"]) is not None for one in answers]
    assert found == [False, True, True, True]
    assert views.find("b", answers[-1].receipt.to_dict()["seconds"]) is None
    monkeypatch.setattr(view_api, "MOST_ANSWER_TOKENS", 20)
    views.keep(Answered("tiny", answers[0], Request((1,), cache_salt="a")))
    found = [views.find("a", one.receipt.to_dict()["seconds"]) is not None for one in answers]
    assert found == [True, False, False, True], "two of 8 tokens each fit"
    names = [views.add_page(str(number)) for number in range(view_api.MOST_PAGES + 1)]
    assert views.page(names[0]) is None
    assert views.page(names[-1]) == str(view_api.MOST_PAGES)


def test_the_page_opens_it(tmp_path: Path, tiny_dir: Path) -> None:
    running = start_server(tiny_dir, history_path=str(tmp_path / "page.sqlite"))
    try:
        with opened(tmp_path / "profile") as browser:
            browser.open(running.url)
            browser.ask("hello")
            total = browser.bar()["full"]
            browser.driver.refresh()  # a kept receipt still names its answer
            browser.until(lambda: browser.num_finished() == 1, "the conversation")
            browser.js("document.querySelector('.look button').focus()")
            browser.keys(ENTER)
            browser.until(lambda: browser.js("return document.activeElement.href"), "the link has the focus")
            browser.driver.get(browser.js("return document.activeElement.href"))
            browser.until(lambda: browser.text("#total"), "the view")
            assert browser.text("#total") == f"{total:,}"
            assert browser.complaints() == []
    finally:
        running.stop()
