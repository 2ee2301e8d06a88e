"""The client against a server of this file that says what the contract's examples say, and what it must not."""

from __future__ import annotations

import email.utils
import json
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from heedful.decide import Choice, Jev, Noul, Score
from heedful.decide.http_client import Endpoint, Patience, retry_after
from heedful.decide.remote import RemoteFailed, RemoteModel
from heedful.errors import BadParameter, HeedfulError, NetworkUnavailable, UnknownModel, UsageError

KEY = "sk-very-secret-0123456789"
ANGER = Score("anger", ["calm", "annoyed", {"label": "angry", "signs": ["threats"]}, "furious"], "How upset?")
TEAM = Choice(
    "team",
    {"returns": None, "billing": {"owns": ["invoices", "double charges"]}, "other": "anything else"},
    "Who owns `ticket.text`?",
)
REFUND = Noul("환불?", true="The customer wants money back")
STATE = {"ticket": {"text": "Two charges for order 88"}, "plan": "pro"}
ANSWERS: dict[str, Any] = {  # reference/systemone.md 1.7
    "team": {
        "type": "choice",
        "choice": "billing",
        "probabilities": {"returns": 0.12, "billing": 0.79, "other": 0.09},
        "confidence": 0.685,
    },
    "anger": {
        "type": "score",
        "score": 2.0,
        "confidence": 0.5,
        "legend": {"0": "calm", "1": "annoyed", "2": {"label": "angry", "signs": ["threats"]}, "3": "furious"},
        "probabilities": {"0": 0.05, "1": 0.15, "2": 0.55, "3": 0.25},
    },
    "환불?": {"type": "noul", "noul": 0.97},
}
GOOD = {"model": "ours-1", "answers": ANSWERS, "usage": {"input_tokens": 73, "output_tokens": 5}, "x_extra": 1}


class Server:
    """Answers what it is told to, one reply a request, the last one again and again; keeps what it was sent."""

    def __init__(self) -> None:
        self.replies: list[tuple[int, Any, dict[str, str]]] = [(200, GOOD, {})]
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.connections = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                outer.connections += 1
                super().setup()

            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.requests.append((self.path, dict(self.headers), body))
                status, reply, headers = outer.replies.pop(0) if len(outer.replies) > 1 else outer.replies[0]
                data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)
                self.close_connection = "Content-Length" in headers

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("API_KEY", "BASE_URL", "DEFAULT_MODEL"):
        monkeypatch.delenv(f"TYPESAFE_{name}", raising=False)
    running = Server()
    yield running
    running.close()


def client(server: Server, waits: list[float] | None = None, **settings: Any) -> Jev:
    return Jev(server.url, key=KEY, sleep=[].append if waits is None else waits.append, **settings)


def test_the_request_is_the_contracts_and_the_answers_are_the_servers(server: Server) -> None:
    server.replies = [(200, GOOD, {"x-typesafe-request-id": "req_7"})]
    found = client(server).decide(STATE, [TEAM, ANGER, REFUND])
    ((path, headers, body),) = server.requests
    assert path == "/v1/systemone"
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert headers["Content-Type"] == "application/json"
    assert "X-TypeSafe-Retry-Count" not in headers
    assert json.loads(body) == {
        "model": "jev-latest",
        "state": STATE,
        "questions": {
            "team": {
                "type": "choice",
                "instructions": "Who owns `ticket.text`?",
                "criteria": {
                    "returns": None,
                    "billing": {"owns": ["invoices", "double charges"]},
                    "other": "anything else",
                },
            },
            "anger": {"type": "score", "instructions": "How upset?", "criteria": list(ANGER.levels)},
            "환불?": {"type": "noul", "criteria": {"true": "The customer wants money back"}},
        },
    }
    shown = found.to_dict()
    for name, key in (("team", "confidence"), ("anger", "confidence"), ("anger", "score")):
        assert shown["answers"][name][key] == pytest.approx(ANSWERS[name][key], abs=1e-12)
        shown["answers"][name][key] = ANSWERS[name][key]
    assert shown == {name: GOOD[name] for name in ("model", "answers", "usage")}
    receipt = found.receipt.to_dict()
    assert (receipt["prompt_tokens"], receipt["attempts"], receipt["request_id"]) == (73, 1, "req_7")
    assert found.receipt.line().startswith("73 in · 5 out · ")


