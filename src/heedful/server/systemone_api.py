"""POST /v1/systemone: TypeSafe's System One API (Jev's), answered by our deciders. Not affiliated with TypeSafe.

A request is checked as a whole before anything is computed, and all that is wrong with it told at once. Extras in an
answer begin with x_: `x_heedful` is the receipt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from heedful.decide.question import MOST_LEVELS, MOST_OPTIONS, Question, questions_from_json
from heedful.decide.question_issues import Issue, question_issues, state_issues, too_long
from heedful.errors import ContextOverflow, UnknownModel, UsageError
from heedful.server.bodies import JSON, json_response, read_bytes, until_hangup
from heedful.server.deciders import MOST_QUESTIONS, decide, decider_name
from heedful.server.failures import TOO_MANY_TOKENS, HTTPFailure
from heedful.server.state import state_of

MOST_ISSUES = 1000
"""An answer tells so many; a body could have hundreds of thousands."""

Text = str | dict[str, Any] | list[Any]


class NoulQuestion(Struct, tag_field="type", tag="noul"):
    instructions: Text | None = None
    criteria: dict[Literal["true", "false"], Text | None] | None = None


class ChoiceQuestion(Struct, tag_field="type", tag="choice", kw_only=True):
    instructions: Text | None = None
    criteria: Annotated[dict[str, Text | None], Meta(min_length=1, max_length=MOST_OPTIONS)]


class ScoreQuestion(Struct, tag_field="type", tag="score", kw_only=True):
    instructions: Text | None = None
    criteria: Annotated[list[Text], Meta(min_length=1, max_length=MOST_LEVELS)]


class SystemOneBody(Struct, kw_only=True):
    """As the OpenAPI document shows it; bodies are read so that everything wrong is told."""

    model: str = "jev-latest"
    state: Text
    questions: Annotated[
        dict[Annotated[str, Meta(min_length=1)], NoulQuestion | ChoiceQuestion | ScoreQuestion],
        Meta(min_length=1, max_length=MOST_QUESTIONS),
    ]


async def system_one(request: Request) -> Response:
    if request.headers.get("content-type", "").lower().startswith("multipart/"):
        raise HTTPFailure(415, "multipart bodies are for images, which no decider here looks at: send JSON")
    server = state_of(request)
    body, questions = await asyncio.to_thread(_read, await read_bytes(request))
    try:
        name = decider_name(server.settings, body.get("model"))
    except UnknownModel as error:
        raise HTTPFailure(400, f"Unknown model: {body['model']:.100}. {error.remedy}") from error
    try:
        decision = await until_hangup(request, decide(server, name, body["state"], questions, request.state.salt))
    except ContextOverflow as error:
        raise HTTPFailure(413, f"{error.message}; nothing is cut here", code=TOO_MANY_TOKENS) from error
    except UsageError as error:
        raise _invalid([Issue((), error.message, "value_error")]) from error
    return json_response({
        "model": decision.model,
        "answers": {name: answer.to_dict() for name, answer in decision.answers.items()},
        "usage": {"input_tokens": decision.input_tokens, "output_tokens": decision.output_tokens},
        "x_heedful": decision.receipt,
    })  # fmt: skip


def _read(raw: bytes) -> tuple[JSON, tuple[Question, ...]]:
    """The body, and its questions. Raises HTTPFailure that tells everything wrong."""
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise _invalid([Issue((), f"JSON decode error: {error}", "json_invalid")]) from None
    except RecursionError:
        raise _invalid([Issue((), "Input is nested too deep", "value_error")]) from None
    issues = list(islice(_issues(body), MOST_ISSUES))
    if issues:
        raise _invalid(issues)
    return body, questions_from_json(body["questions"])


def _issues(body: Any) -> Iterator[Issue]:
    if not isinstance(body, dict):
        yield Issue((), "Input should be a valid dictionary or object to extract fields from", "model_attributes_type")
        return
    if not isinstance(body.get("model", ""), str):
        yield Issue(("model",), "Input should be a valid string", "string_type")
    if body.get("state") is None:
        yield Issue(("state",), "Field required", "missing")
    else:
        yield from state_issues(body["state"])
    if "questions" not in body:
        yield Issue(("questions",), "Field required", "missing")
    elif isinstance(body["questions"], dict) and len(body["questions"]) > MOST_QUESTIONS:
        yield too_long(("questions",), "Dictionary", len(body["questions"]), MOST_QUESTIONS)
    else:
        yield from question_issues(body["questions"])
    if body.get("assets") is not None:
        yield Issue(("assets",), "No decider here looks at images: leave assets out", "value_error")


def _invalid(issues: list[Issue]) -> HTTPFailure:
    words = "; ".join(f"{'.'.join(map(str, issue.loc)) or 'body'}: {issue.msg}" for issue in issues[:3])
    return HTTPFailure(422, words, issues=tuple(issues))
