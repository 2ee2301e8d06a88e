"""A decision model behind a URL: the hosted Jev, or any server that speaks System One.

    decider = Jev()                                  # TYPESAFE_API_KEY, TYPESAFE_BASE_URL, TYPESAFE_DEFAULT_MODEL
    decider = Jev("http://127.0.0.1:8000")           # a local server; a key only if there is one
    decider.models()                                 # what it can be asked as model=…

Probabilities are passed on as they come; choice, score and confidence are computed from them here, as for every other
decider, because servers mean different things by confidence. Not affiliated with TypeSafe.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import fsum
from typing import Any, NoReturn

from heedful import __version__
from heedful.decide.answer import Answer, Answers, ChoiceAnswer, NoulAnswer, ScoreAnswer
from heedful.decide.decider import DecisionModel
from heedful.decide.http_client import Endpoint, HttpClient, Message, Patience, Reply, retry_after
from heedful.decide.question import Noul, Question, Score, State, check_state, checked_questions
from heedful.errors import BadParameter, HeedfulError, UnknownModel, UsageError

HOSTED_URL = "https://api.typesafe.ai"
ROUTE, MODELS_ROUTE = "/v1/systemone", "/v1/models"
COMPRESS_FROM = 1024
"""Bytes; shorter bodies are sent as they are."""
MOST_SUM_ERROR = 0.05
"""How far from 1 the probabilities of an answer may sum: servers round them."""


class RemoteFailed(HeedfulError):
    """The server could not answer, or answered what the contract does not know. `status`: of HTTP; `retry_after`:
    seconds that it asked to wait, if it did."""

    def __init__(self, message: str, remedy: str = "", *, status: int = 200, retry_after: float | None = None) -> None:
        self.status = status
        self.retry_after = retry_after
        super().__init__(message, remedy)


@dataclass(frozen=True)
class RemoteReceipt:
    """What the server says it used; what it visited it does not say."""

    model: str
    questions: int
    prompt_tokens: int
    output_tokens: int
    attempts: int
    request_id: str | None
    seconds: float
    """Wall time, waits between attempts included."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": {"total": self.seconds}, "visits": None}

    def line(self) -> str:
        tries = "" if self.attempts == 1 else f" · {self.attempts} attempts"
        return f"{self.prompt_tokens:,} in · {self.output_tokens:,} out · {self.seconds:.2g} s at {self.model}{tries}"


@dataclass(frozen=True)
class RemoteModel:
    """One that a server offers; what it does not say is empty."""

    name: str
    description: str = ""
    release_date: str = ""