def test_the_environment_says_where_and_with_which_key(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TYPESAFE_BASE_URL", server.url + "/")
    monkeypatch.setenv("TYPESAFE_API_KEY", "from-env")
    monkeypatch.setenv("TYPESAFE_DEFAULT_MODEL", "jev-1.13.0")
    Jev().decide("x", [REFUND])
    path, headers, body = server.requests[0]
    assert (path, headers["Authorization"], json.loads(body)["model"]) == (
        "/v1/systemone",
        "Bearer from-env",
        "jev-1.13.0",
    )


def test_a_server_without_keys_gets_none(server: Server) -> None:
    Jev(server.url).decide("x", [REFUND])
    assert "Authorization" not in server.requests[0][1]
    with pytest.raises(BadParameter, match="the hosted API needs one"):
        Jev()


def test_retries_wait_as_long_as_the_server_asks(server: Server) -> None:
    waits: list[float] = []
    server.replies = [
        (429, {}, {"Retry-After": "3"}),
        (529, {}, {"Retry-After-Ms": "250", "Retry-After": "9"}),
        (503, {}, {}),
        (408, {}, {"Retry-After": "soon"}),
        (200, GOOD, {}),
    ]
    found = client(server, waits, patience=Patience(retries=4)).decide("x", [REFUND])
    assert waits == [3.0, 0.25, 2.0, 4.0]
    assert found.receipt.to_dict()["attempts"] == 5
    counts = [headers.get("X-TypeSafe-Retry-Count") for _, headers, _ in server.requests]
    assert counts == [None, "1", "2", "3", "4"]


@pytest.mark.parametrize(("status", "what"), [(429, "overloaded"), (529, "overloaded"), (500, "failed")])
def test_it_gives_up_and_says_when_to_come_back(server: Server, status: int, what: str) -> None:
    waits: list[float] = []
    server.replies = [(status, {"detail": {"error_type": "busy", "message": "later"}}, {"Retry-After": "2"})]
    with pytest.raises(RemoteFailed, match=rf"{what} \({status}\), asked 3 times: later") as failed:
        client(server, waits).decide("x", [REFUND])
    assert (failed.value.status, failed.value.retry_after, waits) == (status, 2.0, [2.0, 2.0])
    assert "in 2 s" in failed.value.remedy


def test_a_wait_beyond_patience_is_not_waited_for(server: Server) -> None:
    waits: list[float] = []
    server.replies = [(429, {}, {"Retry-After": "20"})]
    with pytest.raises(RemoteFailed, match="asked 2 times") as failed:
        client(server, waits).decide("x", [REFUND])
    assert (waits, failed.value.retry_after) == ([20.0], 20.0)


def test_waits_can_be_dates_and_are_never_negative() -> None:
    def header(**fields: str) -> Any:
        return email.message_from_string("".join(f"{k.replace('_', '-')}: {v}\n" for k, v in fields.items()))

    later = retry_after(header(Retry_After=email.utils.formatdate(time.time() + 600, usegmt=True)))
    assert later is not None
    assert 0 < later <= 600
    assert retry_after(header(Retry_After="Wed, 21 Oct 2015 07:28:00 GMT")) == 0
    assert retry_after(header(Retry_After="-5")) == 0
    assert retry_after(header(Retry_After_Ms="1500")) == 1.5
    for text in ("inf", "nan", "tomorrow", ""):
        assert retry_after(header(Retry_After=text)) is None
    assert retry_after(header()) is None


REFUSALS: list[tuple[int, Any, type[HeedfulError], str]] = [
    (401, {"detail": {"error_type": "authentication_error", "message": f"no: {KEY}"}}, UsageError, "(401): no: …"),
    (403, {"detail": {"error_type": "authentication_error", "message": "none"}}, UsageError, "refuses the key (403)"),
    (400, {"detail": {"error_type": "api_usage_error", "message": "Unknown model: foo"}}, UnknownModel, "jev-latest"),
    (400, {"detail": {"error_type": "max_tokens_exceeded"}}, UsageError, "too long"),
    (413, {"detail": "64,001 tokens of 64,000"}, UsageError, "too long for 127.0.0.1"),
    (400, {"detail": "Too many choices."}, UsageError, "refuses the request (400): Too many choices."),
    (
        422,
        {"detail": [{"loc": ["body", "questions", "u", "score", "criteria"], "msg": "Input should be a valid list"}]},
        UsageError,
        "(422): body.questions.u.score.criteria: Input should be a valid list",
    ),
    (422, {"error": {"message": "openai says\nno"}}, UsageError, "(422): openai says no"),
    (404, b"<html>", UsageError, "refuses the request (404)"),
    (302, b"", UsageError, "answers elsewhere (302)"),
]  # fmt: skip


@pytest.mark.parametrize(("status", "reply", "kind", "message"), REFUSALS)
def test_refusals_are_named_errors_and_not_tried_again(
    server: Server, status: int, reply: Any, kind: type[HeedfulError], message: str
) -> None:
    server.replies = [(status, reply, {"Location": "http://127.0.0.1:1/"})]
    with pytest.raises(kind) as refused:
        client(server).decide("x", [REFUND])
    assert message in refused.value.message
    assert refused.value.remedy
    assert len(server.requests) == 1
    assert KEY not in "".join(traceback.format_exception(refused.value))


def answer(name: str, **fields: Any) -> dict[str, Any]:
    return {**GOOD, "answers": {**ANSWERS, name: {**ANSWERS[name], **fields}}}


BROKEN: dict[str, Any] = {
    "no JSON": b"<html>hello",
    "half": b'{"model": "x"',
    "deep": b"[" * 100_000,
    "a list": [1],
    "null": None,
    "no model": {"answers": ANSWERS, "usage": {}},
    "an answer is missing": {**GOOD, "answers": {"team": ANSWERS["team"], "anger": ANSWERS["anger"]}},
    "another type": answer("team", type="noul"),
    "an answer is a list": {**GOOD, "answers": {**ANSWERS, "team": []}},
    "a label too many": answer("team", probabilities={"returns": 0.1, "billing": 0.7, "other": 0.1, "x": 0.1}),
    "a label too few": answer("team", probabilities={"returns": 0.2, "billing": 0.8}),
    "levels by name": answer("anger", probabilities={"calm": 1, "annoyed": 0, "angry": 0, "furious": 0}),
    "sums to two": answer("team", probabilities={"returns": 0.8, "billing": 0.7, "other": 0.5}),
    "negative": answer("team", probabilities={"returns": -0.1, "billing": 1.0, "other": 0.1}),
    "above one": answer("환불?", noul=1.01),
    "a noul that is a word": answer("환불?", noul="yes"),
    "a noul that is a bool": answer("환불?", noul=True),
    "not a number": json.dumps(answer("환불?", noul=float("nan"))).encode(),
    "huge": json.dumps(answer("환불?", noul=0.5)).encode().replace(b"0.5", b"1e999"),
    "beyond any float": json.dumps(answer("환불?", noul=0.5)).encode().replace(b"0.5", b"1" + b"0" * 400),
    "tokens as text": {**GOOD, "usage": {"input_tokens": "73"}},
    "usage is a list": {**GOOD, "usage": [1]},
}


@pytest.mark.parametrize("case", BROKEN)
def test_answers_outside_of_the_contract_are_refused(server: Server, case: str) -> None:
    server.replies = [(200, BROKEN[case], {})]
    with pytest.raises(RemoteFailed, match="outside of the contract"):
        client(server).decide(STATE, [TEAM, ANGER, REFUND])


def test_whole_numbers_are_probabilities_and_usage_may_be_missing(server: Server) -> None:
    reply = {"model": "m", "answers": {"환불?": {"type": "noul", "noul": 1}}}
    server.replies = [(200, reply, {})]
    assert client(server).decide([], [REFUND]).to_dict() == {
        "model": "m",
        "answers": {"환불?": {"type": "noul", "noul": 1.0}},
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }


def test_a_body_that_breaks_off_is_asked_for_again(server: Server) -> None:
    server.replies = [(200, b'{"model"', {"Content-Length": "900"}), (200, GOOD, {})]
    assert client(server).decide("x", [REFUND]).receipt.to_dict()["attempts"] == 2


def test_a_connection_serves_the_next_request_too(server: Server) -> None:
    decider = client(server)
    for _ in range(3):
        decider.decide("x", [REFUND])
    assert (len(server.requests), server.connections) == (3, 1)
    decider.close()
    decider.decide("x", [REFUND])
    decider.decide("x", [REFUND])  # a closed one works on, and keeps nothing
    assert server.connections == 3


def test_a_connection_that_the_server_has_closed_is_made_anew_at_once(server: Server) -> None:
    waits: list[float] = []
    whole = str(len(json.dumps(GOOD)))  # with a length the server of this file closes, and does not announce it
    server.replies = [(200, GOOD, {"Content-Length": whole}), (200, GOOD, {})]
    decider = client(server, waits)
    receipts = [decider.decide("x", [REFUND]).receipt.to_dict() for _ in range(2)]
    assert [receipt["attempts"] for receipt in receipts] == [1, 1]
    assert (len(server.requests), server.connections, waits) == (2, 2, [])


@pytest.mark.parametrize("answer", [(200, GOOD, {"Connection": "close"}), (200, b"{", {"Content-Length": "9"})])
def test_a_connection_that_is_over_is_not_kept(server: Server, answer: Any) -> None:
    server.replies = [answer, (200, GOOD, {}), (200, GOOD, {})]
    decider = client(server)
    decider.decide("x", [REFUND])
    decider.decide("x", [REFUND])
    assert server.connections == 2


def test_threads_share_a_client(server: Server) -> None:
    decider = client(server)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: decider.decide("x", [REFUND])["환불?"].value, range(60)))
    assert found == [True] * 60
    assert 1 <= server.connections <= 6


