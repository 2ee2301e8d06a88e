"""The model `auto` as a client meets it: OpenAI's own against a server with a policy, which has another server, and an
endpoint that misbehaves, among its targets."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.router.policies import Keyed, policy_of
from tests.router.upstream import Upstream, upstream
from tests.server.running import RunningServer, start_server

from heedful.decide.question import Question, State
from heedful.router.ledger import read_ledger

ASKED: list[Any] = [{"role": "user", "content": "Say something."}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
]
POLICY = """\
version: 1
targets:
  labels: {kind: decider, model: keyed, question: [good, bad], say: {good: It is good.}}
  small: {kind: local, model: tiny, max_tokens: 90}
  drafted: {kind: local, model: tiny, max_tokens: 4, verify: {regex: zebra}, escalate: other}
  other: {kind: openai, base_url: "UP/v1", model: tiny, retries: 0, timeout_s: 60}
  broken: {kind: openai, base_url: "BROKEN", model: m, retries: 0}
  cut: {kind: openai, base_url: "CUT", model: m, retries: 0}
  busy: {kind: openai, base_url: "BUSY", model: m, retries: 0}
  paced: {kind: openai, base_url: "PACED", model: m, retries: 0, timeout_s: 60}
constraints:
  - {if: has_pii, never: [other]}
rules:
  - {match: '^broken\\b', to: broken}
  - {match: '^alone\\b', to: cut}
  - {match: '^busy\\b', to: busy}
  - {match: '^paced\\b', to: paced}
  - {match: '^draft\\b', to: drafted}
  - {match: '^other\\b', to: other}
  - {match: '^short\\b', to: small, max_tokens: 3}
decision:
  model: keyed
  timeout_s: 60
  questions: {intent: [sentiment, chat]}
routes:
  - {to: labels, when: intent == "sentiment", min_p: 0.8}
