"""/v1/systemone as its contract has it (reference/systemone.md 1): examples, refusals, encodings, keys, turns."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pydantic
import pytest
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.conftest import KEYS, RunningServer, start_server
from tests.server.scripted import Scripted
from tests.server.test_any_json import VALUES, paths_of
from tests.server.test_hang_up import post, wait_until
from tests.server.test_metrics import samples, value
from typesafe_sdk._schemas.models import SystemOneRequest

from heedful.decide import Noul
from heedful.server.asks import MOST_TEXT_CHARS
from heedful.server.deciders import GROUP_LABELS, groups_of

PATH = "/v1/systemone"
NOUL = {"type": "noul", "instructions": "Is this a repeated failure?"}


@pytest.fixture(scope="module")
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture(scope="module")
def deciding(tiny_dir: Path, scripted: Scripted) -> Iterator[RunningServer]:
    running = start_server(tiny_dir, load_decider=lambda name: scripted, deciders=("scripted",), most_waiting=1)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def locked(tiny_dir: Path, scripted: Scripted) -> Iterator[RunningServer]:
    running = start_server(tiny_dir, load_decider=lambda name: scripted, deciders=("scripted",), api_keys=KEYS)
    yield running
    running.stop()


def ask(server: RunningServer, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return checked(httpx.post(server.url + PATH, content=content, headers=headers, timeout=60))


def checked(answer: httpx.Response) -> httpx.Response:
    """It has what every answer of the route has."""
    assert answer.headers["x-typesafe-request-id"].startswith("req_")
    assert answer.headers["content-type"] == "application/json"
    answer.json()
    return answer


def body_of(**questions: Any) -> dict[str, Any]:
    return {"model": "jev-latest", "state": "x", "questions": questions}


EXAMPLES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"state": "The export job died again at 02:00, third night running.", "questions": {"recurring": NOUL}},
        {"recurring": {"type": "noul", "noul": 0.97}},
    ),
    (
        {
            "state": {"ticket": {"text": "Two charges for order 88"}, "plan": "pro"},
            "questions": {
                "team": {
                    "type": "choice",
                    "instructions": "Who owns `ticket.text`?",
                    "criteria": {
                        "returns": None,
                        "billing": {"owns": ["invoices", "double charges"]},
                        "other": "anything else",
                    },
                }
            },
        },
        {
            "team": {
                "type": "choice",
                "choice": "billing",
                "probabilities": {"returns": 0.12, "billing": 0.79, "other": 0.09},
                "confidence": 0.685,
            }
        },
    ),
    (
        {
            "state": ["Where is my parcel?", "Second mail.", "I will call my bank."],
            "questions": {
                "anger": {
                    "type": "score",
                    "instructions": "How upset is the writer?",
                    "criteria": ["calm", "annoyed", {"label": "angry", "signs": ["threats"]}, "furious"],
                }
            },
        },
        {
            "anger": {
                "type": "score",
                "score": 2.0,
                "confidence": 0.5,
                "legend": {
                    "0": "calm",
                    "1": "annoyed",
                    "2": {"label": "angry", "signs": ["threats"]},
                    "3": "furious",
                },
                "probabilities": {"0": 0.05, "1": 0.15, "2": 0.55, "3": 0.25},
            }
        },
    ),
    (
        {
            "model": "jev-preview",
            "state": "배송이 안 와요. 환불해 주세요",
            "questions": {
                "환불?": {"type": "noul", "criteria": {"true": "The customer wants money back"}},
                "kind": {"type": "choice", "criteria": {"환불 요청": None, "배송 문의": None}},
            },
        },
        {
            "환불?": {"type": "noul", "noul": 0.97},
            "kind": {
                "type": "choice",
                "choice": "배송 문의",
                "probabilities": {"환불 요청": 0.03, "배송 문의": 0.97},
                "confidence": 0.94,
            },
        },
    ),
]


@pytest.mark.parametrize(("request_body", "answers"), EXAMPLES)
def test_the_examples_of_the_contract(deciding: RunningServer, request_body: Any, answers: dict[str, Any]) -> None:
    answer = ask(deciding, {"model": "jev-latest", **request_body})
    assert answer.status_code == 200, answer.text
    said = answer.json()
    assert set(said) == {"model", "answers", "usage", "x_heedful"}
    assert said["model"] == "scripted"
    assert list(said["answers"]) == list(answers)
    for name, expected in answers.items():
        found = said["answers"][name]
        assert set(found) == set(expected)
        for key, wanted in expected.items():
            assert (
                found[key] == pytest.approx(wanted)
                if isinstance(wanted, float | dict) and key != "legend"
                else (found[key] == wanted)
            )
    assert all(type(count) is int for count in said["usage"].values())


def test_what_a_decider_gets_is_what_was_sent(deciding: RunningServer, scripted: Scripted) -> None:
    ask(deciding, {**EXAMPLES[1][0], "x_trace_id": "t", "seed": 7})
    state, (question,) = scripted.asked[-1]
    assert state == EXAMPLES[1][0]["state"]
    assert question.to_dict() == EXAMPLES[1][0]["questions"]["team"]


@pytest.mark.parametrize("name", ["jev-latest", "jev-preview", "jev-1.13", "jev-1.13.0", "scripted", None])
def test_names_of_the_default_decider(deciding: RunningServer, name: str | None) -> None:
    body = body_of(q=NOUL)
    if name is None:
        del body["model"]
    else:
        body["model"] = name
    assert ask(deciding, body).json()["model"] == "scripted"


@pytest.mark.parametrize("name", ["foo", "JEV-LATEST", "jev-1.130", "jev-2", "", "x\u2028" * 300])
def test_an_unknown_model_is_named(deciding: RunningServer, name: str) -> None:
    answer = ask(deciding, {**body_of(q=NOUL), "model": name})
    assert answer.status_code == 400
    assert answer.json()["detail"]["error_type"] == "api_usage_error"
    assert answer.json()["detail"]["message"].startswith(f"Unknown model: {name[:100]}")


def test_everything_that_is_wrong_is_told_at_once(deciding: RunningServer, scripted: Scripted) -> None:
    """As pydantic has it over the wire types that the SDK carries; and nothing is computed."""
    before = len(scripted.asked)
    body = {
        "model": 3,
        "state": 7,
        "questions": {
            "a": {"type": "noul", "instructions": 7, "criteria": {"true": 1}},
            "b": {"type": "score", "criteria": {"0": "low", "1": "high"}},
            "c": {"type": "cube"},
            "d": {"type": "choice", "criteria": {"x": 1}},
            "e": {"type": "noul"},
        },
    }
    with pytest.raises(pydantic.ValidationError) as refused:
        SystemOneRequest.model_validate(body)
    expected = [(["body", *error["loc"]], error["type"]) for error in refused.value.errors()]
    answer = ask(deciding, body)
    assert answer.status_code == 422
    assert [(issue["loc"], issue["type"]) for issue in answer.json()["detail"]] == expected
    assert all(issue["msg"] for issue in answer.json()["detail"])
    assert len(scripted.asked) == before


WRONG: dict[str, tuple[Any, list[str], str]] = {
    "no state": ({"questions": {"q": NOUL}}, ["body", "state"], "missing"),
    "null state": ({"state": None, "questions": {"q": NOUL}}, ["body", "state"], "missing"),
    "no questions": ({"state": "x"}, ["body", "questions"], "missing"),
    "null questions": ({"state": "x", "questions": None}, ["body", "questions"], "dict_type"),
    "empty questions": (body_of(), ["body", "questions"], "too_short"),
    "an array": ([], ["body"], "model_attributes_type"),
    "null": (None, ["body"], "model_attributes_type"),
    "assets": ({**body_of(q=NOUL), "assets": {"a": {"type": "image"}}}, ["body", "assets"], "value_error"),
    "box": (body_of(q={"type": "box", "instructions": "the cat"}), ["body", "questions", "q"], "union_tag_invalid"),
    "401 questions": (body_of(**{str(i): NOUL for i in range(401)}), ["body", "questions"], "too_long"),
    "256 options": (
        body_of(q={"type": "choice", "criteria": {str(i): None for i in range(256)}}),
        ["body", "questions", "q", "choice", "criteria"],
        "too_long",
    ),
    "empty id": ({"state": "x", "questions": {"": NOUL}}, ["body", "questions", "", "[key]"], "string_too_short"),
    "cut off": (b'{"model": "jev-latest", "state": "x", "questions": {', ["body"], "json_invalid"),
    "nothing": (b"", ["body"], "json_invalid"),
    "NaN": (b'{"state": [NaN], "questions": {"q": {"type": "noul"}}}', ["body"], "json_invalid"),
    "Infinity": (b'{"state": [-Infinity], "questions": {"q": {"type": "noul"}}}', ["body"], "json_invalid"),
    "1e400": (b'{"state": [1e400], "questions": {"q": {"type": "noul"}}}', ["body"], "json_invalid"),
    "byte order mark": (b"\xef\xbb\xbf" + json.dumps(body_of(q=NOUL)).encode(), ["body"], "json_invalid"),
    "UTF-16": (json.dumps(body_of(q=NOUL)).encode("utf-16"), ["body"], "json_invalid"),
    "not UTF-8": (b'{"state": "\xff", "questions": {"q": {"type": "noul"}}}', ["body"], "json_invalid"),
    "half a character": (b'{"state": "\\ud800", "questions": {"q": {"type": "noul"}}}', ["body"], "json_invalid"),
    "65 levels": (
        b'{"state": ' + b"[" * 65 + b"]" * 65 + b', "questions": {"q": {"type": "noul"}}}',
        ["body", "state"],
        "value_error",
    ),
    "100,000 levels": (b'{"state": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ["body"], "value_error"),
    "a huge whole number": (
        b'{"state": [' + b"9" * 60 + b'], "questions": {"q": {"type": "noul"}}}',
        ["body", "state"],
        "value_error",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused_and_where(deciding: RunningServer, case: str) -> None:
    body, loc, kind = WRONG[case]
    answer = ask(deciding, body)
    assert answer.status_code == 422, answer.text
    (issue,) = answer.json()["detail"]
    assert (issue["loc"], issue["type"]) == (loc, kind)


def test_limits_are_included(deciding: RunningServer) -> None:
    deep = b'{"state": ' + b"[" * 64 + b"]" * 64 + b', "questions": {"q": {"type": "noul"}}}'
    assert ask(deciding, deep).status_code == 200
    wide = body_of(
        q={"type": "choice", "criteria": {str(i): None for i in range(255)}},
        r={"type": "score", "criteria": ["x"] * 10},
        one={"type": "choice", "criteria": {"": None}},
        lone={"type": "score", "criteria": ["x"]},
        bare={"type": "noul"},
        null={"type": "noul", "instructions": None, "criteria": None},
    )
    answers = ask(deciding, wide).json()["answers"]
    assert len(answers["q"]["probabilities"]) == 255
    assert sum(answers["q"]["probabilities"].values()) == pytest.approx(1)
    assert answers["one"] == {"type": "choice", "choice": "", "probabilities": {"": 1.0}, "confidence": 1.0}
    assert answers["lone"]["score"] == 0.0
    assert ask(deciding, body_of(**{str(i): NOUL for i in range(400)})).status_code == 200


def test_of_one_id_twice_the_last_counts(deciding: RunningServer) -> None:
    body = b'{"state": "x", "questions": {"q": {"type": "cube"}, "q": {"type": "noul"}}}'
    assert ask(deciding, body).json()["answers"] == {"q": {"type": "noul", "noul": 0.97}}


def test_compressed_bodies(deciding: RunningServer) -> None:
    body = json.dumps(body_of(q=NOUL)).encode()
    for encoding, content in (
        ("zstd", zstd.compress(body)),
        ("gzip", gzip.compress(body)),
        ("GZIP", gzip.compress(body)),
    ):
        assert ask(deciding, content, **{"content-encoding": encoding}).status_code == 200, encoding
    assert ask(deciding, body, **{"content-encoding": "identity"}).status_code == 200


@pytest.mark.parametrize("encoding", ["zstd", "gzip"])
def test_compressed_bodies_that_are_none(deciding: RunningServer, encoding: str) -> None:
    compress = zstd.compress if encoding == "zstd" else gzip.compress
    whole = compress(json.dumps(body_of(q=NOUL)).encode())
    for content in (b"", b"{}", whole[:-3], whole + b"x", whole + whole):
        answer = ask(deciding, content, **{"content-encoding": encoding})
        assert answer.status_code == 400, content
        assert encoding in answer.json()["detail"]["message"]
    bomb = ask(deciding, compress(b" " * (40 << 20)), **{"content-encoding": encoding})
    assert bomb.status_code == 413
    assert "16,777,216 bytes" in bomb.json()["detail"]["message"]


def test_other_encodings_and_multipart(deciding: RunningServer) -> None:
    for encoding in ("br", "gzip, zstd", "x"):
        answer = ask(deciding, body_of(q=NOUL), **{"content-encoding": encoding})
        assert answer.status_code == 415
        assert answer.json()["detail"]["error_type"] == "unsupported_media_type"
    multipart = ask(deciding, b"--x--", **{"content-type": "multipart/form-data; boundary=x"})
    assert multipart.status_code == 415
    assert "images" in multipart.json()["detail"]["message"]


def test_too_much_is_refused_with_numbers_and_never_cut(deciding: RunningServer) -> None:
    long = ask(deciding, {**body_of(q=NOUL), "state": "a" * MOST_TEXT_CHARS})
    assert long.status_code == 413
    assert long.json()["detail"]["error_type"] == "max_tokens_exceeded"
    assert f"{MOST_TEXT_CHARS:,}" in long.json()["detail"]["message"]
    big = ask(deciding, b" " * ((16 << 20) + 1))
    assert big.status_code == 413
    assert big.json()["detail"]["error_type"] == "request_too_large"
    over = ask(deciding, {**body_of(q=NOUL), "model": "tiny", "state": "a" * 3000})
    assert over.status_code == 413
    assert over.json()["detail"]["error_type"] == "max_tokens_exceeded"
    assert "the context is 2,048" in over.json()["detail"]["message"]


def test_routes_beside_it_fail_in_its_shape(deciding: RunningServer) -> None:
    for method, path, status, kind in (
        ("GET", PATH, 405, "method_not_allowed"),
        ("POST", f"{PATH}/permute", 404, "not_found"),
    ):
        answer = httpx.request(method, deciding.url + path)
        assert answer.status_code == status
        assert answer.json()["detail"]["error_type"] == kind
        assert answer.headers["x-typesafe-request-id"]
        assert answer.headers["content-type"] == "application/json"


def test_keys(deciding: RunningServer, locked: RunningServer) -> None:
    body = body_of(q=NOUL)
    assert ask(deciding, body, authorization="Bearer whatever").status_code == 200
    assert ask(locked, body, authorization=f"Bearer {KEYS[0]}").status_code == 200
    refusals: list[tuple[int, dict[str, str]]] = [
        (403, {}),
        (403, {"authorization": "Basic dTpw"}),
        (401, {"authorization": "Bearer wrong"}),
    ]
    for status, headers in refusals:
        answer = ask(locked, body, **headers)
        assert answer.status_code == status
        assert answer.json()["detail"]["error_type"] == "authentication_error"
        assert answer.json()["detail"]["message"]


def test_one_at_a_time_and_a_bounded_number_that_wait(deciding: RunningServer, scripted: Scripted) -> None:
    """One runs, one waits, the third is told to come back; a caller that hangs up leaves its place."""
    queue = deciding.state.pool._deciders["scripted"].decisions
    asked, scripted.may_go = len(scripted.asked), threading.Event()
    running = post(deciding, PATH, body_of(first=NOUL))
    wait_until(lambda: len(scripted.asked) == asked + 1, "the first one runs")
    waiting = post(deciding, PATH, body_of(second=NOUL))
    wait_until(lambda: queue.num_open == 2, "the second one waits")
    refused = ask(deciding, body_of(third=NOUL))
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 0
    assert refused.json()["detail"]["error_type"] == "rate_limit_error"
    waiting.close()
    wait_until(lambda: queue.num_open == 1, "the second one leaves")
    fourth = post(deciding, PATH, body_of(fourth=NOUL))
    wait_until(lambda: queue.num_open == 2, "the fourth one waits")
    scripted.may_go.set()
    assert b"200 OK" in fourth.recv(100)
    wait_until(lambda: queue.num_open == 0, "all have ended")
    names = [question.name for _, questions in scripted.asked[asked:] for question in questions]
    assert names == ["first", "fourth"]
    running.close()
    fourth.close()


def test_nobody_waits_for_groups_of_a_caller_that_is_gone(deciding: RunningServer, scripted: Scripted) -> None:
    asked, scripted.may_go = len(scripted.asked), threading.Event()
    queue = deciding.state.pool._deciders["scripted"].decisions
    gone = post(deciding, PATH, body_of(**{str(i): NOUL for i in range(400)}))
    wait_until(lambda: len(scripted.asked) == asked + 1, "its first group runs")
    gone.close()
    wait_until(lambda: queue.num_open == 0, "its caller has left")
    scripted.may_go.set()
    assert ask(deciding, body_of(next=NOUL)).status_code == 200
    assert [len(questions) for _, questions in scripted.asked[asked:]] == [GROUP_LABELS // 2, 1]


@given(st.lists(st.integers(1, 255), min_size=1, max_size=20))
def test_groups_keep_the_order_and_stay_small(counts: list[int]) -> None:
    from heedful.decide import Choice

    questions = [Choice(str(at), {str(i): None for i in range(count)}) for at, count in enumerate(counts)]
    groups = list(groups_of(questions))
    assert [question for group in groups for question in group] == questions
    for group in groups:
        assert group
        assert len(group) == 1 or sum(len(question.labels) for question in group) <= GROUP_LABELS
    assert list(groups_of([Noul("a"), Noul("b")])) == [(Noul("a"), Noul("b"))]


def test_decisions_are_counted(deciding: RunningServer) -> None:
    before = samples(deciding)
    ask(deciding, body_of(a=NOUL, b=NOUL, c={"type": "score", "criteria": ["x", "y"]}))
    receipt = ask(deciding, {**body_of(a=NOUL), "model": "tiny"}).json()["x_heedful"]
    after = samples(deciding)

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert grown("decisions_total", model="scripted", type="noul") == 2
    assert grown("decisions_total", model="scripted", type="score") == 1
    for kind in ("total", "dense"):
        visits = receipt["visits"][kind]
        assert grown("decision_visits_total", model="tiny", kind=kind) == visits > 0
        assert grown("visits_total", model="tiny", kind=kind) == visits
    assert grown("http_requests_total", path=PATH, status="200") == 2


TEMPLATE: dict[str, Any] = {
    "model": "jev-latest",
    "state": {"a": ["x", {"b": None}]},
    "questions": {
        "n": {"type": "noul", "instructions": "?", "criteria": {"true": "x", "false": ["y"]}},
        "c": {"type": "choice", "instructions": {"task": "?"}, "criteria": {"a": None, "b": {"x": 1}}},
        "s": {"type": "score", "instructions": None, "criteria": ["low", {"label": "high"}]},
    },
    "assets": None,
    "x": 1,
}


@pytest.fixture(scope="module")
def http(deciding: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=deciding.url, timeout=60) as made:
        yield made


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_json_anywhere(http: httpx.Client, data: st.DataObject) -> None:
    body = json.loads(json.dumps(TEMPLATE))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(list(paths_of(body))))
        holder: Any = body
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = data.draw(VALUES)
    answer = checked(http.post(PATH, content=json.dumps(body)))
    assert answer.status_code in (200, 400, 422), answer.text
    if answer.status_code == 422:
        assert all(issue["loc"][0] == "body" and issue["msg"] and issue["type"] for issue in answer.json()["detail"])
    elif answer.status_code == 400:
        assert answer.json()["detail"]["message"].startswith("Unknown model")