def test_the_models_of_a_server(server: Server) -> None:
    """As the contract has them, and as servers of the OpenAI kind do."""
    named = {"name": "jev-latest", "description": "Fast", "release_date": "2026-09-15", "size": 3}
    server.replies = [
        (200, {"models": [named, {"name": "b"}]}, {}),
        (200, {"data": [{"id": "c", "object": "model"}]}, {}),
    ]
    decider = client(server)
    assert decider.models() == (RemoteModel("jev-latest", "Fast", "2026-09-15"), RemoteModel("b"))
    assert decider.models() == (RemoteModel("c"),)
    (path, headers, body), _ = server.requests
    assert (path, headers["Authorization"], body) == ("/v1/models", f"Bearer {KEY}", b"")


@pytest.mark.parametrize("reply", [{"models": 3}, {"models": [{}]}, {"models": ["a"]}, {"data": [{"id": 4}]}, [], b"<"])
def test_lists_of_models_that_are_none(server: Server, reply: Any) -> None:
    server.replies = [(200, reply, {})]
    with pytest.raises(RemoteFailed, match="outside of the contract"):
        client(server).models()


def test_nobody_there_and_nobody_answering() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(NetworkUnavailable, match=r"could not be reached or broke off .*, 3 times"):
            Jev(url, key=KEY, sleep=[].append).decide("x", [REFUND])
        silent.listen()  # connections are made, and nothing is ever read
        with pytest.raises(NetworkUnavailable, match=r"did not answer within 0\.05 s, 1 time") as gone:
            Jev(url, key=KEY, patience=Patience(timeout=0.05, retries=0)).decide("x", [REFUND])
    assert KEY not in "".join(traceback.format_exception(gone.value))