class Jev(DecisionModel):
    """url, key, model: default from the environment, then the hosted API's. compress: send bodies of 1 KiB and more as
    zstd, which not every compatible server reads. patience: timeouts and retries. Threads may share one: connections
    stay open for the next request."""

    def __init__(
        self,
        url: str | None = None,
        *,
        key: str | None = None,
        model: str | None = None,
        patience: Patience = Patience(),  # noqa: B008  # frozen
        compress: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        endpoint = Endpoint.parse(url or os.environ.get("TYPESAFE_BASE_URL") or HOSTED_URL, ROUTE)
        self._http = HttpClient(endpoint, patience, sleep=sleep)
        self._key = key if key is not None else os.environ.get("TYPESAFE_API_KEY", "")
        self._model = model or os.environ.get("TYPESAFE_DEFAULT_MODEL") or "jev-latest"
        self._compress = compress
        if not (self._key.isascii() and self._key.isprintable() and " " not in self._key):
            raise BadParameter("key", "must be printable ASCII without spaces", _KEY)
        if not self._key and endpoint.where == Endpoint.parse(HOSTED_URL, ROUTE).where:
            raise BadParameter("key", "the hosted API needs one", _KEY)

    @property
    def name(self) -> str:
        return self._model

    def decide(self, state: State, questions: Iterable[Question]) -> Answers:
        """Raises BadParameter before anything is sent, UsageError where the server refuses the request, UnknownModel,
        NetworkUnavailable, RemoteFailed."""
        began = time.monotonic()
        check_state(state)
        asked = checked_questions(questions)
        reply = self._http.send(self._message(state, asked))
        with self._contract(reply) as data:
            model, usage = _text(data["model"]), data.get("usage") or {}
            answers = {question.name: _answer(question, data["answers"][question.name]) for question in asked}
            read, written = _count(usage.get("input_tokens", 0)), _count(usage.get("output_tokens", 0))
        receipt = RemoteReceipt(
            model=model,
            questions=len(asked),
            prompt_tokens=read,
            output_tokens=written,
            attempts=reply.attempts,
            request_id=reply.headers.get("x-typesafe-request-id"),
            seconds=time.monotonic() - began,
        )
        return Answers(model, answers, receipt)

    def models(self) -> tuple[RemoteModel, ...]:
        """What the server lists, in its order; lists in OpenAI's form are read too. Raises as decide() does."""
        reply = self._http.send(Message("GET", MODELS_ROUTE, self._headers()))
        with self._contract(reply) as data:
            return tuple(_model(one) for one in (data["models"] if "models" in data else data["data"]))

    def close(self) -> None:
        """Close the connections that are open for the next request; it happens by itself with the last reference."""
        self._http.close()

    @contextmanager
    def _contract(self, reply: Reply) -> Iterator[Any]:
        """The JSON of a reply, for what reads it: what turns out otherwise than it has to be is named."""
        if reply.status != 200:
            self._raise(reply)
        try:
            yield json.loads(reply.body, parse_constant=_no_constant)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problem = self._without_key(f"{type(error).__name__}: {error}"[:200])
            raise RemoteFailed(
                f"{self._http.endpoint.where} answered outside of the contract: {problem}",
                "Is it a System One server? `jevcompat test URL` says what it does differently.",
            ) from None

    def _message(self, state: State, questions: tuple[Question, ...]) -> Message:
        request = {"model": self._model, "state": state, "questions": {q.name: q.to_dict() for q in questions}}
        body = json.dumps(request, default=_plain, allow_nan=False).encode()
        headers = {**self._headers(), "Content-Type": "application/json"}
        if self._compress and len(body) >= COMPRESS_FROM:
            body, headers["Content-Encoding"] = _zstd(body), "zstd"
        return Message("POST", ROUTE, headers, body)

    def _headers(self) -> dict[str, str]:
        headers = {
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "User-Agent": f"heedful/{__version__}",
        }
        return {**headers, "Authorization": f"Bearer {self._key}"} if self._key else headers

    def _raise(self, reply: Reply) -> NoReturn:
        status, where = reply.status, self._http.endpoint.where
        kind, said = _problem(reply.body)
        said = self._without_key(said)
        if status in (401, 403):
            raise UsageError(f"{where} refuses the key ({status}){said}", _KEY)
        if 300 <= status < 400:
            raise UsageError(f"{where} answers elsewhere ({status})", "Give the URL where it answers itself.")
        if status in (400, 404) and "unknown model" in said.lower():
            raise UnknownModel(self._model, [], f"Ask {where} for its list: Jev(…).models(), or GET {MODELS_ROUTE}.")
        if kind == "max_tokens_exceeded" or status == 413:
            raise UsageError(f"state and questions are too long for {where} ({status}){said}", "Shorten the state.")
        if status in (408, 429) or status >= 500:
            wait = retry_after(reply.headers)
            remedy = "Try again later." if wait is None else f"Try again in {wait:.3g} s."
            tries = f"{reply.attempts} time{'' if reply.attempts == 1 else 's'}"
            what = "is overloaded" if status in (429, 503, 529) else "failed"
            raise RemoteFailed(
                f"{where} {what} ({status}), asked {tries}{said}", remedy, status=status, retry_after=wait
            )
        raise UsageError(f"{where} refuses the request ({status}){said}", "What it says tells which field to change.")

    def _without_key(self, text: str) -> str:
        """A server may quote what it was sent."""
        return text.replace(self._key, "…") if self._key else text


_KEY = "Set TYPESAFE_API_KEY, or give key=…"


def _answer(question: Question, data: Any) -> Answer:
    """Raises ValueError, KeyError or TypeError for what is no answer to it."""
    if data["type"] != question.type:
        raise ValueError(f"an answer of type {data['type']!r:.40} to a {question.type}")
    if isinstance(question, Noul):
        return NoulAnswer(_probability(data["noul"]))
    probabilities = data["probabilities"]
    if not isinstance(probabilities, Mapping) or set(probabilities) != set(question.labels):
        raise ValueError(f"probabilities of other labels than those of the {question.type}")
    shares = [_probability(probabilities[label]) for label in question.labels]
    if abs(fsum(shares) - 1) > MOST_SUM_ERROR:
        raise ValueError(f"probabilities that sum to {fsum(shares):.4g}")
    if isinstance(question, Score):
        return ScoreAnswer(tuple(shares), tuple(question.levels))
    return ChoiceAnswer(dict(zip(question.labels, shares, strict=True)))


def _model(data: Any) -> RemoteModel:
    """Raises ValueError, KeyError or TypeError for what is no model of a list."""
    said = {key: data[key] for key in ("description", "release_date") if isinstance(data.get(key), str)}
    return RemoteModel(_text(data["name"] if "name" in data else data["id"]), **said)


def _probability(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{value!r:.40} is no probability")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r:.40} is no count of tokens")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a model that has no name")
    return value


def _problem(body: bytes) -> tuple[str, str]:
    """(error type, ": " and what the server says), each empty where it does not say."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return "", ""
    detail = data.get("detail", data.get("error", data)) if isinstance(data, Mapping) else data
    if isinstance(detail, Mapping):
        kind, message = detail.get("error_type"), detail.get("message")
        return kind if isinstance(kind, str) else "", _said(message)
    if isinstance(detail, list):
        issues = [issue for issue in detail if isinstance(issue, Mapping)]
        parts = [f"{'.'.join(map(str, _items(issue.get('loc'))))}: {issue.get('msg')}" for issue in issues]
        return "", _said("; ".join(parts))
    return "", _said(detail)


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _said(message: Any) -> str:
    """Of a stranger: cut, and on one line."""
    return f": {' '.join(message.split())[:400]}" if isinstance(message, str) and message.strip() else ""


def _plain(value: Any) -> Any:
    """Mappings that json does not know."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(type(value).__name__)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _zstd(body: bytes) -> bytes:
    """Python 3.14 has it; before, the package backports.zstd does."""
    for module in ("compression.zstd", "backports.zstd"):
        try:
            return bytes(importlib.import_module(module).compress(body))
        except ModuleNotFoundError:
            continue
    raise UsageError(
        "zstd is not there to compress requests with", "pip install backports.zstd, or leave compress out."
    )