default: small
fallbacks: {broken: small, other: small}
"""


def says(state: State, question: Question) -> list[float]:
    is_sentiment = "review" in str(state)
    return [0.9, 0.1] if is_sentiment or question.name == "label" else [0.1, 0.9]


@pytest.fixture(scope="module")
def bad() -> Iterator[Upstream]:
    with upstream() as made:
        yield made


@pytest.fixture(scope="module")
def up(tiny_dir: Path) -> Iterator[RunningServer]:
    running = start_server(tiny_dir)
    yield running
    running.stop()


@contextmanager
def serving(
    folder: Path, tiny_dir: Path, up: RunningServer, bad: Upstream, more: str = "", **settings: Any
) -> Iterator[RunningServer]:
    text = POLICY.replace("UP", up.url) + more
    for mode in ("BROKEN", "CUT", "BUSY", "PACED"):
        text = text.replace(mode, bad.base_url(mode.lower()))
    policy = policy_of(folder, text)
    running = start_server(tiny_dir, load_decider=lambda name: Keyed(says), policy=policy, **settings)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def routed(
    tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path, up: RunningServer, bad: Upstream
) -> Iterator[RunningServer]:
    with serving(tmp_path_factory.mktemp("policy"), tiny_dir, up, bad) as running:
        yield running


@pytest.fixture(scope="module")
def client(routed: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{routed.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


def ask(client: openai.OpenAI, text: str, **more: Any) -> tuple[Any, str, str]:
    """(the answer, the target, the reason)"""
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 8, **more}
    raw = client.chat.completions.with_raw_response.create(
        model="auto", messages=[{"role": "user", "content": text}], **body
    )
    return raw.parse(), raw.headers["x-heedful-route"], raw.headers["x-heedful-route-reason"]


def route_of(answer: Any) -> dict[str, Any]:
    route: dict[str, Any] = answer.usage.model_extra["heedful"]["route"]
    return route


# ---- Who answers --------------------------------------------------------------------------------------------------


def test_a_local_answer_is_the_models_own(client: openai.OpenAI) -> None:
    direct = client.chat.completions.create(model="tiny", messages=ASKED, temperature=0, max_tokens=8)
    answer, target, reason = ask(client, "Say something.")
    assert answer.choices[0].message.content == direct.choices[0].message.content
    assert (target, reason) == ("small", "default: no route fits")
    assert answer.model == "tiny"
    route = route_of(answer)
    assert (route["target"], route["cause"], route["hops"]) == ("small", "default: no route fits", [])
    assert answer.usage.model_extra["heedful"]["visits"]["total"] > 0


def test_limits_of_the_target_and_of_the_rule_hold(client: openai.OpenAI) -> None:
    counts = [
        ask(client, text, max_tokens=most, extra_body={"ignore_eos": True})[0].usage.completion_tokens
        for text, most in (("long", 500), ("short", 500), ("short", 2))
    ]
    assert counts == [90, 3, 2]


def test_a_decision_is_an_answer_without_a_token(client: openai.OpenAI) -> None:
    answer, target, reason = ask(client, "Is this review good?")
    assert answer.choices[0].message.content == "It is good."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 0
    assert (target, reason) == ("labels", "route 1, p 0.900 against 0.800")
    chunks = list(
        client.chat.completions.create(
            model="auto", messages=[{"role": "user", "content": "Is this review good?"}], stream=True
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "It is good."
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_another_heedful_answers_and_its_receipt_is_in_ours(client: openai.OpenAI, up: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{up.url}/v1", api_key="none") as there:
        direct = there.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "other"}], temperature=0, max_tokens=8
        )
    answer, target, _ = ask(client, "other")
    assert target == "other"
    assert answer.choices[0].message.content == direct.choices[0].message.content
    theirs, ours = (one.usage.model_extra["heedful"] for one in (direct, answer))
    assert ours["visits"]["dense"] == theirs["visits"]["dense"]
    assert (ours["remote"], ours["route"]["cause"]) == ("other", "rule 6")


@pytest.mark.parametrize("text", ["Say something.", "other"])
def test_streams_are_the_same_answer(client: openai.OpenAI, text: str) -> None:
    whole, _, _ = ask(client, text)
    body: dict[str, Any] = {"model": "auto", "messages": [{"role": "user", "content": text}], "temperature": 0}
    raw = client.chat.completions.with_raw_response.create(
        **body, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(raw.parse())
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert raw.headers["x-heedful-route"] == route_of(chunks[-1])["target"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    without = list(client.chat.completions.create(**body, max_tokens=8, stream=True))
    assert all(chunk.choices for chunk in without)


@pytest.mark.parametrize("text", ["Say something.", "other"])
def test_tool_calls_come_through(client: openai.OpenAI, text: str) -> None:
    more = {"tools": TOOLS, "max_tokens": 90, "tool_choice": "required"}
    answer, _, _ = ask(client, text, **more)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("now", {})
    assert answer.choices[0].finish_reason == "tool_calls"
    body: Any = {"model": "auto", "messages": [{"role": "user", "content": text}], "temperature": 0, **more}
    with client.chat.completions.stream(**body) as stream:
        final = stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or ()
    assert streamed.function.name == "now"


def test_metrics_count_who_answered(client: openai.OpenAI, routed: RunningServer) -> None:
    def counts() -> dict[str, float]:
        lines = httpx.get(f"{routed.url}/metrics").text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("heedful_routes_total{")]
        return {name.removeprefix("heedful_routes_total"): float(value) for name, value in pairs}

    before = counts()
    ask(client, "Say something.")
    ask(client, "broken")
    grown = {name: value - before.get(name, 0.0) for name, value in counts().items()}
    assert grown['{by="choice",target="small"}'] == grown['{by="stand-in",target="small"}'] == 1


# ---- What goes wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_fallback_is_said_aloud(client: openai.OpenAI, stream: bool) -> None:
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "stream": stream}
    raw = client.chat.completions.with_raw_response.create(
        model="auto", messages=[{"role": "user", "content": "broken"}], **body
    )
    assert raw.headers["x-heedful-route"] == "small"
    assert raw.headers["x-heedful-route-reason"] == (
        "broken: answers HTTP 500: out of luck; fallback from broken (rule 1)"
    )
    if not stream:
        assert route_of(raw.parse())["hops"] == [{"target": "broken", "failure": "answers HTTP 500: out of luck"}]


def test_without_a_fallback_the_failure_is_the_answer(client: openai.OpenAI, routed: RunningServer) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        ask(client, "alone")
    assert caught.value.status_code == 502
    assert "target cut could not be reached or broke off" in str(caught.value)
    body = {"model": "auto", "messages": [{"role": "user", "content": "alone"}], "stream": True}
    events = httpx.post(f"{routed.url}/v1/chat/completions", json=body).text.split("\n\n")
    assert "Hel" in events[1]
    assert "in the middle of the answer" in events[2]
    assert "target_failed" in events[2]


def test_how_long_an_endpoint_asks_to_wait_is_passed_on(client: openai.OpenAI) -> None:
    with pytest.raises(openai.RateLimitError) as caught:
        ask(client, "busy")
    assert caught.value.response.headers["retry-after"] == "77"


def test_a_forbidden_target_is_not_asked(client: openai.OpenAI, up: RunningServer) -> None:
    before = up.state.metrics.text()
    answer, target, reason = ask(client, "other, write to jane@example.org")
    assert (target, reason) == ("small", "default: no route fits")
    assert route_of(answer)["forbidden"] == ["other"]
    assert up.state.metrics.text() == before


def test_bad_requests_end_before_anybody_is_asked(client: openai.OpenAI) -> None:
    for more in ({"temperature": 9}, {"max_tokens": 0}, {"extra_body": {"heedful": {"windw": 3}}}):
        with pytest.raises(openai.BadRequestError):
            ask(client, "broken", **more)


def test_auto_is_among_the_models(client: openai.OpenAI) -> None:
    assert "auto" in [model.id for model in client.models.list()]


def test_there_is_no_auto_without_a_policy(up: RunningServer) -> None:
    answer = httpx.post(f"{up.url}/v1/chat/completions", json={"model": "auto", "messages": ASKED})
    assert answer.status_code == 404


def until(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_closes_the_endpoint(
    routed: RunningServer, bad: Upstream, up: RunningServer, stream: bool
) -> None:
    bad.may_go_on.clear()
    before = bad.hung_up["paced"]
    body = {"model": "auto", "messages": [{"role": "user", "content": "paced"}], "stream": stream}
    with httpx.Client(timeout=30) as there:
        if stream:
            with there.stream("POST", f"{routed.url}/v1/chat/completions", json=body) as answer:
                lines = answer.iter_lines()
                assert "Hel" in [next(lines) for _ in range(3)][2]  # it has come, though the rest is not sent
        else:
            with pytest.raises(httpx.ReadTimeout):
                there.post(f"{routed.url}/v1/chat/completions", json=body, timeout=0.5)
    until(lambda: bad.hung_up["paced"] > before, "the endpoint is hung up on")


# ---- The ledger ---------------------------------------------------------------------------------------------------


def test_the_ledger_sums_to_the_engines_counters(
    tmp_path: Path, tiny_dir: Path, up: RunningServer, bad: Upstream
) -> None:
    """Answers whole, streamed, abandoned, drafted in vain, run beside others: all that the engine did is booked."""
    path = tmp_path / "ledger.jsonl"
    more = f"ledger: {{path: {path}, fsync: never}}\ncounterfactual: {{share: 1, targets: [small]}}\n"
    with serving(tmp_path, tiny_dir, up, bad, more) as running:
        url = f"{running.url}/v1/chat/completions"

        def post(text: str, **fields: Any) -> httpx.Response:
            said = {"model": "auto", "messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
            return httpx.post(url, json=said, timeout=60)

        for text in ("one", "short", "broken", "draft", "other", "Is this review good?"):
            post(text, max_tokens=8)
        post("streamed", max_tokens=8, stream=True)
        post("several", max_tokens=8, n=3)
        said = {"model": "auto", "messages": [{"role": "user", "content": "left"}], "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url, json={**said, "heedful": {"kv": "q8"}}, timeout=60) as answer:
            next(answer.iter_lines())
        until(lambda: path.read_text().count('"kind": "request"') == 9, "all requests are booked")
        until(lambda: path.read_text().count('"kind": "counterfactual"') >= 2, "what was drawn is booked")
        hosted = running.state.pool.find("tiny")
        until(lambda: hosted.service is not None and hosted.service.num_open == 0, "the engine is idle")
        engine = hosted.llm.ledger
        lines = read_ledger(path)
        mine = [part for line in lines for part in line["spent"] if part["target"] in ("small", "drafted")]
        assert sum(part["visits"]["total"] for part in mine) == engine.visits
        assert sum(part["output_tokens"] for part in mine) == engine.output_tokens
        assert sum(part["joules"] for part in mine) == pytest.approx(engine.joules)
        assert len(mine) == engine.requests
    drafted = next(line for line in lines if line["hops"] and line["hops"][0]["target"] == "drafted")
    assert [(part["target"], part["phase"]) for part in drafted["spent"]] == [
        ("drafted", "wasted"),
        ("other", "answer"),
    ]
    assert drafted["target"] == "other"
    review = next(line for line in lines if line["target"] == "labels")
    assert [part["phase"] for part in review["spent"]] == ["router", "answer"]
    assert review["slice"] == {"share": 1.0, "is_in": True}
    left = [line for line in lines if line["finish"] == "cancelled"]
    assert len(left) == 1
    assert left[0]["spent"]
    beside = [line for line in lines if line["kind"] == "counterfactual"]
    assert {line["target"] for line in beside} == {"small"}
    assert {line["id"] for line in beside} <= {line["id"] for line in lines if line["kind"] == "request"}
    assert "Say" not in path.read_text()
    assert "review" not in path.read_text()