def test_bad_input_is_refused_before_anything_is_sent(server: Server) -> None:
    for state, questions in ((None, [REFUND]), ("x", []), ("x", [REFUND, REFUND])):
        with pytest.raises(BadParameter):
            client(server).decide(state, questions)  # type: ignore[arg-type]
    assert server.requests == []


def test_long_bodies_are_compressed_where_that_is_asked_for(server: Server) -> None:
    zstd = pytest.importorskip("backports.zstd")
    decider = client(server, compress=True)
    decider.decide("short", [REFUND])
    decider.decide("long " * 400, [REFUND])
    (_, short, _), (_, long, body) = server.requests
    assert "Content-Encoding" not in short
    assert long["Content-Encoding"] == "zstd"
    assert json.loads(zstd.decompress(body))["state"] == "long " * 400


@pytest.mark.parametrize("key", ["a b", "a\r\nX: y", "schlüssel", "\x7f"])
def test_keys_that_no_header_can_carry(key: str) -> None:
    with pytest.raises(BadParameter) as refused:
        Jev("http://127.0.0.1:1", key=key)
    assert key not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8000", "ftp://x", "http://", "http://u:secret@x", "http://x?y=1", "http://x:99999", "http://x/a b"],
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(BadParameter) as refused:
        Endpoint.parse(url, "/v1/systemone")
    assert refused.value.field == "url"
    assert "secret" not in str(refused.value)


def test_urls() -> None:
    for url in ("https://x.example", "https://x.example/", "https://x.example/v1/systemone"):
        assert Endpoint.parse(url, "/v1/systemone").base == ""
    assert Endpoint.parse("http://[::1]:8000/base/", "/v1/systemone") == Endpoint("http", "::1", 8000, "/base")


@pytest.mark.parametrize(
    "settings",
    [
        {"timeout": 0},
        {"timeout": float("inf")},
        {"timeout": 10**400},
        {"most_waiting": float("nan")},
        {"retries": -1},
        {"retries": 1.5},
        {"most_waiting": "3"},
    ],
)
def test_patience_that_is_none(settings: dict[str, Any]) -> None:
    with pytest.raises(BadParameter):
        Patience(**settings)


def test_a_client_shows_no_key(server: Server) -> None:
    assert KEY not in repr(client(server))
    assert KEY not in str(client(server))
